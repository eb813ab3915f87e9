"""Which kernel is chosen: for every set of CPU features, under every cap, in this process and through SYSHAX_ISA."""

import os
import platform
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_reference import FORMATS

from syshaxd import _core

DTYPES = ["float32", "float16", "bfloat16"]
FEATURES = sorted({feature for kernel in _core.kernels() for feature in kernel["features"]})
KERNELS = {kernel["name"]: kernel for kernel in _core.kernels()}


def in_new_process(code: str, isa: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SYSHAX_ISA": isa}
    command = [sys.executable, "-c", f"from syshaxd import _core; {code}"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@given(features=st.sets(st.sampled_from(FEATURES)) if FEATURES else st.just(set()), data=st.data())
def test_any_feature_set_gets_the_best_row_it_can_run(features: set[str], data: st.DataObject) -> None:
    format, dtype = data.draw(st.sampled_from(FORMATS)), data.draw(st.sampled_from(DTYPES))
    chosen = KERNELS[_core.select_kernel_for(format, dtype, sorted(features))]
    usable = [
        kernel
        for kernel in KERNELS.values()
        if kernel["format"] == format and dtype in kernel["dtypes"] and set(kernel["features"]) <= features
    ]
    assert chosen in usable and chosen["rank"] == max(kernel["rank"] for kernel in usable)


def test_a_format_has_one_packing_on_every_isa() -> None:
    for format in FORMATS:
        assert len({kernel["packing"] for kernel in KERNELS.values() if kernel["format"] == format}) == 1


def test_no_two_rows_share_a_name_or_a_rank() -> None:
    assert len(KERNELS) == len(_core.kernels())
    for format in FORMATS:
        for dtype in DTYPES:
            ranks = [k["rank"] for k in KERNELS.values() if k["format"] == format and dtype in k["dtypes"]]
            assert len(ranks) == len(set(ranks))


def test_names_say_what_the_rows_are() -> None:
    for kernel in KERNELS.values():
        if kernel["vendor"] == "syshax":
            assert kernel["name"] == f"{kernel['format']}_{kernel['activation']}_{kernel['isa']}"
            assert kernel["isa"] in _core.isa_names()


def test_float32_activations_are_never_rounded_to_bf16() -> None:
    for kernel in KERNELS.values():
        if kernel["activation"] == "bf16":
            assert kernel["dtypes"] == ["bfloat16"]


@pytest.mark.parametrize("cap", _core.isa_names())
def test_caps(cap: str) -> None:
    names = _core.isa_names()
    allowed = names[: names.index(cap) + 1]
    assert _core.isa_effective(cap) in allowed
    for format in FORMATS:
        for dtype in DTYPES:
            assert KERNELS[_core.select_kernel(format, dtype, cap)]["isa"] in allowed
    assert _core.select_kernel("q8_0", "float32", "scalar") == "q8_0_q8x2_scalar"
    assert _core.select_kernel("q8_0", "bfloat16", "scalar") == "q8_0_q8_scalar"
    assert set(_core.cpu_features(cap)) <= set(_core.cpu_features())


def test_no_cap_and_auto_are_the_same() -> None:
    assert _core.cpu_features("auto") == _core.cpu_features("") == _core.cpu_features()


def test_the_environment_caps_too() -> None:
    chosen = "_core.select_kernel('bf16', 'bfloat16'), _core.vector_isas()"
    done = in_new_process(f"print(_core.cpu_features(), _core.isa_effective(), {chosen})", "scalar")
    assert done.stdout.strip() == "[] scalar bf16_f32_scalar ['scalar']"
    done = in_new_process("_core.run_kernel('q8_0_q8_avx2', [0] * 34, 1, 32, [[0.0] * 32])", "scalar")
    if platform.machine() == "x86_64":
        assert "this CPU cannot run kernel q8_0_q8_avx2" in done.stderr


def test_an_unknown_isa_is_refused_with_the_known_ones() -> None:
    with pytest.raises(_core.CoreError, match='"sse9" is no ISA name') as caught:
        _core.cpu_features("sse9")
    assert caught.value.code == "hardware" and "scalar" in caught.value.hint
    done = in_new_process("_core.cpu_features()", "sse9")
    assert done.returncode == 1 and 'SYSHAX_ISA: "sse9" is no ISA name' in done.stderr


def test_unknown_format_and_dtype() -> None:
    with pytest.raises(_core.CoreError, match="unknown weight format") as caught:
        _core.select_kernel("q5_k", "float32")
    assert caught.value.code == "invalid_argument" and "q4_0" in caught.value.hint
    with pytest.raises(_core.CoreError, match="unknown dtype"):
        _core.select_kernel("q8_0", "float64")
    with pytest.raises(_core.CoreError, match='unknown CPU feature "x87"'):
        _core.select_kernel_for("q8_0", "float32", ["x87"])
