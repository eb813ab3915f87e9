#!/bin/bash
# numavm: one script under a real systemd in a small emulated machine with two NUMA nodes, reserved huge pages of 2 MiB
# on each, every controller of the control groups, and a root that may do anything.
#
#   numavm.sh SCRIPT [ARG...]      exit status: that of SCRIPT (125: no verdict)
#
# Its root is this machine's own, read-only below a tmpfs, so whatever is installed here is there under the same path, and
# what is written there is gone afterwards, but for /xchg, which is $NUMAVM_OUT outside. SCRIPT runs there. /tmp is empty.
# Environment, with defaults:
#   NUMAVM_OUT=(a new folder)         shared, writable
#   NUMAVM_LAYER=                     a tree laid over the root, read-only
#   NUMAVM_CACHE=/var/cache/numavm    kernel and initramfs, made on first use
#   NUMAVM_MEM=1024 NUMAVM_CPUS=2     MiB, and CPUs, of a node
#   NUMAVM_HUGE=64                    huge pages reserved on each node
#   NUMAVM_LIMIT=1800                 seconds until the machine is stopped
#   NUMAVM_APPEND=                    more kernel parameters
# Needs root; on Debian it installs what is missing. It shows neither AVX-512 nor speed: everything is emulated.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,19p' "$0"; exit 2; }
script=$(realpath "$1"); shift
cache=${NUMAVM_CACHE:-/var/cache/numavm} layer=${NUMAVM_LAYER:-}
mem=${NUMAVM_MEM:-1024} cpus=${NUMAVM_CPUS:-2} huge=${NUMAVM_HUGE:-64} limit=${NUMAVM_LIMIT:-1800}
out=$(realpath "${NUMAVM_OUT:-$(mktemp -d)}")
virtiofsd=/usr/lib/qemu/virtiofsd
die() { echo "numavm: $*" >&2; exit 125; }

install_missing() {
    local want=()
    { command -v qemu-system-x86_64 && [ -x $virtiofsd ]; } >/dev/null || want+=(qemu-system-x86)
    [ -x /lib/systemd/systemd ] || want+=(systemd dbus)
    command -v busybox >/dev/null || want+=(busybox-static)
    if [ ${#want[@]} -gt 0 ] || [ ! -s "$cache/initrd" ]; then apt-get update -qq; fi
    [ ${#want[@]} -eq 0 ] ||
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${want[@]}" >/dev/null
}

# The kernel's package is only unpacked: installing it would run hooks.
make_initramfs() {
    local kernel module file count=0 tree
    tree=$(mktemp -d)
    kernel=$(apt-cache depends linux-image-cloud-amd64 | awk '/Depends:/ {print $2; exit}')
    [ -n "$kernel" ] || die "apt knows no linux-image-cloud-amd64"
    (cd "$tree" && apt-get download -qq "$kernel" 2>/dev/null && dpkg -x "$kernel"_*.deb x) || die "no $kernel"
    kernel=${kernel#linux-image-}
    mkdir -p "$cache" "$tree"/i/{bin,mods,proc,sys,dev,lower,layer,ov,root}
    cp "$tree/x/boot/vmlinuz-$kernel" "$cache/vmlinuz"
    cp "$(command -v busybox)" "$tree/i/bin/busybox"
    # In the order in which they need each other.
    for module in virtio_ring virtio virtio_pci_legacy_dev virtio_pci_modern_dev virtio_pci fuse virtiofs overlay \
                  autofs4 virtio_console loop binfmt_misc; do
        file=$(find "$tree/x/lib/modules" -name "$module.ko")
        [ -n "$file" ] || die "no module $module in $kernel"
        count=$((count + 1)); cp "$file" "$tree/i/mods/$(printf %02d $count)-$module.ko"
    done
    write_init >"$tree/i/init"
    chmod +x "$tree/i/init"
    (cd "$tree/i" && find . | busybox cpio -o -H newc 2>/dev/null | gzip -1 >"$cache/initrd.new")
    sha256sum <"$0" >"$cache/made-by"
    mv "$cache/initrd.new" "$cache/initrd"
    rm -rf "$tree"
}

write_init() {
    cat <<'INIT'
#!/bin/busybox sh
set -e
/bin/busybox --install -s /bin
trap 'echo "numavm: early boot failed"; poweroff -f' EXIT
mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t devtmpfs dev /dev
for module in /mods/*.ko; do insmod $module; done
mount -t virtiofs -o ro hostroot /lower
mount -t virtiofs -o ro layer /layer
mount -t tmpfs -o size=60%,mode=755 ov /ov
mkdir /ov/upper /ov/work
mount -t overlay -o lowerdir=/layer:/lower,upperdir=/ov/upper,workdir=/ov/work overlay /root
chmod 755 /root
mkdir -p /root/xchg; mount -t virtiofs xchg /root/xchg
# Empty: who shares the root keeps a descriptor for each file that was looked at.
mount -t tmpfs -o mode=1777 tmp /root/tmp
rm -f /root/.dockerenv
units=/root/etc/systemd/system
mkdir -p $units /root/etc/tmpfiles.d /root/etc/systemd/journald.conf.d
ln -sf /dev/null /root/etc/tmpfiles.d/tmp.conf
: >/root/etc/machine-id; : >/root/etc/fstab; echo numavm >/root/etc/hostname
rm -rf $units/*.target.wants $units/*.target.requires
cat >$units/numavm.target <<'END'
[Unit]
Requires=basic.target numavm-job.service
Wants=dbus.service
After=basic.target
END
cat >$units/numavm-job.service <<'END'
[Unit]
Requires=basic.target
After=basic.target dbus.service
[Service]
Type=oneshot
TimeoutStartSec=infinity
WorkingDirectory=/xchg
ExecStart=/bin/bash /xchg/.job
StandardOutput=append:/xchg/.out
StandardError=inherit
ExecStopPost=/bin/sh -c "echo $$EXIT_STATUS >/xchg/.rc; sync; systemctl poweroff -ff >/dev/null 2>&1"
END
printf '[Journal]\nStorage=volatile\nRateLimitBurst=0\n' >/root/etc/systemd/journald.conf.d/numavm.conf
for unit in timers.target systemd-timesyncd.service systemd-udevd.service systemd-udev-trigger.service \
            systemd-udevd-kernel.socket systemd-udevd-control.socket getty.target; do ln -sf /dev/null $units/$unit; done
umount /proc; umount /sys; umount /dev
trap - EXIT
exec switch_root /root /lib/systemd/systemd --unit=numavm.target
INIT
}

install_missing
[ -s "$cache/initrd" ] && [ "$(sha256sum <"$0")" = "$(cat "$cache/made-by" 2>/dev/null)" ] || make_initramfs

work=$(mktemp -d); servers=()
cleanup() { for server in "${servers[@]}"; do kill "$server" 2>/dev/null || true; done; rm -rf "$work"; }
trap cleanup EXIT
mkdir -p "$work/ro" "$work/none"
rm -f "$out"/.{rc,out,console}; cp "$script" "$out/.script"; chmod +x "$out/.script"
{ echo 'cd /xchg'; printf 'exec /xchg/.script'; [ $# -eq 0 ] || printf ' %q' "$@"; echo; } >"$out/.job"

# The root is shared from a read-only bind mount in a mount namespace of its own: the guest cannot write to it, whatever
# it mounts.
unshare --mount --propagation private sh -euc '
    mount --bind / "$1/ro"; mount -o remount,bind,ro "$1/ro"
    exec "$2" --socket-path="$1/root.sock" -o source="$1/ro",cache=always,sandbox=chroot,xattr,no_posix_lock' \
    - "$work" $virtiofsd >"$work/root.log" 2>&1 & servers+=($!)
share() { # share NAME FOLDER OPTIONS
    $virtiofsd --socket-path="$work/$1.sock" -o source="$2",sandbox=chroot"$3" >"$work/$1.log" 2>&1 & servers+=($!)
}
share layer "$(realpath "${layer:-$work/none}")" ,cache=always,xattr,no_posix_lock
share xchg "$out" ,cache=none
for _ in $(seq 200); do
    [ -S "$work/root.sock" ] && [ -S "$work/layer.sock" ] && [ -S "$work/xchg.sock" ] && break
    sleep .05
done

node() { # node NUMBER FIRST_CPU
    echo "-object memory-backend-memfd,id=m$1,size=${mem}M,share=on -numa node,nodeid=$1,cpus=$2-$(($2 + cpus - 1)),memdev=m$1"
}
folder() { # folder TAG
    echo "-chardev socket,id=$1,path=$work/$1.sock -device vhost-user-fs-pci,chardev=$1,tag=${2:-$1}"
}
# shellcheck disable=SC2046
timeout "$limit" qemu-system-x86_64 -accel tcg,thread=multi -machine q35,hpet=off -cpu max \
    -smp $((2 * cpus)),sockets=2,cores="$cpus" -m $((2 * mem))M $(node 0 0) $(node 1 "$cpus") -numa dist,src=0,dst=1,val=21 \
    $(folder root hostroot) $(folder layer) $(folder xchg) \
    -nodefaults -no-user-config -display none -no-reboot -serial file:"$out/.console" \
    -kernel "$cache/vmlinuz" -initrd "$cache/initrd" \
    -append "console=ttyS0 quiet panic=-1 mitigations=off hugepages=0:$huge,1:$huge systemd.show_status=0 ${NUMAVM_APPEND:-}" \
    >"$work/qemu.log" 2>&1 || { echo "numavm: qemu ended with $?" >&2; cat "$work/qemu.log" >&2; }

[ -f "$out/.out" ] && cat "$out/.out"
[ -s "$out/.rc" ] || { tail -30 "$out/.console" >&2; cat "$work"/*.log >&2; die "no verdict; the console is above"; }
exit "$(cat "$out/.rc")"
