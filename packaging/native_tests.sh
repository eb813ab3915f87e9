#!/usr/bin/env bash
# Builds the core and the programs of tests/native (no Python in them) in another way, and runs them.
#
#   native_tests.sh arm [short]        for aarch64, under emulated CPUs with and without each feature
#   native_tests.sh sanitize [short]   with the address and undefined-behaviour sanitizers, then the thread sanitizer
#   native_tests.sh fuzz [short]       only builds what tests/fuzz/run.py runs: the fuzz targets with sanitizers; without
#                                      "short" also without them, and under libFuzzer where there is clang
#
# Ends with status 1 at the first program that finds something; its own line says what. short: what CI has time for.
# Environment: VENV (where cmake and ninja are), JOBS.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=${VENV:-.venv}
JOBS=${JOBS:-2}
PYTHON=$VENV/bin/python
[ -d "$VENV/bin" ] && PATH=$(cd "$VENV/bin" && pwd):$PATH
mode=${1:-} length=${2:-full}

say() { printf '==> %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$1" >&2; exit 1; }

# build FOLDER OPTIONS...: only what the tests need; TARGET: only that program.
build() {
    local folder=$1; shift
    mkdir -p build
    cmake -S csrc -B "$folder" -G Ninja -DSYSHAX_BINDINGS=OFF -DSYSHAX_NATIVE_TESTS=ON "$@" >"$folder.log" 2>&1 &&
        cmake --build "$folder" -j "$JOBS" --target "${TARGET:-all}" >>"$folder.log" 2>&1 || {
        tail -n 40 "$folder.log" >&2
        die "the native tests could not be built; the whole log is in $folder.log"
    }
}

# run WORDS... PROGRAM [ARGUMENT]: its output is shown only when it fails.
run() {
    local log=build/native_test-$mode.log status=0
    "$@" >"$log" 2>&1 || status=$?
    [ "$status" = 0 ] || { tail -n 30 "$log" >&2; die "status $status from: $*"; }
    printf '%s\n' "ok: $*"
}

# on CPU ISA PROGRAMS...: CPU is one of qemu's, ISA a cap or "auto".
on() {
    local cpu=$1 isa=$2 program; shift 2
    for program; do
        # shellcheck disable=SC2086
        run env SYSHAX_ISA="$isa" qemu-aarch64 -L /usr/aarch64-linux-gnu -cpu "$cpu" build/arm/$program
    done
}

test_arm() {
    say "building the core, the client's library and the tests for aarch64"
    build build/arm -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
        -DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++
    "$PYTHON" packaging/check_objects.py build/arm --objdump aarch64-linux-gnu-objdump || die "an object file for aarch64 is not what its name says"
    say "running them on emulated CPUs"
    # max: everything; neoverse-n1: dot products; cortex-a72: neither.
    on max auto kernels_test vector_ops_test "moe_test $length" limits_test ring_stress
    on cortex-a72 auto kernels_test "moe_test $length" limits_test
    on neoverse-n1 auto kernels_test limits_test
    if [ "$length" = full ]; then
        on neoverse-n1 auto moe_test
        for isa in scalar neon dotprod i8mm; do on max $isa vector_ops_test moe_test; done
    fi
}

test_sanitize() {
    local kind programs="kernels_test vector_ops_test limits_test schedule_test ring_stress"
    export ASAN_OPTIONS=detect_stack_use_after_return=1 UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1
    for kind in address,undefined thread; do
        say "building with the sanitizers: $kind"
        build "build/sanitize-${kind%,*}" -DSYSHAX_SANITIZE=$kind
        for program in $programs "moe_test $length" "ring_fuzz ring --seconds 1" "ring_fuzz dispatcher --seconds 3"; do
            # shellcheck disable=SC2086
            run build/sanitize-${kind%,*}/$program
        done
    done
}

# clang of any version, or nothing.
find_clang() {
    local name
    for name in clang++ clang++-{21..14}; do
        command -v "$name" >/dev/null && { echo "$name"; return; }
    done
}

build_fuzz() {
    local clang; clang=$(find_clang)
    export TARGET=ring_fuzz
    say "building the fuzz targets"
    build build/sanitize-address -DSYSHAX_SANITIZE=address,undefined
    [ "$length" = full ] || return 0
    build build/fuzz
    [ -z "$clang" ] || build build/libfuzzer -DSYSHAX_LIBFUZZER=ON -DSYSHAX_SANITIZE=address,undefined \
        -DCMAKE_CXX_COMPILER="$clang" -DCMAKE_C_COMPILER="${clang/++/}"
}

case "$mode/$length" in
    arm/full|arm/short) test_arm ;;
    sanitize/full|sanitize/short) test_sanitize ;;
    fuzz/full|fuzz/short) build_fuzz ;;
    *) sed -n '2,10p' "$0"; exit 2 ;;
esac
