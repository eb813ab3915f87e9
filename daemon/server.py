"""The daemon's life: start in order, serve, look after things, reload, drain, stop.

Owns the order in which parts are made and ended, the signals, and the words to systemd. The parts know nothing of it.
What can be wrong is found before anything is reserved or bound: configuration, ISA, plan, sockets, in this order.

READY is sent when the sockets are served; models that the last life of the daemon left in the service manager's store
are ready before that. Models with autoload load after it, with their progress in STATUS=: a worker that attaches
meanwhile is told that its model is loading, and tries again.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import secrets
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syshax.errors import ConfigError, HardwareError, NotSupervisedError
from syshax.protocol import ConfigChangeAnswer, ModelState, OperatorLibrary, StartOption
from syshaxd.adoption import adopt_kept
from syshaxd.cache.directory import CacheDirectory
from syshaxd.cache.packed_cache import PackedCache
from syshaxd.config import Config
from syshaxd.config_files import ConfigFiles
from syshaxd.core import Core, core_errors
from syshaxd.keeping import Keeper, Store
from syshaxd.live_config import LiveConfig
from syshaxd.logs import set_up_logging
from syshaxd.machine import Machine, raise_open_files_limit
from syshaxd.operators.libraries import check_formats, load_directory
from syshaxd.planner import Plan, make_plan
from syshaxd.quantities import format_cpus
from syshaxd.registry import Registry
from syshaxd.sessions import Sessions
from syshaxd.sockets import Listeners, open_listeners
from syshaxd.status import SAMPLE_SECONDS, Parts, Reporter, version
from syshaxd.systemd import Notifier, take_handed, watchdog_seconds

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger(__name__)
EXIT_UNDRAINED = 4
EXIT_RESTART = 75
EXIT_FORCED = 130


@dataclass(frozen=True)
class Options:
    """The command line. `user`: private directory, no groups, the own user is administrator."""

    files: ConfigFiles
    runtime_dir: Path
    user: bool
    cache_dir: Path | None = None
    """Where packed models lie when cache.directory is empty; None: nowhere."""
    start: tuple[StartOption, ...] = ()
    """What `config show --origin` tells of it."""


def check_start(core: Core, config: Config) -> tuple[Plan, list[OperatorLibrary]]:
    """All that can be checked without reserving or binding anything, and the operator libraries, loaded or refused.

    Raises HardwareError, ConfigError."""
    libraries = load_directory(core, config.operators.directory)
    check_formats(core, config, libraries)
    with core_errors(core):
        core.isa_effective(config.compute.isa)
        topology = core.topology()
    if not topology["nodes"]:
        raise HardwareError("the machine's topology shows no NUMA node", "is /sys mounted?")
    return make_plan(topology, config.compute, Machine.read()), libraries


class Server:
    """`await Server(core, options).run()` gives the exit code."""

    def __init__(self, core: Core, options: Options) -> None:
        self._core, self._options = core, options
        handed = take_handed()
        loaded = options.files.load()
        self._config = LiveConfig(
            options.files, loaded, lambda config: check_formats(core, config, self.parts.libraries), options.start
        )
        config = loaded.config
        set_up_logging(config.logging)
        plan, libraries = check_start(core, config)
        self._listeners: Listeners = open_listeners(
            options.runtime_dir, config.access.group, options.user, handed.sockets, config.access.view_group
        )
        with core_errors(core):
            runtime = core.Runtime(
                [node.as_core_plan() for node in plan.nodes],
                config.compute.isa,
                plan.spin_us,
                config.compute.huge_pages,
                config.compute.chunk_tokens,
            )
            topology = core.topology()
        boot_id = secrets.token_bytes(16)
        current = self._config.current
        keeper = Keeper(Store())
        folder = Path(config.cache.directory) if config.cache.directory else options.cache_dir
        directory = CacheDirectory(folder) if folder else None
        cache = PackedCache(core, runtime, plan, lambda: current().cache, directory)
        registry = Registry(core, runtime, plan, current, keeper, cache, core.isa_effective(config.compute.isa))
        adoption = adopt_kept(core, runtime, plan, config, keeper, handed.others)
        for packed, model in adoption.models.values():
            registry.adopt(packed, model)
        self._load_again = tuple(adoption.load_again.values())
        sessions = Sessions(core, runtime, plan, registry, current, boot_id)
        self.parts = Parts(
            core, runtime, plan, registry, sessions, self._config, boot_id, config.compute.isa, topology,
            self._listeners.group_found, cache, libraries, self._listeners.view_trouble,
        )  # fmt: skip
        self._reporter = Reporter(self.parts)
        self._notifier = Notifier()
        self._stop = asyncio.Event()
        self._restart, self._drains = False, True
        self._rescheduling: asyncio.Future[None] | None = None
        self.serving = asyncio.Event()
        """Set when the sockets are served."""

    def stop(self) -> None:
        """Asks for an orderly stop, as SIGTERM does."""
        self._stop.set()

    def restart(self, drain: bool) -> None:
        """Asks for a stop after which the service manager starts the next daemon. Raises NotSupervisedError."""
        if not self._notifier.supervised:
            raise NotSupervisedError(
                f"no service manager started this daemon (pid {os.getpid()}): nobody would start it again",
                f"stop it with `kill {os.getpid()}`, which drains, then start it as before; models are loaded anew",
            )
        log.info("a restart was asked for%s", "" if drain else ", without draining")
        self._restart, self._drains = True, drain
        self._stop.set()

    async def run(self) -> int:
        """Serves until it is told to stop. Gives 0, EXIT_UNDRAINED where accepted requests had to be given up, or
        EXIT_RESTART where another daemon is to follow."""
        parts = self.parts
        self._install_signals()
        raise_open_files_limit()
        with core_errors(self._core):
            parts.runtime.start()
            await parts.sessions.apply_configuration()
        attach = asyncio.create_task(parts.sessions.serve(self._listeners.attach), name="attach")
        control = await self._serve_control()
        caretaker = asyncio.create_task(self._look_after(), name="caretaker")
        parts.state = "ready"
        self._notifier.ready(self._status_line())
        self._listeners.announce(parts.boot)
        self.serving.set()
        self._log_start()
        parts.cache.start()
        for request in self._load_again:
            parts.registry.load_again(request)
        parts.registry.autoload()
        parts.registry.save_adopted()
        prefault = asyncio.create_task(parts.registry.prefault(), name="prefault")
        await self._first_end(self._stop.wait(), attach, caretaker)
        try:
            return await self._drain(attach)
        finally:
            await asyncio.wait([prefault])
            caretaker.cancel()
            for runner in control:
                await runner.cleanup()
            await asyncio.to_thread(parts.runtime.stop)
            self._listeners.close()
            log.info("stopped")

    async def _serve_control(self) -> list[web.AppRunner]:
        serving = await asyncio.to_thread(importlib.import_module, "syshaxd.control.serving")
        runners: list[web.AppRunner] = await serving.serve_control(
            self.parts,
            self._reporter,
            self._listeners,
            self._options.user,
            self._change_config,
            self.restart,
        )
        return runners

    @staticmethod
    async def _first_end(wait: Awaitable[object], *tasks: asyncio.Task[None]) -> None:
        """Until the stop is asked for; a task that ends before is a fault of ours, and ends the daemon."""
        stop = asyncio.ensure_future(wait)
        waiting: set[asyncio.Future[Any]] = {stop, *tasks}
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        for task in done - {stop}:
            task.result()

    def _log_start(self) -> None:
        plan = self.parts.plan
        log.info(
            "syshaxd %s serves in %s", version(), self._options.runtime_dir,
            extra={"isa": self._core.isa_effective(self.parts.isa_cap), "boot_id": self.parts.boot},
        )  # fmt: skip
        for node in plan.nodes:
            log.info("node %d: %d threads on CPUs %s", node.node, len(node.cpus), format_cpus(node.cpus))
        for library in self.parts.libraries:
            if library.loaded:
                log.info("operator library %s", library.path, extra={"kernels": ",".join(library.kernels)})
        for warning in self._reporter.warnings():
            log.warning("%s", warning)
        if not self._listeners.group_found:
            log.warning("there is no group %s: only root can connect", self._config.current().access.group)

    # ----------------------------------------------------------------- while it runs

    async def _look_after(self) -> None:
        """Samples, sessions, STATUS= and the watchdog, which lives on the data plane's own turning."""
        watchdog = watchdog_seconds()
        period = min(SAMPLE_SECONDS, watchdog / 3) if watchdog else SAMPLE_SECONDS
        next_sample = 0.0
        while True:
            if time.monotonic() >= next_sample:
                next_sample = time.monotonic() + SAMPLE_SECONDS
                self._reporter.sample()
                await self.parts.sessions.look_after()
                self._notifier.status(self._status_line())
            if watchdog and self.parts.runtime.stats()["heartbeat_age_ns"] / 1e9 < watchdog:
                self._notifier.alive()
            await asyncio.sleep(period)

    def _status_line(self) -> str:
        parts = self.parts
        entries = list(parts.registry.entries())
        ready = sum(entry.state is ModelState.READY for entry in entries)
        words = [f"{parts.state}: {ready} models, {len(parts.sessions)} sessions"]
        for entry in entries:
            if entry.state is ModelState.LOADING and entry.progress.layers_total:
                words.append(
                    f"loading {entry.name}: {entry.progress.layers_done} of {entry.progress.layers_total} layers"
                )
            elif entry.state is ModelState.FAILED:
                words.append(f"{entry.name} failed")
        return "; ".join(words)

    def _change_config(self, change: Callable[[], ConfigChangeAnswer]) -> ConfigChangeAnswer:
        """Makes the change and gives it to the parts that do not look by themselves."""
        before = self._config.current()
        answer = change()
        config = self._config.current()
        if config.logging != before.logging:
            set_up_logging(config.logging)
        if config.scheduling != before.scheduling:
            self._rescheduling = asyncio.ensure_future(self.parts.sessions.apply_configuration())
        known = frozenset(name for name, model in before.models.items() if model.autoload)
        self.parts.registry.autoload(known)
        log.info("configuration changed: %s", answer.message)
        return answer

    def _reload(self) -> None:
        self._notifier.reloading()
        try:
            self._change_config(lambda: self._config.reload(self.parts.boot))
        except ConfigError as error:
            log.error("the configuration is not reloaded: %s", error)
        self._notifier.ready(self._status_line())

    def _install_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop, number)
        loop.add_signal_handler(signal.SIGHUP, self._reload)

    def _on_stop(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            log.warning("second %s: stopping at once", number.name)
            self._listeners.close()
            logging.shutdown()
            os._exit(EXIT_FORCED)
        log.info("%s: stopping", number.name)
        self._stop.set()

    # ------------------------------------------------------------------------ the end

    async def _drain(self, attach: asyncio.Task[None]) -> int:
        """No new clients, no new requests; accepted ones finish, within the limit."""
        parts = self.parts
        limit = self._config.current().limits.drain_seconds if self._drains else 0
        parts.state = "draining"
        self._notifier.stopping(f"draining {len(parts.sessions)} sessions")
        attach.cancel()
        await asyncio.wait([attach])
        parts.sessions.refuse_new()
        parts.registry.cancel_loads()
        self._listeners.close_attach()
        drained = await asyncio.to_thread(parts.runtime.drain, float(limit))
        if not drained and self._drains:
            log.warning("requests were still computing after %d s (limits.drain_seconds)", limit)
        await parts.sessions.close("the daemon stops")
        await parts.registry.close()
        await asyncio.to_thread(parts.cache.stop)
        if self._restart:
            return EXIT_RESTART
        return 0 if drained else EXIT_UNDRAINED
