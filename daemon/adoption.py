"""At start: which models of the daemon's last life serve on, which are loaded anew, and what is thrown away.

Owns the decision. A kept model is used only when its manifest is whole, this version would have packed it the same way,
and the configuration still wants it; else it leaves the store with a line in the log, and a load is started where
somebody wanted the model. No byte of weights is read. Runs before a socket is served.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from syshax.errors import CheckpointError, SyshaxError
from syshax.protocol import LoadRequest
from syshaxd import loader
from syshaxd.config import Config
from syshaxd.core import Core, CoreModel, CoreRuntime, core_errors
from syshaxd.keeping import Found, Keeper, sort_handed
from syshaxd.manifest import PackedModel, UnusableError, check_usable, configured_as, stamps
from syshaxd.planner import Plan
from syshaxd.quantities import human_size

log = logging.getLogger(__name__)


@dataclass
class Adoption:
    """What became of the kept models."""

    models: dict[str, tuple[PackedModel, CoreModel]] = field(default_factory=dict)
    load_again: dict[str, LoadRequest] = field(default_factory=dict)

    @property
    def held(self) -> int:
        return sum(packed.total_bytes for packed, _ in self.models.values())


def adopt_kept(
    core: Core,
    runtime: CoreRuntime,
    plan: Plan,
    config: Config,
    keeper: Keeper,
    handed: Iterable[tuple[str, int]],
) -> Adoption:
    """Takes the descriptors over, whatever becomes of them."""
    adoption = Adoption()
    kept, strangers = sort_handed(handed)
    for name, descriptor in strangers:
        log.warning("descriptor %r in the service manager's store is none of ours: removed", name)
        os.close(descriptor)
        keeper.remove(name)
    for found in kept:
        packed = None
        try:
            packed = found.manifest()
            packed, model = _adopted(core, runtime, plan, config, adoption, found, packed)
        except (UnusableError, SyshaxError) as error:
            log.warning("the kept weights of %s are discarded: %s", found.model, error, extra={"model": found.model})
            for name in found.names:
                keeper.remove(name)
            request = _load_request(config, found.model, packed)
            if request is not None:
                adoption.load_again.setdefault(found.model, request)
        else:
            adoption.models[found.model] = packed, model
            keeper.adopted(found, packed)
            log.info(
                "%s serves on: %s were kept", packed.name, human_size(packed.total_bytes), extra={"model": packed.name}
            )
        finally:
            found.close()
    for name in adoption.models:
        adoption.load_again.pop(name, None)
    return adoption


def _adopted(
    core: Core,
    runtime: CoreRuntime,
    plan: Plan,
    config: Config,
    adoption: Adoption,
    found: Found,
    packed: PackedModel,
) -> tuple[PackedModel, CoreModel]:
    """Raises UnusableError or one of the core's errors."""
    if found.model in adoption.models:
        raise UnusableError("another load of it serves already")
    _check_wanted(config, packed, adoption.held)
    check_usable(core, runtime, plan, packed, config.compute.huge_pages)
    packed = _check_checkpoint(packed)
    with core_errors(core):
        return packed, runtime.adopt_model(packed.name, packed.core_geometry, packed.format, found.descriptors())


def _check_wanted(config: Config, packed: PackedModel, held: int) -> None:
    now, then = configured_as(config, packed.name), packed.configured
    if now != then and (now is None or (Path(now.path), now.format) != (Path(packed.path), packed.format)):
        says = f"{now.path} as {now.format}" if now else "nothing of it"
        raise UnusableError(f"it is {packed.path} as {packed.format}, the configuration now says {says}")
    if not config.allows_format(packed.format):
        raise UnusableError(f"the format {packed.format} is not allowed any more (precision.allowed_formats)")
    if config.memory.limit and held + packed.total_bytes > config.memory.limit:
        raise UnusableError(
            f"it holds {human_size(packed.total_bytes)}; memory.limit is {human_size(config.memory.limit)}, of which "
            f"{human_size(held)} are in use"
        )


def _check_checkpoint(packed: PackedModel) -> PackedModel:
    """The files that it was read from must look the same, or have the same fingerprint; then it is given with what they
    look like now, so that the next restart need not read them again. A checkpoint that is not to be seen now proves
    nothing against weights that are there."""
    path = Path(packed.path)
    try:
        seen = stamps({name: path / name for name in packed.files})
        if seen == packed.files:
            return packed
        fingerprint = loader.inspect(path, packed.format).fingerprint
    except (OSError, CheckpointError) as error:
        log.warning("%s serves on, though its checkpoint cannot be read now: %s", packed.name, error)
        return packed
    if fingerprint != packed.fingerprint:
        raise UnusableError(f"the checkpoint in {path} is another one now")
    return packed.model_copy(update={"files": seen})


def _load_request(config: Config, name: str, packed: PackedModel | None) -> LoadRequest | None:
    """What gives the model back: as it was, or as the configuration says now. None: nobody wants it any more."""
    now = configured_as(config, name)
    if packed is not None and packed.configured == now:
        return LoadRequest(name=name, path=packed.path, format=packed.format)
    return LoadRequest(name=name, path=now.path, format=now.format) if now else None
