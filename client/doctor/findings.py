"""Making of findings, and what a set of them comes to. Owns the exit status of `syshaxctl doctor`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from syshax.errors import SyshaxError
from syshax.protocol import Check

T = TypeVar("T")


def fine(name: str, message: str) -> Check:
    return Check(name=name, ok=True, level="ok", message=message)


def warning(name: str, message: str, cost: str, hint: str) -> Check:
    """cost: what it costs whoever leaves it so; hint: the command that mends it."""
    return Check(name=name, ok=False, level="warning", message=message, cost=cost, hint=hint)


def error(name: str, message: str, cost: str, hint: str) -> Check:
    return Check(name=name, ok=False, level="error", message=message, cost=cost, hint=hint)


def run_all(checks: Iterable[Callable[[T], Iterator[Check]]], subject: T) -> list[Check]:
    """All checks; one that fails itself is reported as such and hides no other."""
    found: list[Check] = []
    for check in checks:
        try:
            found.extend(check(subject))
        except (OSError, ValueError, SyshaxError) as failure:
            name = check.__name__.lstrip("_").replace("_", " ")
            found.append(
                warning(
                    name, f"could not be checked: {failure}", "what it looks for stays unknown", "see the daemon's log"
                )
            )
    return found


def exit_status(checks: Iterable[Check]) -> int:
    """0: all is well, 1: warnings, 2: errors. A check that failed without saying how badly is an error."""
    worst = 0
    for check in checks:
        if not check.ok:
            worst = max(worst, 1 if check.level == "warning" else 2)
    return worst
