#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Tests deploy/kubernetes and its guide on a real Kubernetes on this machine, with the project's image and manifests.
# Root runs the script by hand, on Debian 12 with control groups of version 1. The script asks no registry.
# Usage: run.sh WORK_DIR BUILD_DIR PROGRAMS_DIR   a folder of its own, a build of the project, the programs of build.sh
#
# The cluster runs in namespaces of its own: mounts, processes, network, control groups. The cluster has its own /run,
# /var/lib and /var/log, and files stand in for the kernel's settings. So the machine stays unchanged, even if SIGKILL
# ends this script.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
source_dir=$(realpath "$here/../../..")
. "$source_dir/tests/support/shell.sh"
[ $# = 3 ] || { sed -n '6s/^# //p' "$0" >&2; exit 2; }
mkdir -p "$1"
work=$(realpath "$1") build=$(realpath "$2") programs=$(realpath "$3")
for tool in mmdebstrap etcd containerd ctr runc kubectl openssl curl cc ip git python3; do
  command -v $tool > /dev/null || fail "needs $tool: deploy/packages.sh test; apt-get install etcd-server containerd runc kubernetes-client"
done
[ -x /usr/lib/cni/bridge ] || fail "needs the package containernetworking-plugins"
for program in kube-apiserver kube-controller-manager kube-scheduler kubelet; do
  [ -x "$programs/$program" ] || fail "$programs has no $program: build.sh makes it"
done
[ -d /sys/fs/cgroup/memory ] || fail "this kubelet needs control groups of version 1"

settings() { sysctl vm.overcommit_memory vm.panic_on_oom kernel.panic kernel.panic_on_oops kernel.keys.root_maxkeys kernel.keys.root_maxbytes; }
before=$(settings)

# ---- Images: Debian from the packages that this machine gets, with bundle.sh's output for the build ----

say "Images"
if [ ! -f "$work/base.tar" ]; then
  sources=/etc/apt/sources.list.d/debian.sources
  [ -f $sources ] || sources=/etc/apt/sources.list
  mmdebstrap --quiet --variant=minbase "$(. /etc/os-release; echo "$VERSION_CODENAME")" "$work/base.part.tar" $sources
  mv "$work/base.part.tar" "$work/base.tar"
fi
"$source_dir/deploy/bundle.sh" --build-dir "$build" --output "$work/bundle.tar.gz" > "$work/bundle.log" 2>&1 \
  || { cat "$work/bundle.log"; fail "bundle.sh"; }
read -r _ version _ < <("$build/server/vrambrokerd" --version)
echo "$version" > "$work/version"
rm -rf "$work/layers" "$work/machine"
mkdir -p "$work/layers/opt/vrambroker" "$work/layers/pause" "$work/machine"
tar -xzf "$work/bundle.tar.gz" -C "$work/layers/opt/vrambroker" --strip-components=1
tar -C "$work/layers" --owner=0 --group=0 -cf "$work/layers/bundle.tar" opt
echo 'int pause(void); int main(void) { for (;;) pause(); }' | cc -static -o "$work/layers/pause/pause" -x c -
tar -C "$work/layers/pause" --owner=0 --group=0 -cf "$work/layers/pause.tar" pause
python3 "$here/image.py" "$work/vrambroker.tar" "docker.io/library/vrambroker:$version" vrambrokerd "$work/base.tar" "$work/layers/bundle.tar"
python3 "$here/image.py" "$work/pause.tar" localhost/pause:1 /pause "$work/layers/pause.tar"
rm -rf "$work/source"
git -C "$source_dir" ls-files -z --cached --others --exclude-standard | tar -C "$source_dir" --null --files-from=- -c | tar -x --one-top-level="$work/source"
"$build/server/vrambrokerd" --version

# ---- The cluster's own control groups, removed whatever happens to this script ----

group=vrambroker-cluster-$$
remove_groups() {
  cat > /dev/null  # waits until this script and all its processes have ended
  for _ in $(seq 6000); do
    find /sys/fs/cgroup/*/$group -depth -type d -exec rmdir {} + > /dev/null 2>&1 || true
    ls -d /sys/fs/cgroup/*/$group > /dev/null 2>&1 || return 0
    sleep 0.1
  done
}
export -f remove_groups
export group
exec {alive}> >(exec setsid bash -c remove_groups)
remover=$!
for controller in $(awk '$3 == "cgroup" { print $2 }' /proc/mounts); do
  mkdir "$controller/$group"
  if [ -e "$controller/$group/cpuset.cpus" ]; then
    for file in cpuset.cpus cpuset.mems; do cat "$controller/$file" > "$controller/$group/$file"; done
  fi
done

# ---- The machine ----

code=0
(
  for controller in $(awk '$3 == "cgroup" { print $2 }' /proc/mounts); do echo "$BASHPID" > "$controller/$group/cgroup.procs"; done
  exec setpriv --pdeathsig KILL unshare --mount --net --uts --ipc --cgroup --pid --fork --kill-child --mount-proc \
    "$here/in_machine.sh" "$work" "$programs"
) || code=$?
exec {alive}>&-
wait $remover || true
[ "$(settings)" = "$before" ] || fail "the machine's settings have changed: $(settings)"
exit $code
