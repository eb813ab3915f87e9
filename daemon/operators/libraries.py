"""Which operator libraries are loaded: where they are looked for, who may have written them, and what came of each.

A library's code runs with the daemon's rights as soon as it is opened, so whoever can write to it, or to a directory on
the way to it, owns the daemon. That is decided here; what is wrong inside a library is found by the core.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from syshax.errors import ConfigError, SyshaxError
from syshax.protocol import OperatorLibrary
from syshaxd.config import Config
from syshaxd.core import Core, core_errors

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def distrust(path: Path) -> str:
    """Why the file or directory cannot be trusted; "" when only root and the own user could have written it.

    Raises OSError where it cannot be looked at."""
    real = Path(os.path.realpath(path, strict=True))
    for place in (real, *real.parents):
        found = place.stat()
        if found.st_uid not in (0, os.geteuid()):
            return f"{place} belongs to uid {found.st_uid}, neither root nor the daemon's own user"
        passed_through = place not in (real, real.parent)
        if found.st_mode & _OTHERS_WRITE and not (passed_through and found.st_mode & stat.S_ISVTX):
            mode = stat.filemode(found.st_mode)
            return f"others than its owner may write to {place} ({mode}): chmod go-w {place}"
    return ""


def load_library(core: Core, path: Path) -> OperatorLibrary:
    """Loads one library; its rows join the table. Raises ConfigError with the reason when it is refused."""
    try:
        reason = distrust(path)
        if not reason and not path.is_file():
            reason = f"{path} is no file"
    except OSError as error:
        reason = f"{path}: {error.strerror}"
    if reason:
        raise ConfigError(reason, "an operator library runs with the daemon's rights; see docs/OPERATORS.md")
    formats, kernels = set(core.formats()), {row["name"] for row in core.kernels()}
    with core_errors(core):
        core.load_operator_library(os.path.realpath(path))
    return OperatorLibrary(
        path=str(path),
        loaded=True,
        formats=[name for name in core.formats() if name not in formats],
        kernels=[row["name"] for row in core.kernels() if row["name"] not in kernels],
    )


def load_directory(core: Core, directory: str) -> list[OperatorLibrary]:
    """Loads every *.so of the directory, by name. What is refused is in the list with its reason; nothing is raised."""
    if not directory or not Path(directory).exists():
        return []
    return list(_load_all(core, Path(directory)))


def _load_all(core: Core, directory: Path) -> Iterator[OperatorLibrary]:
    try:
        reason = distrust(directory)
        found = sorted(directory.glob("*.so"))
    except OSError as error:
        reason, found = f"{directory}: {error.strerror}", []
    if reason:
        yield OperatorLibrary(path=str(directory), loaded=False, reason=reason)
        return
    for path in found:
        try:
            yield load_library(core, path)
        except SyshaxError as error:
            yield OperatorLibrary(path=str(path), loaded=False, reason=error.message)


def check_formats(core: Core, config: Config, libraries: Sequence[OperatorLibrary]) -> None:
    """Raises ConfigError for a key that names a format which there is not.

    Where a library was refused it may have been its format: then nothing is raised, and loads that need it fail."""
    if not all(library.loaded for library in libraries):
        return
    known = core.formats()
    named = [
        *config.named_formats(),
        *(("precision.allowed_formats", name) for name in config.precision.allowed_formats),
    ]
    for key, format in named:
        if format not in known:
            near = get_close_matches(format, known, n=1)
            raise ConfigError(
                f"{key}: there is no format {format!r}; formats: {', '.join(known)}",
                f"did you mean {near[0]}?" if near else "is its operator library installed?",
            )
