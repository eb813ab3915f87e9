#!/usr/bin/env bash
# Fetches the systemd of another Debian suite and unpacks it into a directory, to be laid over a box's root: the box then
# boots that version, and everything else (Python, the C library) stays the machine's own.
#
#   systemd_version.sh SUITE TARGET       SUITE: bullseye (247), bookworm-backports (254)
#
# Nothing is installed, and the machine's own package lists are not touched.
set -euo pipefail
suite=$1 target=$2
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{lists/partial,cache/archives/partial,tree}
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian $suite main" >"$work/sources"
: >"$work/status"
apt=(-qq -o "Dir::Etc::sourcelist=$work/sources" -o Dir::Etc::sourceparts=/dev/null -o Dir::Etc::preferencesparts=/dev/null
     -o "Dir::State::lists=$work/lists" -o "Dir::State::status=$work/status" -o "Dir::Cache=$work/cache" -o APT::Sandbox::User=root)
apt-get "${apt[@]}" update
packages=(systemd systemd-sysv libsystemd0 libudev1)
! apt-cache "${apt[@]}" show libsystemd-shared >/dev/null 2>&1 || packages+=(libsystemd-shared)
(cd "$work" && apt-get "${apt[@]}" download "${packages[@]}")
for package in "$work"/*.deb; do dpkg-deb -x "$package" "$work/tree"; done
for folder in lib sbin bin; do  # the machine's root has these as links into /usr
    [ ! -d "$work/tree/$folder" ] || [ -L "$work/tree/$folder" ] || {
        mkdir -p "$work/tree/usr/$folder"; cp -a "$work/tree/$folder/." "$work/tree/usr/$folder/"; rm -r "$work/tree/$folder"; }
done
rm -rf "$work/tree/usr/share"
mkdir -p "$target"; cp -a "$work/tree/." "$target/"
