"""That the chaos run can fail: its reference refuses what is wrong, its watching sees what is left over."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import answers
import numpy as np
import pytest
from moe_reference import to_dtype
from stand import Usage

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> answers.Answers:
    out = tmp_path_factory.mktemp("tables") / "tables.npz"
    code = "import sys; from pathlib import Path; import answers; answers.write_tables(Path(sys.argv[1]))"
    environment = os.environ | {
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    subprocess.run([sys.executable, "-c", code, out], env=environment, check=True)
    return answers.Answers(out)


@pytest.mark.parametrize("format", answers.FORMATS)
@pytest.mark.parametrize("dtype", answers.DTYPES)
def test_wrong_answers_are_seen(tables: answers.Answers, format: str, dtype: str) -> None:
    """Rows exchanged, another layer's, another top_k's, one element off, NaN, nothing at all."""
    rows = np.arange(answers.ROWS)
    value = tables.value(rows, format, 0, 4, dtype)
    got = to_dtype(value, dtype)

    def right(changed: np.ndarray, layer: int = 0, top_k: int = 4) -> bool:
        return tables.right(changed, rows, format, layer, top_k, dtype)

    assert right(got)
    assert not right(np.roll(got, 1, axis=0)) and not right(got, layer=1) and not right(got, top_k=2)
    assert not right(np.zeros_like(got))
    for wrong in (np.float32(1.5), np.float32(np.nan)):
        one = got.copy()
        place = np.unravel_index(np.argmax(np.abs(value)), value.shape)
        changed = np.float32(value[place] * wrong)
        one[place] = changed.view(np.uint32) >> 16 if dtype == "bfloat16" else changed
        assert not right(one)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Usage)])
def test_what_is_left_over_is_seen(field: str) -> None:
    before = Usage(25, 2, 0, 4, 1 << 20, 50 << 20, 0)
    assert before.beyond(before) == []
    more = dataclasses.replace(before, **{field: getattr(before, field) + (16 << 20)})
    assert [words.split()[0] for words in more.beyond(before)] == [field] and before.beyond(more) == []


def test_a_fault_that_is_none_is_told_with_all_that_there_are() -> None:
    done = subprocess.run(
        [sys.executable, HERE / "run.py", "--fault", "earthquake"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "waiting parked" in done.stdout and "/dev/shm is full" in done.stdout
