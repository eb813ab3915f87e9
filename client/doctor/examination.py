"""Everything that `syshaxctl doctor` looks at, put together.

The caller's side always; machine and daemon through the daemon where it answers, the machine alone where it does not.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from syshax.control import Control
from syshax.doctor.caller import ADMIN_GROUP, Caller, check_caller
from syshax.doctor.findings import run_all
from syshax.doctor.machine import check_machine, memory_lock
from syshax.doctor.snapshot import Snapshot
from syshax.errors import SyshaxError
from syshax.protocol import PROTOCOL_VERSION, RING_VERSION, Check, DoctorAnswer
from syshax.sockets import GROUP


def examine(control: Control, snapshot: Snapshot | None = None) -> DoctorAnswer:
    """The daemon's answer (empty where there is none) with the checks of this side before it. Raises nothing of the
    daemon's: that it does not answer is a finding."""
    snapshot = snapshot or Snapshot.read(groups=(GROUP, ADMIN_GROUP))
    failure: SyshaxError | None = None
    answer = DoctorAnswer(boot_id="", checks=[])
    try:
        answer = control.get("/v1/doctor", DoctorAnswer)
    except SyshaxError as error:
        failure = error
    caller = Caller(snapshot, control.path.parent, failure, answer.versions, own_versions())
    machine: list[Check] = check_machine(snapshot) if failure is not None else []
    own = [*check_caller(caller), *run_all((memory_lock,), snapshot)]
    return answer.model_copy(update={"checks": [*own, *machine, *answer.checks]})


def own_versions() -> dict[str, str]:
    try:
        package = version("syshax")
    except PackageNotFoundError:
        package = "0+source"
    return {"syshax": package, "protocol": str(PROTOCOL_VERSION), "ring": str(RING_VERSION)}
