"""Numbers as people read them."""

from __future__ import annotations

from collections.abc import Sequence

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", " k", " M", " G", " T", " P")


def _three_digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def size(count: int) -> str:
    """Bytes in binary units with three digits: 1.50 GiB."""
    if abs(count) < 1024:
        return f"{count} B"
    value, unit = float(count), 0
    while abs(value) >= 1023.5 and unit < len(_BINARY) - 1:
        value, unit = value / 1024, unit + 1
    return f"{_three_digits(value)} {_BINARY[unit]}"


def count(number: int) -> str:
    """Up to six digits in full, then three: 123,456 or 1.23 M."""
    if number < 1_000_000:
        return f"{number:,}"
    value, unit = float(number), 0
    while value >= 999.5 and unit < len(_DECIMAL) - 1:
        value, unit = value / 1000, unit + 1
    return f"{_three_digits(value)}{_DECIMAL[unit]}"


def duration(seconds: float) -> str:
    """The two largest units: 3 d 4 h, 2 min 5 s, 12 s, 0.25 s."""
    if seconds < 10 and seconds != int(seconds):
        return f"{seconds:.2f} s" if seconds < 1 else f"{seconds:.1f} s"
    whole = round(seconds)
    for unit, length, smaller, part in (("d", 86400, "h", 3600), ("h", 3600, "min", 60), ("min", 60, "s", 1)):
        if whole >= length:
            rest = whole % length // part
            return f"{whole // length} {unit} {rest} {smaller}" if rest else f"{whole // length} {unit}"
    return f"{whole} s"


def milliseconds(value: float) -> str:
    """Without the unit, down to a hundredth: 0.04, 1.25, 37.5, 1234."""
    return _three_digits(value)


def percent(fraction: float) -> str:
    return f"{100 * fraction:.0f} %"


def cpu_ranges(cpus: Sequence[int]) -> str:
    """[0, 1, 2, 3, 8] -> 0-3,8; "-" for none."""
    parts: list[list[int]] = []
    for cpu in sorted(set(cpus)):
        if parts and cpu == parts[-1][1] + 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts) or "-"
