# SPDX-License-Identifier: Apache-2.0
#
# Real containers for tests, by podman. A script of root sources this file. The script goes on in a mount namespace of
# its own, and in a network namespace of its own if the script sets own_network=--net, so the machine's containers,
# networks and files stay untouched. Only empty control groups stay.
# work: a folder for all scripts. Usage of all scripts: NAME_test.sh WORK_DIR BUILD_DIR
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source_dir=$(realpath "$here/../..")
work=$(realpath -m "$1") build=$(realpath "$2")
mkdir -p "$work"
. "$source_dir/tests/support/shell.sh"

for tool in podman crun ip mmdebstrap; do
  command -v $tool > /dev/null || fail "needs $tool: deploy/packages.sh test"
done
if [ -z "${IN_OWN_MOUNT_NAMESPACE:-}" ]; then exec env IN_OWN_MOUNT_NAMESPACE=1 unshare --mount ${own_network:-} "$0" "$@"; fi
if [ -n "${own_network:-}" ]; then ip link set lo up; fi
# On machines with control groups of both versions, crun takes version 1 if version 2 is hidden.
if mountpoint -q /sys/fs/cgroup/unified; then umount /sys/fs/cgroup/unified; fi
resolv=$(cat /etc/resolv.conf)
mkdir -p /var/lib/cni
for folder in /run /dev/shm /var/lib/cni; do mount -t tmpfs -o mode=0755 tmpfs $folder; done
if [ ! -e /etc/resolv.conf ]; then  # a link into /run
  mkdir -p "$(dirname "$(readlink -m /etc/resolv.conf)")"
  echo "$resolv" > "$(readlink -m /etc/resolv.conf)"
fi
mkdir /run/lock

driver=overlay
if [ "$(stat -f -c %T "$work")" = overlayfs ]; then driver=vfs; fi  # an overlay cannot lie on another overlay
# Images and containers of these tests alone. podman's own default limits may exceed this shell's limits.
cat > "$work/storage.conf" << END
[storage]
driver = "$driver"
graphroot = "$work/images"
runroot = "/run/storage"
END
cat > "$work/containers.conf" << END
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]
[network]
network_backend = "cni"
network_config_dir = "/run/networks"
[engine]
runtime = "crun"
cgroup_manager = "cgroupfs"
events_logger = "none"
lock_type = "file"
END
echo 'unqualified-search-registries = []' > "$work/registries.conf"
export DISABLE_HC_SYSTEMD=true  # no timers of the machine
export CONTAINERS_CONF=$work/containers.conf CONTAINERS_STORAGE_CONF=$work/storage.conf CONTAINERS_REGISTRIES_CONF=$work/registries.conf

# base_image NAME: makes an image of this name with Debian, from the packages that this machine gets. Asks no registry.
base_image() {
  if [ ! -f "$work/base.tar" ]; then
    local sources=/etc/apt/sources.list.d/debian.sources
    [ -f $sources ] || sources=/etc/apt/sources.list
    mmdebstrap --quiet --variant=minbase "$(. /etc/os-release; echo "$VERSION_CODENAME")" "$work/base.part.tar" $sources
    mv "$work/base.part.tar" "$work/base.tar"
  fi
  podman import --quiet "$work/base.tar" "docker.io/library/$1" > /dev/null
}
