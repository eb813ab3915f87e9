"""The one error tree: every failure a user can meet, its code, its HTTP status and its exit code.

Both the daemon and the client raise these; over the control API and the attach socket they travel as
`ErrorBody` (see `syshax.protocol`) and arrive as the same class. A message says what is wrong, where and
with which value; `hint` says what helps. Adding an error is adding one class here.
"""

from __future__ import annotations

from typing import ClassVar


class SyshaxError(Exception):
    """Base of all errors. `code` is stable and public; `http_status` is used by the control API."""

    code: ClassVar[str] = "internal"
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class InternalError(SyshaxError):
    """A fault of ours; the log has the traceback."""


class ConfigError(SyshaxError):
    code, http_status, exit_code = "config", 400, 2


class InvalidArgumentError(SyshaxError):
    """A request whose fields make no sense: shapes, ids, dtypes, limits."""

    code, http_status, exit_code = "invalid_argument", 400, 2


class NotAllowedError(SyshaxError):
    """The peer's user may not do this."""

    code, http_status, exit_code = "not_allowed", 403, 4


class UnknownModelError(SyshaxError):
    code, http_status, exit_code = "unknown_model", 404, 5


class UnknownSessionError(SyshaxError):
    code, http_status, exit_code = "unknown_session", 404, 5


class NotFoundError(SyshaxError):
    """A route, key or file that does not exist."""

    code, http_status, exit_code = "not_found", 404, 5


class ModelNotReadyError(SyshaxError):
    """Known, but loading, failed or unloading; the message gives the state and, when failed, the reason."""

    code, http_status, exit_code = "model_not_ready", 409, 6


class ModelInUseError(SyshaxError):
    code, http_status, exit_code = "model_in_use", 409, 6


class ModelExistsError(SyshaxError):
    """The name is taken by another checkpoint or format."""

    code, http_status, exit_code = "model_exists", 409, 6


class NotSupervisedError(SyshaxError):
    """Nobody would start the daemon again."""

    code, http_status, exit_code = "not_supervised", 409, 6


class CheckpointError(SyshaxError):
    """A checkpoint that is missing, broken or that this version cannot compute correctly."""

    code, http_status, exit_code = "checkpoint", 422, 7


class FingerprintError(SyshaxError):
    """The worker's checkpoint is not the one that the daemon holds."""

    code, http_status, exit_code = "fingerprint", 409, 7


class NoMemoryError(SyshaxError):
    """Memory, shared memory, huge pages or a configured limit is too small; the message has the numbers."""

    code, http_status, exit_code = "no_memory", 507, 8


class LimitError(SyshaxError):
    """A configured limit (sessions, tokens, slots) is reached."""

    code, http_status, exit_code = "limit", 429, 8


class HardwareError(SyshaxError):
    """CPUs, nodes, kernels or ISA that this machine does not have."""

    code, http_status, exit_code = "hardware", 422, 2


class SessionEndedError(SyshaxError):
    """The daemon ended this session for good: it was kicked, or its client broke the ring."""

    code, http_status, exit_code = "session_ended", 410, 6


class CancelledError(SyshaxError):
    code, http_status, exit_code = "cancelled", 409, 6


class DaemonAbsentError(SyshaxError):
    """No daemon listens on the socket."""

    code, http_status, exit_code = "daemon_absent", 503, 3


class DaemonLostError(SyshaxError):
    """The daemon went away while a request was outstanding."""

    code, http_status, exit_code = "daemon_lost", 503, 3


class ShuttingDownError(SyshaxError):
    code, http_status, exit_code = "shutting_down", 503, 3


class RequestTimeoutError(SyshaxError):
    code, http_status, exit_code = "timeout", 504, 9


class TooLargeError(SyshaxError):
    """A request's body is larger than the configured limit."""

    code, http_status, exit_code = "too_large", 413, 2


class VersionError(SyshaxError):
    """Client and daemon speak different protocol or ring versions."""

    code, http_status, exit_code = "version", 426, 3


def _all_errors() -> dict[str, type[SyshaxError]]:
    found: dict[str, type[SyshaxError]] = {}
    todo: list[type[SyshaxError]] = [SyshaxError]
    while todo:
        cls = todo.pop()
        found[cls.code] = cls if cls is not SyshaxError else InternalError
        todo.extend(cls.__subclasses__())
    found["internal"] = InternalError
    return found


ERRORS: dict[str, type[SyshaxError]] = _all_errors()


def error_from_code(code: str, message: str, hint: str = "") -> SyshaxError:
    """The error of that code; an unknown code (a newer peer's) becomes `InternalError` and is named."""
    cls = ERRORS.get(code)
    return cls(message, hint) if cls else InternalError(f"{code}: {message}", hint)
