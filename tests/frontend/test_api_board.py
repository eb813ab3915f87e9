"""The counters that the processes share: sums, ends of processes, room that runs out, names that all agree on."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syshaxd.frontend.board import CELLS, Board, Kind

MANY_NAMES = """
import sys
from syshaxd.frontend.board import Board
row, board = int(sys.argv[2]), Board(4, int(sys.argv[2]), int(sys.argv[1]))
for number in range(300):
    board.counter(f"name {number * 7 * row % 300}").add(number * 7 * row % 300)
    board.cell(f"open {row} {number}").add(1)
"""


def test_a_process_alone() -> None:
    board = Board()
    cell = board.cell("a")
    cell.add(3)
    cell.add(-1)
    assert cell.total() == 2 == board.cell("a").total() and cell.parts() == [2]
    cell.set(7)
    assert cell.total() == 7 and board.cell("b").total() == 0


operations = st.lists(
    st.tuples(st.sampled_from(["add", "set", "retire"]), st.integers(1, 3), st.sampled_from("abc"), st.integers(-9, 9)),
    max_size=40,
)


@settings(max_examples=40, deadline=None)
@given(operations)
def test_sums_are_those_of_rows_kept_apart(operations: list[tuple[str, int, str, int]]) -> None:
    """Against dictionaries, one a process."""
    first = Board.share(4)
    assert first.descriptor is not None
    boards = [first, *(Board(4, row, first.descriptor) for row in range(1, 4))]
    now = [dict.fromkeys("abc", 0) for _ in boards]
    ever = dict.fromkeys("abc", 0)
    for what, row, name, number in operations:
        board = boards[row]
        if what == "retire":
            first.retire(row)
            now[row] = dict.fromkeys("abc", 0)
        elif what == "set":
            board.cell(f"now {name}").set(number)
            now[row][name] = number
        else:
            board.cell(f"now {name}").add(number)
            now[row][name] += number
            board.counter(f"ever {name}").add(abs(number))
            reals = board.reals(f"reals {name}", 2)
            reals.mine[reals.first + 1] += abs(number) / 2
            ever[name] += abs(number)
        for board in boards:
            for name in "abc":
                assert board.cell(f"now {name}").total() == sum(part[name] for part in now)
                assert board.counter(f"ever {name}").total() == ever[name]
                assert board.reals(f"reals {name}", 2).totals() == [0.0, ever[name] / 2]
    os.close(first.descriptor)


def test_processes_that_name_at_once_mean_the_same_cells() -> None:
    board = Board.share(4)
    assert board.descriptor is not None
    fds = (board.descriptor,)
    command = [sys.executable, "-c", MANY_NAMES, str(board.descriptor)]
    processes = [subprocess.Popen([*command, str(row)], pass_fds=fds) for row in (1, 2, 3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    counted = {name for name, _ in board.names(Kind.COUNT)}
    sums = dict.fromkeys(counted, 0)
    for row in (1, 2, 3):
        for number in range(300):
            sums[f"name {number * 7 * row % 300}"] += number * 7 * row % 300
    assert {name: board.counter(name).total() for name in counted} == sums
    assert sum(board.cell(name).total() for name, _ in board.names(Kind.NOW)) == 900
    for row in (1, 2, 3):
        board.retire(row)
    assert sum(board.cell(name).total() for name, _ in board.names(Kind.NOW)) == 0
    assert {name: board.counter(name).total() for name in counted} == sums


def test_without_room_a_cell_counts_for_its_process_alone(caplog: pytest.LogCaptureFixture) -> None:
    board = Board()
    board.reals("large", CELLS - 1).totals()
    board.cell("last").add(1)
    with caplog.at_level(logging.ERROR, "syshax.api"):
        more = [board.cell("more"), board.counter("more still")]
        reals = board.reals("and floats", 3)
    for cell in more:
        cell.add(2)
        assert cell.total() == 2
    reals.mine[reals.first + 2] += 1.5
    assert reals.totals() == [0.0, 0.0, 1.5]
    assert board.cell("last").total() == 1 and [name for name, _ in board.names(Kind.NOW)] == ["last"]
    assert len(caplog.records) == 1 and "'more' and later ones hold for one process alone" in caplog.text


def test_long_names_and_wrong_kinds() -> None:
    board = Board()
    board.cell("ü" * 40000).add(1)
    board.cell("ü" * 300).add(5)
    assert [name for name, _ in board.names(Kind.NOW)] == ["ü" * 300]
    with pytest.raises(ValueError, match="is NOW of 1, not COUNT of 1"):
        board.counter("ü" * 300)


def test_reading_waits_for_a_part_that_is_being_moved() -> None:
    board = Board.share(2)
    child = Board(2, 1, board.descriptor)
    child.counter("c").add(5)
    looks = []
    for _ in child.settled():
        looks.append(child.counter("c").total())
        if len(looks) == 1:
            board.retire(1)
    assert looks == [5, 5]
