"""A booted systemd with syshax installed, for tests: what `make install` gives, in a throw-away container.

Owns the way in and out of the container (sdbox.sh) and waiting for units. Tests say what must be true of them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SDBOX = Path(__file__).with_name("sdbox.sh")
PACKAGES = "/usr/lib64/syshax/python:/usr/lib64/syshax/vendor"
PROGRAMS = "/usr/local/lib/syshax-tests"
USERS = """u alice - "may attach" /home/alice /bin/sh
m alice syshax
u bob - "administrator" /home/bob /bin/sh
m bob syshax
m bob syshax-admin
u carol - "stranger" /home/carol /bin/sh
"""


def install(layer: Path, **variables: str) -> Path:
    """packaging/install.sh into `layer`, with the units enabled as the package's presets say, and the tests' own users
    and programs. SYSHAX_CORE_DIR names the built core where it is not in build/core."""
    environment = {
        "DESTDIR": str(layer),
        "ENVIRONMENT_PYTHON": sys.executable,
        "CORE": os.environ.get("SYSHAX_CORE_DIR", str(ROOT / "build/core")),
    }
    subprocess.run([ROOT / "packaging/install.sh"], check=True, env=os.environ | environment | variables)
    units = ["syshaxd.socket", "syshaxd.service", "syshax-api.socket", "syshax-api.service"]
    subprocess.run(["systemctl", f"--root={layer}", "--quiet", "preset", *units], check=True, stderr=subprocess.DEVNULL)
    (layer / "usr/lib/sysusers.d/syshax-tests.conf").write_text(USERS)
    programs = layer / PROGRAMS.lstrip("/")
    programs.mkdir(parents=True)
    for program in Path(__file__).parent.glob("inside_*.py"):
        shutil.copy(program, programs)
    return layer


class Box:
    """`with Box("name", layer) as box`: boots, and leaves nothing behind. root: a tree instead of the machine's own;
    shown: folders of the machine and where the box sees them, read-only."""

    def __init__(self, name: str, layer: Path, root: Path = Path("/"), shown: Mapping[str, str] | None = None) -> None:
        self.name, self._layer, self._root = f"{name}-{os.getpid()}", layer, root
        self._shown = " ".join(f"{outside}:{inside}" for outside, inside in (shown or {}).items())

    def __enter__(self) -> Box:
        self._sdbox("up", str(self._root))
        return self

    def __exit__(self, *_: object) -> None:
        self._sdbox("down")

    def _sdbox(self, verb: str, *words: str) -> str:
        environment = os.environ | {"SDBOX_LAYER": str(self._layer), "SDBOX_BIND_RO": self._shown}
        done = subprocess.run(
            [SDBOX, verb, self.name, *words], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"sdbox {verb}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def reboot(self) -> None:
        self._sdbox("reboot")

    def path(self, inside: str) -> Path:
        """A file of the box as seen from here."""
        return Path(self._sdbox("root")) / inside.lstrip("/")

    def write(self, inside: str, text: str, mode: int = 0o644) -> None:
        file = self.path(inside)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)

    def popen(self, *command: str, user: str = "root") -> subprocess.Popen[str]:
        """A process inside, standard output and error together. It has the user's groups, as after a login."""
        switch = [] if user == "root" else ["runuser", "-u", user, "--"]
        words = [SDBOX, "exec", self.name, *switch, *command]
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def try_run(self, *command: str, user: str = "root", timeout: float = 60) -> tuple[int, str]:
        """Exit status and output."""
        process = self.popen(*command, user=user)
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return process.returncode, output.strip()

    def run(self, *command: str, user: str = "root", timeout: float = 60) -> str:
        status, output = self.try_run(*command, user=user, timeout=timeout)
        assert status == 0, f"{' '.join(command)}: exit status {status}\n{output}\n{self.journal()[-3000:]}"
        return output

    def python(self, program: str, *words: str) -> Sequence[str]:
        """The command that runs one of the tests' programs with the installed packages."""
        return ["env", f"PYTHONPATH={PACKAGES}", "/usr/bin/python3", "-s", f"{PROGRAMS}/{program}", *words]

    # ------------------------------------------------------------------------------- units

    def systemctl(self, *words: str) -> str:
        return self.run("systemctl", "--no-pager", *words, timeout=120)

    def show(self, unit: str, property: str) -> str:
        return self.systemctl("show", "-p", property, "--value", unit)

    def main_pid(self, unit: str = "syshaxd.service") -> int:
        return int(self.show(unit, "MainPID"))

    def journal(self, unit: str = "syshaxd.service") -> str:
        return self.try_run("journalctl", "--no-pager", "-o", "cat", "-u", unit)[1]

    def drop_in(self, unit: str, text: str) -> None:
        self.write(f"/etc/systemd/system/{unit}.d/90-test.conf", text)
        self.systemctl("daemon-reload")

    def remove_drop_in(self, unit: str) -> None:
        self.path(f"/etc/systemd/system/{unit}.d/90-test.conf").unlink(missing_ok=True)
        self.systemctl("daemon-reload")

    def wait(self, what: str, condition: Callable[[], bool], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}\n{self.journal()[-3000:]}"
            time.sleep(0.1)

    def is_active(self, unit: str = "syshaxd.service") -> bool:
        return self.try_run("systemctl", "is-active", "--quiet", unit)[0] == 0

    def wait_ready(self, model: str = "tiny") -> None:
        """Until the daemon is up and holds the configured model."""
        self.run("syshaxctl", "--timeout", "60", "load", "--name", model, "--wait", timeout=120)
