#!/usr/bin/env bash
# Installs syshax as a system service: what `make install`, the RPM's %install and the system tests all call.
#
#   [DESTDIR=...] packaging/install.sh
#
# Everything runs from a private directory ($LIBDIR/syshax), so that nothing of it meets the system's own Python packages:
#   python/     our two packages with the compiled core and the client's library
#   vendor/     the Python packages they need, copied from the environment of ENVIRONMENT_PYTHON, with their licences
#   operators/  empty: libraries put here are loaded at start (docs/OPERATORS.md)
# Environment, with defaults:
#   DESTDIR=                             put before every path below; nothing outside it is touched
#   PYTHON=/usr/bin/python3              what the services run
#   ENVIRONMENT_PYTHON=.venv/bin/python  whose installed packages are bundled; same minor version as PYTHON
#   CORE=build/core                      CMake's build directory with _core*.so and libsyshax_client.so
#   BINDIR, LIBDIR, LIBEXECDIR, SYSCONFDIR, STATEDIR, CACHEDIR, UNITDIR, PRESETDIR, SYSUSERSDIR, TMPFILESDIR
#   SYSTEMD_VERSION=(of systemctl)       254 and later: the units also use settings that older ones do not know
set -euo pipefail
cd "$(dirname "$0")/.."
umask 022

DESTDIR=${DESTDIR:-}
PYTHON=${PYTHON:-/usr/bin/python3}
ENVIRONMENT_PYTHON=${ENVIRONMENT_PYTHON:-.venv/bin/python}
CORE=${CORE:-build/core}
BINDIR=${BINDIR:-/usr/bin} LIBDIR=${LIBDIR:-/usr/lib64} LIBEXECDIR=${LIBEXECDIR:-/usr/libexec}
SYSCONFDIR=${SYSCONFDIR:-/etc} STATEDIR=${STATEDIR:-/var/lib} CACHEDIR=${CACHEDIR:-/var/cache}
UNITDIR=${UNITDIR:-/usr/lib/systemd/system} PRESETDIR=${PRESETDIR:-/usr/lib/systemd/system-preset}
SYSUSERSDIR=${SYSUSERSDIR:-/usr/lib/sysusers.d} TMPFILESDIR=${TMPFILESDIR:-/usr/lib/tmpfiles.d}
SYSTEMD_VERSION=${SYSTEMD_VERSION:-$(systemctl --version 2>/dev/null | awk 'NR==1{print $2}' || true)}

die() { printf 'error: %s\n' "$1" >&2; [ $# -lt 2 ] || printf 'hint: %s\n' "$2" >&2; exit 1; }
put() { install -D -m "$1" "$2" "$DESTDIR$3"; }   # put MODE FILE PATH
fill() {                                          # fill MODE TEMPLATE PATH: with our directories in it
    local made; made=$(mktemp)
    sed -e "s|@PYTHON@|$PYTHON|g; s|@PRIVATE@|$LIBDIR/syshax|g; s|@BINDIR@|$BINDIR|g; s|@LIBEXECDIR@|$LIBEXECDIR|g" \
        -e "s|@SYSCONFDIR@|$SYSCONFDIR|g; s|@STATEDIR@|$STATEDIR|g; s|@CACHEDIR@|$CACHEDIR|g" "$2" >"$made"
    put "$1" "$made" "$3"; rm -f "$made"
}

private=$DESTDIR$LIBDIR/syshax
cores=("$CORE"/_core*.so)
[ -f "${cores[0]}" ] && [ -f "$CORE/libsyshax_client.so" ] || die "$CORE holds no built core" "run make setup, or set CORE"
command -v "$ENVIRONMENT_PYTHON" >/dev/null || die "there is no $ENVIRONMENT_PYTHON" "run make setup, or set ENVIRONMENT_PYTHON"
command -v "$PYTHON" >/dev/null || die "there is no $PYTHON" "set PYTHON to the interpreter that the services are to run"
minor() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])'; }
[ "$(minor "$PYTHON")" = "$(minor "$ENVIRONMENT_PYTHON")" ] ||
    die "$PYTHON is Python $(minor "$PYTHON"), $ENVIRONMENT_PYTHON and the core are for $(minor "$ENVIRONMENT_PYTHON")" \
        "build with $PYTHON (make PYTHON=$PYTHON setup), or set PYTHON"

# ------------------------------------------------------------------ the private directory
rm -rf "$private/python" "$private/vendor"
install -d -m 0755 "$private/python" "$private/vendor" "$private/operators"
copy_package() {  # copy_package FOLDER NAME
    install -d -m 0755 "$private/python/$2"
    (cd "$1" && find . -type f \( -name '*.py' -o -name '*.pyi' -o -name '*.toml' -o -name py.typed -o -path './frontend/static/*' \) -print0 | sort -z |
        tar -c --null -T - --mode='u=rwX,go=rX' --owner=0 --group=0) | tar -x -C "$private/python/$2"
}
copy_package daemon syshaxd
copy_package client syshax
for core in "${cores[@]}"; do put 0755 "$core" "$LIBDIR/syshax/python/syshaxd/$(basename "$core")"; done
put 0755 "$CORE/libsyshax_client.so" "$LIBDIR/syshax/python/syshax/libsyshax_client.so"
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
install -d -m 0755 "$private/python/syshax-$version.dist-info"
printf 'Metadata-Version: 2.1\nName: syshax\nVersion: %s\nLicense-Expression: MulanPSL-2.0\n' "$version" \
    >"$private/python/syshax-$version.dist-info/METADATA"
put 0644 LICENSE "$LIBDIR/syshax/python/syshax-$version.dist-info/licenses/LICENSE"
"$ENVIRONMENT_PYTHON" packaging/bundle.py copy "$private/vendor"
# Byte code is never checked against its source: a package's files may get other times on their way.
"$PYTHON" -m compileall -q -s "$DESTDIR" --invalidation-mode unchecked-hash "$private" >/dev/null ||
    die "byte code could not be written below $private"

# ------------------------------------------------------------------------------- commands
command_for() {  # command_for NAME MODULE: isolated from the user's and the system's Python packages
    local made; made=$(mktemp)
    cat >"$made" <<END
#!$PYTHON -IS
# $1: from the packages in $LIBDIR/syshax alone; what it starts with this Python finds them too.
import os
import sys

sys.path[:0] = ["$LIBDIR/syshax/python", "$LIBDIR/syshax/vendor"]
os.environ["PYTHONPATH"] = ":".join(sys.path[:2])
from $2 import main

main()
END
    put 0755 "$made" "$BINDIR/$1"; rm -f "$made"
}
command_for syshaxd syshaxd.__main__
command_for syshax-api syshaxd.frontend.__main__
command_for syshaxctl syshax.ctl.__main__
fill 0755 systemd/worker.sh "$LIBEXECDIR/syshax/worker"

# -------------------------------------------------------------- configuration and units
put 0644 etc/syshaxd.toml "$SYSCONFDIR/syshax/syshaxd.toml"
put 0644 etc/syshax-api.toml "$SYSCONFDIR/syshax/syshax-api.toml"
put 0644 etc/workers/example.env "$SYSCONFDIR/syshax/workers/example.env"
install -d -m 0755 "$DESTDIR$SYSCONFDIR/syshax/syshaxd.toml.d" "$DESTDIR$SYSCONFDIR/syshax/syshax-api.toml.d"
for unit in systemd/*.service systemd/*.socket systemd/*.target systemd/*.slice; do
    fill 0644 "$unit" "$UNITDIR/$(basename "$unit")"
done
if [ "${SYSTEMD_VERSION%%[!0-9]*}" -ge 254 ] 2>/dev/null; then
    for dropin in systemd/since-254/*/*.conf; do fill 0644 "$dropin" "$UNITDIR/${dropin#systemd/since-254/}"; done
fi
fill 0644 systemd/syshax.sysusers "$SYSUSERSDIR/syshax.conf"
fill 0644 systemd/syshax.tmpfiles "$TMPFILESDIR/syshax.conf"
put 0644 systemd/80-syshax.preset "$PRESETDIR/80-syshax.preset"
