"""Numbers that the processes of one front-end share: requests in progress, a worker's outstanding ones, metrics.

One anonymous memory holds a row for each process. A cell is the same place in every row; a process writes its own row
only, and readers add the rows up, so nobody waits for anybody and a process that is killed leaves nothing half done.
A process alone has a board of one row.

Names become cells once, under a lock that the kernel takes back from the dead; they are never given up. There is room
for `CELLS` of them. When they run out a cell counts for its process alone, which the log says once: a limit then holds
for each process by itself, and no request fails for it.

What a dead process had open ends with it, what it has counted stays: `retire` moves that into the supervisor's row.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

log = logging.getLogger("syshax.api")
CELLS = 1 << 16
"""Cells of a row, 8 bytes each; memory is taken as pages of them are used."""
_NAME_BYTES = 4 << 20
_RECORD = struct.Struct("<HHB")
_NAMES_USED, _CELLS_USED, _FOLDS = range(3)
_HEADER_BYTES = 4096
_FOLD_TRIES = 100


class Kind(IntEnum):
    """What becomes of a cell when its process has died."""

    NOW = 0
    """An integer that ends with the process."""
    COUNT = 1
    """An integer that stays."""
    REAL = 2
    """A float that stays."""


class Cell:
    """One number: this process's part and the sum of all parts."""

    __slots__ = ("_mine", "_parts", "_view")

    def __init__(self, view: memoryview, first: int, stride: int, row: int) -> None:
        self._view, self._mine = view, first + row * stride
        self._parts = view[first::stride]

    def add(self, number: int) -> None:
        """Adds to this process's part."""
        self._view[self._mine] += number

    def set(self, number: int) -> None:
        """Makes it this process's part."""
        self._view[self._mine] = number

    def total(self) -> int:
        """The sum over all processes."""
        return sum(self._parts)

    def parts(self) -> list[int]:
        """By row."""
        return self._parts.tolist()


class Reals:
    """Floats side by side, for those that count in their own way: `mine[first + i] += x` is this process's part."""

    __slots__ = ("_start", "_stride", "first", "mine", "width")

    def __init__(self, view: memoryview[float], start: int, width: int, stride: int, row: int) -> None:
        self.mine, self.first, self.width = view, start + row * stride, width
        self._start, self._stride = start, stride

    def totals(self) -> list[float]:
        """The sums over all processes."""
        return [sum(self.mine[self._start + place :: self._stride]) for place in range(self.width)]


@dataclass(frozen=True)
class _Place:
    kind: Kind
    start: int
    width: int


class Board:
    """This process's row and the view on all. Row 0 is the supervisor's, or that of a process alone."""

    def __init__(self, rows: int = 1, row: int = 0, descriptor: int | None = None) -> None:
        """`descriptor`: that of a board made by `share`; without one the memory is this process's own."""
        self.rows, self.row, self.descriptor = rows, row, descriptor
        self._memory = mmap.mmap(-1 if descriptor is None else descriptor, _size(rows))
        whole = memoryview(self._memory)
        self._header = whole[:_HEADER_BYTES].cast("q")
        self._names = whole[_HEADER_BYTES : _HEADER_BYTES + _NAME_BYTES]
        cells = whole[_HEADER_BYTES + _NAME_BYTES :]
        self._integers, self._floats = cells.cast("q"), cells.cast("d")
        self._places: dict[str, _Place] = {}
        self._read = self._next = 0
        self._told = False

    @classmethod
    def share(cls, rows: int) -> Board:
        """A board whose `descriptor` other processes can be given."""
        descriptor = os.memfd_create("syshax-api-board", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _size(rows))
        return cls(rows, 0, descriptor)

    def cell(self, name: str) -> Cell:
        """What is the case now: zero again when its process has died."""
        return self._integer(name, Kind.NOW)

    def counter(self, name: str) -> Cell:
        """What has happened: only grows, and outlives its process."""
        return self._integer(name, Kind.COUNT)

    def reals(self, name: str, width: int) -> Reals:
        """`width` floats that outlive their process."""
        place = self._place(name, Kind.REAL, width)
        if place is None:
            return Reals(memoryview(bytearray(8 * width)).cast("d"), 0, width, width, 0)
        return Reals(self._floats, place.start, width, CELLS, self.row)

    def names(self, kind: Kind) -> Iterator[tuple[str, int]]:
        """Name and width of all of that kind, whoever named them first."""
        with self._alone():
            self._learn()
        return ((name, place.width) for name, place in list(self._places.items()) if place.kind is kind)

    def retire(self, row: int) -> None:
        """The supervisor, for a process that has ended: its part of what is now goes, the rest becomes ours."""
        with self._alone():
            self._learn()
        with self._folding():
            for place in self._places.values():
                view: memoryview[Any] = self._floats if place.kind is Kind.REAL else self._integers
                for cell in range(place.start, place.start + place.width):
                    if place.kind is not Kind.NOW:
                        view[self.row * CELLS + cell] += view[row * CELLS + cell]
                    view[row * CELLS + cell] = 0

    def settled(self) -> Iterator[None]:
        """Iterate to read many cells: once, and again if a process's part was moved meanwhile."""
        for _ in range(_FOLD_TRIES):
            before = self._header[_FOLDS]
            yield
            if before % 2 == 0 and self._header[_FOLDS] == before:
                return

    def _integer(self, name: str, kind: Kind) -> Cell:
        place = self._place(name, kind, 1)
        if place is None:
            return Cell(memoryview(bytearray(8)).cast("q"), 0, 1, 0)
        return Cell(self._integers, place.start, CELLS, self.row)

    def _place(self, name: str, kind: Kind, width: int) -> _Place | None:
        if name not in self._places:
            with self._alone():
                self._learn()
                if name not in self._places and not self._append(name, kind, width):
                    return None
                self._learn()
        place = self._places[name]
        if (place.kind, place.width) != (kind, width):
            raise ValueError(f"{name!r} is {place.kind.name} of {place.width}, not {kind.name} of {width}")
        return place

    def _append(self, name: str, kind: Kind, width: int) -> bool:
        text = name.encode()
        used, cells = self._header[_NAMES_USED], self._header[_CELLS_USED]
        end = used + _RECORD.size + len(text)
        if cells + width > CELLS or end > _NAME_BYTES or len(text) > 0xFFFF:
            if not self._told:
                log.error("no room for more shared counters: %r and later ones hold for one process alone", name)
                self._told = True
            return False
        _RECORD.pack_into(self._names, used, len(text), width, kind)
        self._names[used + _RECORD.size : end] = text
        self._header[_CELLS_USED] = cells + width
        self._header[_NAMES_USED] = end
        return True

    def _learn(self) -> None:
        while self._read < self._header[_NAMES_USED]:
            length, width, kind = _RECORD.unpack_from(self._names, self._read)
            begin = self._read + _RECORD.size
            self._places[bytes(self._names[begin : begin + length]).decode()] = _Place(Kind(kind), self._next, width)
            self._next += width
            self._read = begin + length

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if self.descriptor is None:
            yield
            return
        fcntl.lockf(self.descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self.descriptor, fcntl.LOCK_UN)

    @contextmanager
    def _folding(self) -> Iterator[None]:
        self._header[_FOLDS] += 1
        try:
            yield
        finally:
            self._header[_FOLDS] += 1


def _size(rows: int) -> int:
    return _HEADER_BYTES + _NAME_BYTES + rows * CELLS * 8
