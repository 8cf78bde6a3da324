#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# podman 4.3.1 of Debian 12: a CDI device's variable replaces the variable of `podman run --env`. The user's wish comes
# second, without a word. A variable that the program in the container sets itself stays.
#
# Root runs the script, because podman gets namespaces of its own here. Usage: podman_cdi_environment.sh
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../tests/support/shell.sh"
. "$here/../tests/support/debian.sh"

if [ "${1-}" != inside ]; then
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  unpack_from_debian bookworm "$work" podman=4.3.1+ds1-8+deb12u1+b3 conmon=2.1.6+ds1-1 crun=1.8.1-1+deb12u1 \
    busybox-static=1:1.35.0-4+deb12u1+b1 libassuan0 libdevmapper1.02.1 libgpgme11 libseccomp2 libsubid4 libyajl2 \
    || { echo "$(basename "$0"): these versions cannot be had" >&2; exit 2; }
  unshare --mount --net "$(realpath "$0")" inside "$work"
  exit
fi

# ---- podman's needs: folders of its own, and control groups of version 1 on a system with both versions ----

work=$2
if mountpoint -q /sys/fs/cgroup/unified; then umount /sys/fs/cgroup/unified; fi
for folder in /run /dev/shm; do mount -t tmpfs -o mode=0755 tmpfs $folder; done
cat > "$work/storage.conf" << END
[storage]
driver = "vfs"
graphroot = "$work/images"
runroot = "/run/storage"
END
cat > "$work/containers.conf" << END
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[engine]
conmon_path = ["$work/usr/bin/conmon"]
runtime = "crun"
cgroup_manager = "cgroupfs"
events_logger = "none"
lock_type = "file"
[engine.runtimes]
crun = ["$work/usr/bin/crun"]
END
export CONTAINERS_CONF=$work/containers.conf CONTAINERS_STORAGE_CONF=$work/storage.conf
export LD_LIBRARY_PATH=$work/usr/lib/x86_64-linux-gnu:$work/lib/x86_64-linux-gnu
mkdir -p /run/cdi "$work/container/bin"
cp "$work/bin/busybox" "$work/container/bin/env"
printf '%s' '{"cdiVersion": "0.3.0", "kind": "example.com/thing", "devices": [
  {"name": "one", "containerEdits": {"env": ["COLOUR=of-the-device"]}}]}' > /run/cdi/thing.json

# colour ARGUMENT...: prints COLOUR in a container with these arguments.
colour() { "$work/usr/bin/podman" run --rm --network=none "$@" | sed -n 's/^COLOUR=//p'; }
expect() {
  echo "$1: COLOUR=$2"
  [ "$2" = "$3" ] || fail "it was $3: it has changed"
}

"$work/usr/bin/podman" --version
expect "no device, --env" "$(colour --env COLOUR=of-the-user --rootfs "$work/container" /bin/env)" of-the-user
expect "device, no --env" "$(colour --device example.com/thing=one --rootfs "$work/container" /bin/env)" of-the-device
expect "device and --env" \
  "$(colour --device example.com/thing=one --env COLOUR=of-the-user --rootfs "$work/container" /bin/env)" of-the-device
expect "device, set by the program" \
  "$(colour --device example.com/thing=one --rootfs "$work/container" /bin/env COLOUR=of-the-user /bin/env)" of-the-user
