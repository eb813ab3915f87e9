"""Arenas and the memory of models: reserved, populated, sealed, adopted, given back; every failure has numbers."""

from __future__ import annotations

import mmap
import os
import resource
import subprocess
import sys
from pathlib import Path

import core_models as models
import pytest
from core_models import geometry, plan

from syshaxd import _core

MIB = 1 << 20


def status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(key)


def shared_memory() -> int:
    """Resident bytes of shared mappings."""
    return status_bytes("RssShmem")


@pytest.mark.parametrize("huge_pages", ["off", "auto"])
def test_an_arena_is_populated_sealed_and_adopted(huge_pages: str) -> None:
    arena = _core.Arena("syshax:test", 5 * MIB + 1, huge_pages=huge_pages)
    assert arena.size == 5 * MIB + 4096
    before = shared_memory()
    arena.populate(0, arena.size)
    assert shared_memory() - before == pytest.approx(arena.size, abs=64 * 1024)
    arena.seal()
    assert arena.huge_bytes % (2 * MIB) == 0
    assert arena.huge_bytes == 0 or huge_pages == "auto"
    again = _core.Arena.adopt(os.dup(arena.fileno()))
    assert again.size == arena.size
    assert again.read(arena.size - 8, 8) == bytes(8)
    assert Path(f"/proc/self/fd/{arena.fileno()}").readlink().name == "memfd:syshax:test (deleted)"


def test_a_sealed_arena_cannot_be_written_or_resized() -> None:
    arena = _core.Arena("syshax:test", MIB)
    arena.populate(0, MIB)
    arena.seal()
    with pytest.raises(PermissionError):
        mmap.mmap(arena.fileno(), MIB, mmap.MAP_SHARED, mmap.PROT_WRITE)
    for size in (0, 2 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fileno(), size)
    with pytest.raises(PermissionError):
        os.write(arena.fileno(), b"x")
    with mmap.mmap(arena.fileno(), MIB, mmap.MAP_SHARED, mmap.PROT_READ) as view:
        assert view[:4] == bytes(4)


def test_only_sealed_arenas_are_adopted() -> None:
    arena = _core.Arena("syshax:test", MIB)
    with pytest.raises(_core.CoreError, match="no sealed arena"):
        _core.Arena.adopt(arena.fileno())
    with pytest.raises(_core.CoreError, match="descriptor 9999"):
        _core.Arena.adopt(9999)


@pytest.mark.parametrize(("offset", "size"), [(0, 2 * MIB), (MIB, 1), (1 << 63, 1), (1, (1 << 64) - 1)])
def test_populate_stays_inside(offset: int, size: int) -> None:
    with pytest.raises(_core.CoreError, match="outside an arena"):
        _core.Arena("syshax:test", MIB).populate(offset, size)


@pytest.mark.parametrize("size", [1 << 46, 1 << 62, (1 << 64) - 1])
def test_too_large_arenas_are_refused_with_the_size(size: int) -> None:
    with pytest.raises(_core.CoreError, match=str(size)[:6]) as caught:
        arena = _core.Arena("syshax:test", size)
        arena.populate(0, 1 << 50)
    assert caught.value.code in ("no_memory", "hardware")


def test_an_empty_arena_is_refused() -> None:
    with pytest.raises(_core.CoreError, match="0 bytes"):
        _core.Arena("syshax:test", 0)


def test_huge_pages_that_are_not_there_are_an_error_with_numbers() -> None:
    free = int(Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").read_text())
    with pytest.raises(_core.CoreError, match=rf"{free + 4} huge pages of 2 MiB and {free} are free.*nr_hugepages"):
        _core.Arena("syshax:test", (free + 4) * 2 * MIB, huge_pages="require")
    with pytest.raises(_core.CoreError, match="none of off, auto, require"):
        _core.Arena("syshax:test", MIB, huge_pages="always")


def under_limit(limit: int, value: int, code: str) -> str:
    """Runs code in a child with that resource limit; its output. The child ends in order or the test fails."""
    script = f"import resource; from syshaxd import _core\nresource.setrlimit({limit}, ({value}, {value}))\n" + code
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


CATCH = """
try:
    {action}
except _core.CoreError as error:
    print(error.code, error)
"""


def test_address_space_limit_is_an_error_not_a_crash() -> None:
    action = "_core.Arena('syshax:test', 8 << 30)"
    text = under_limit(resource.RLIMIT_AS, 4 << 30, CATCH.format(action=action))
    assert text.startswith("no_memory")
    assert str(8 << 30) in text
    assert "RLIMIT_AS" in text


def test_file_size_limit_is_an_error_not_a_crash() -> None:
    text = under_limit(resource.RLIMIT_FSIZE, MIB, CATCH.format(action=f"_core.Arena('syshax:test', {8 * MIB})"))
    assert text.startswith("no_memory")
    assert "RLIMIT_FSIZE" in text


def test_a_model_larger_than_memory_is_refused_before_it_is_reserved() -> None:
    shape = geometry(4096, 14336, experts=256, top_k=8, layers=100)
    wanted = sum(_core.Runtime.plan_bytes(shape, "bf16", plan([1, 1])))
    before = shared_memory()
    with pytest.raises(_core.CoreError, match=rf"needs .*{wanted} bytes.* are free") as caught:
        _core.Runtime(plan([1, 1])).create_model("huge", shape, "bf16")
    assert caught.value.code == "no_memory"
    assert shared_memory() == before


def test_dropping_a_model_gives_its_pages_back() -> None:
    shape = geometry(512, 768, experts=8, top_k=2, layers=4)
    before = shared_memory()
    runtime = _core.Runtime(plan([1, 1]))
    for _ in range(2):
        model = runtime.create_model("m", shape, "bf16")
        assert shared_memory() - before == pytest.approx(model.pool_bytes(), rel=0.02)
        model.fill_random(0)
        model.seal()
        runtime.drop_model(model)
        assert shared_memory() - before < MIB


def test_an_unreferenced_model_gives_its_pages_back() -> None:
    before = shared_memory()
    model = _core.Runtime(plan([1])).create_model("m", geometry(512, 768), "bf16")
    assert shared_memory() - before >= model.pool_bytes()
    del model
    assert shared_memory() - before < MIB


PEAK = """
import sys
sys.path.insert(0, {tests!r})
import core_models as models, numpy as np
from test_arenas import status_bytes
shape = models.geometry(1024, 1024, experts=8, top_k=2, layers=6)
row = np.ones((1024, 1024), np.float32)
layer = [row] * 8
runtime = _core.Runtime(models.plan([2]), huge_pages={huge_pages!r})
base = status_bytes("VmRSS")
model = runtime.create_model("m", shape, {format!r})
for i in range(6):
    model.load_layer(i, layer, layer, layer, "float32")
model.seal()
print(status_bytes("VmHWM") - base, model.pool_bytes())
"""


@pytest.mark.parametrize("huge_pages", ["off", "auto"])
@pytest.mark.parametrize("format", ["bf16", "q4_0"])
def test_loading_peaks_at_the_pool(format: str, huge_pages: str) -> None:
    code = PEAK.format(tests=str(Path(__file__).parent), format=format, huge_pages=huge_pages)
    peak, pool = map(int, under_limit(resource.RLIMIT_CORE, 0, code).split())
    assert pool <= peak <= 1.10 * pool


def test_huge_pages_are_reported() -> None:
    shape = geometry(1024, 1024, experts=4, top_k=2)
    for huge_pages in ("off", "auto"):
        loaded = models.load(shape, "bf16", plan([1]), huge_pages=huge_pages)
        held, huge = loaded.model.node_bytes()[0], loaded.model.huge_bytes()[0]
        assert 0 <= huge <= held
        assert huge == 0 or huge_pages == "auto"


def test_free_memory_is_what_the_kernel_says() -> None:
    lines = Path("/proc/meminfo").read_text().splitlines()
    fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    for node in (-1, 0, 999):
        assert 0 < _core.node_free_bytes(node) <= fields["MemTotal"]
    assert _core.node_free_bytes(-1) == pytest.approx(fields["MemAvailable"], rel=0.2)


def test_nothing_is_inherited_by_children() -> None:
    arena = _core.Arena("syshax:inherit", MIB)
    assert not os.get_inheritable(arena.fileno())
