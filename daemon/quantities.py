"""The kinds of value with a notation of their own: sizes ("64GiB"), parts of a disk ("50%") and CPU lists ("0-3,8").

Owns parsing and printing of both, for the configuration and for messages. Knows no key and no file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema

_UNITS = {
    "": 1, "B": 1,
    "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)\s*")
_MAX_SIZE = 1 << 60
_MAX_CPU = 1 << 16


def parse_size(value: Any) -> int:
    """Bytes of 1048576, "512MiB", "1.5 GiB", "20GB". Raises ValueError."""
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        match = _SIZE.fullmatch(value) if isinstance(value, str) else None
        if match is None or match["unit"].upper() not in _UNITS:
            raise ValueError('expected a size: bytes as a number, or text such as "512MiB", "64GiB" or "20GB"')
        size = round(Decimal(match["number"]) * _UNITS[match["unit"].upper()])
    if not 0 <= size <= _MAX_SIZE:
        raise ValueError("expected a size between 0 and 1024 PiB")
    return size


def format_size(size: int) -> str:
    """The largest binary unit that gives the size exactly: parse_size(format_size(n)) == n."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        factor = _UNITS[unit.upper()]
        if size and size % factor == 0:
            return f"{size // factor}{unit}"
    return f"{size}B" if size else "0"


def human_size(size: float) -> str:
    """For people: three digits and a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def parse_cpus(value: Any) -> tuple[int, ...]:
    """Sorted CPU numbers of "0-3,8" or [0, 1, 2, 3, 8]; "" and [] are no CPUs. Raises ValueError."""
    wrong = ValueError('expected CPUs: text such as "0-3,8", or a list of numbers')
    if isinstance(value, list | tuple):
        if not all(isinstance(cpu, int) and not isinstance(cpu, bool) and 0 <= cpu < _MAX_CPU for cpu in value):
            raise wrong
        return tuple(sorted(set(value)))
    if not isinstance(value, str):
        raise wrong
    cpus: set[int] = set()
    for part in value.split(",") if value.strip() else []:
        match = re.fullmatch(r"\s*(\d{1,6})\s*(?:-\s*(\d{1,6})\s*)?", part)
        if match is None:
            raise wrong
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f'the range "{part.strip()}" runs backwards')
        if last >= _MAX_CPU:
            raise wrong
        cpus.update(range(first, last + 1))
    return tuple(sorted(cpus))


def format_cpus(cpus: Iterable[int]) -> str:
    """The shortest text: parse_cpus(format_cpus(c)) == sorted(c)."""
    parts: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if parts and parts[-1][1] == cpu - 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def parse_disk_share(value: Any) -> int | str:
    """A size, or a part of the file system such as "50%". Raises ValueError."""
    match = re.fullmatch(r"\s*(\d{1,3}(?:\.\d{1,3})?)\s*%\s*", value) if isinstance(value, str) else None
    if match is None:
        try:
            return parse_size(value)
        except ValueError as error:
            raise ValueError(f'{error}, or a part of the file system such as "50%"') from None
    if float(match[1]) > 100:
        raise ValueError("expected at most 100%")
    return f"{match[1]}%"


def disk_share(value: int | str, size: int) -> int:
    """Bytes of a parsed disk share on a file system of that size."""
    return int(size * float(value.rstrip("%")) / 100) if isinstance(value, str) else value


def _print_disk_share(value: int | str) -> str:
    return value if isinstance(value, str) else format_size(value)


DiskShare = Annotated[
    int | str,
    BeforeValidator(parse_disk_share),
    PlainSerializer(_print_disk_share, return_type=str, when_used="json"),
    WithJsonSchema({"type": "share"}, mode="validation"),
]
Size = Annotated[
    int,
    BeforeValidator(parse_size),
    PlainSerializer(format_size, return_type=str, when_used="json"),
    WithJsonSchema({"type": "size"}, mode="validation"),
]
CpuList = Annotated[
    tuple[int, ...],
    BeforeValidator(parse_cpus),
    PlainSerializer(format_cpus, return_type=str, when_used="json"),
    WithJsonSchema({"type": "cpus"}, mode="validation"),
]
