# SPDX-License-Identifier: Apache-2.0
#
# Real containers for tests, by podman. To be sourced by a script that root runs; it goes on in a mount namespace of its own,
# so that nothing of the machine is changed: no files for the Container Device Interface, no control groups.
# work: a folder of the script's own. Usage of all scripts: NAME_test.sh WORK_DIR BUILD_DIR
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source_dir=$(realpath "$here/../..")
work=$(realpath -m "$1") build=$(realpath "$2")
mkdir -p "$work"
say() { printf '\n== %s\n' "$*"; }

for tool in podman crun ip mmdebstrap; do
  command -v $tool > /dev/null || { echo "$0: needs $tool: deploy/packages.sh test" >&2; exit 1; }
done
if [ -z "${IN_OWN_MOUNT_NAMESPACE:-}" ]; then exec env IN_OWN_MOUNT_NAMESPACE=1 unshare --mount ${own_network:-} "$0" "$@"; fi
if [ -n "${own_network:-}" ]; then ip link set lo up; fi
# Where there are control groups of both versions, crun takes version 1 if version 2 cannot be seen.
if mountpoint -q /sys/fs/cgroup/unified; then umount /sys/fs/cgroup/unified; fi
mkdir -p /run/cdi
mount -t tmpfs tmpfs /run/cdi

# Images and containers of this test alone. The limits that podman would set by itself may be above those of this shell.
cat > "$work/storage.conf" << END
[storage]
driver = "overlay"
graphroot = "$work/images"
runroot = "$work/running"
END
cat > "$work/containers.conf" << END
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[engine]
runtime = "crun"
cgroup_manager = "cgroupfs"
events_logger = "none"
END
export CONTAINERS_CONF=$work/containers.conf CONTAINERS_STORAGE_CONF=$work/storage.conf

# base_image NAME: Debian, made here of the packages that this machine gets, as an image of this name. No registry is asked.
base_image() {
  if [ ! -f "$work/base.tar" ]; then
    local sources=/etc/apt/sources.list.d/debian.sources
    [ -f $sources ] || sources=/etc/apt/sources.list
    mmdebstrap --quiet --variant=minbase "$(. /etc/os-release; echo "$VERSION_CODENAME")" "$work/base.part.tar" $sources
    mv "$work/base.part.tar" "$work/base.tar"
  fi
  podman import --quiet "$work/base.tar" "docker.io/library/$1" > /dev/null
}

# until_true COMMAND...: waits for it, for ten minutes.
until_true() {
  for _ in $(seq 6000); do
    if "$@"; then return; fi
    sleep 0.1
  done
  fail "waited for ten minutes: $*"
}
