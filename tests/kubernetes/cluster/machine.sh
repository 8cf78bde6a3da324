# SPDX-License-Identifier: Apache-2.0
#
# A machine with a cluster of its own: its only node, gpu1, is also the control plane. run.sh starts a script as the
# first process of new namespaces, with the arguments WORK_DIR PROGRAMS_DIR; the script sources this file.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
work=$1 programs=$2
. "$here/../../support/shell.sh"
address=10.77.0.1
export HOME=$work/machine KUBECONFIG=$work/machine/kubeconfig PATH=$programs:$PATH
unset VRAMBROKER_SOCKET_DIR

# ---- Folders, control groups, network ----

mount --make-rshared /
for folder in var/lib var/log; do
  mkdir -p "$work/machine/$folder"
  mount --bind "$work/machine/$folder" "/$folder"
done
mount -t tmpfs -o mode=0755 tmpfs /run
if mountpoint -q /sys/fs/cgroup/unified; then umount /sys/fs/cgroup/unified; fi
for controller in $(awk '$3 == "cgroup" { print $2 }' /proc/mounts); do
  mount --bind "$controller/$group" "$controller"
done
# kubelet writes into copies of these settings. The machine's own settings stay unchanged.
for setting in vm/overcommit_memory vm/panic_on_oom kernel/panic kernel/panic_on_oops kernel/keys/root_maxkeys kernel/keys/root_maxbytes; do
  mkdir -p "$work/machine/settings/$(dirname $setting)"
  cat /proc/sys/$setting > "$work/machine/settings/$setting"
  mount --bind "$work/machine/settings/$setting" /proc/sys/$setting
done
hostname gpu1
ip link set lo up
ip address add $address/32 dev lo
cd "$work/machine"
mkdir logs cni

# ---- Configuration of the programs ----

: > resolv.conf
openssl genrsa -out accounts.key 2048 2> /dev/null
echo 'cluster-test,admin,1,system:masters' > tokens
cat > kubeconfig << END
apiVersion: v1
kind: Config
clusters: [{name: one, cluster: {server: "https://$address:6443", insecure-skip-tls-verify: true}}]
users: [{name: admin, user: {token: cluster-test}}]
contexts: [{name: one, context: {cluster: one, user: admin}}]
current-context: one
END
# An overlay cannot lie on another overlay.
snapshotter=overlayfs
if [ "$(stat -f -c %T "$work")" = overlayfs ]; then snapshotter=native; fi
cat > containerd.toml << END
version = 2
root = "$work/machine/containerd"
state = "/run/containerd"
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/pause:1"
  restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = "$snapshotter"
[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "/usr/lib/cni"
  conf_dir = "$work/machine/cni"
END
cat > cni/pods.conflist << END
{"cniVersion": "0.4.0", "name": "pods", "plugins": [{
  "type": "bridge", "bridge": "pods", "isGateway": true,
  "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.78.0.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
END
cat > kubelet.yaml << END
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
address: $address
readOnlyPort: 0
cgroupDriver: cgroupfs
cgroupsPerQOS: false
enforceNodeAllocatable: []
failSwapOn: false
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
evictionHard: {memory.available: "10Mi", nodefs.available: "1%"}
makeIPTablesUtilChains: false
resolvConf: $work/machine/resolv.conf
END

# ---- Start of the programs ----

# start NAME PROGRAM...: runs PROGRAM in the background, with a log of its own. ${process[NAME]} is the program's
# process.
declare -A process
start() {
  "${@:2}" >> "logs/$1.log" 2>&1 &
  process[$1]=$!
}
start_kubelet() {
  start kubelet kubelet --config=kubelet.yaml --kubeconfig=kubeconfig --container-runtime=remote \
    --container-runtime-endpoint=unix:///run/containerd/containerd.sock --hostname-override=gpu1 --node-ip=$address
}
runs() {
  local name
  for name in "${!process[@]}"; do kill -0 "${process[$name]}" 2> /dev/null || fail "$name has ended"; done
  "$@" > /dev/null 2>&1
}
# Kills all programs outside of the control plane at once, and empties /run.
restart_node() {
  local program kept=" 1 "
  for program in etcd kube-apiserver kube-controller-manager kube-scheduler; do kept+="${process[$program]} "; done
  for program in /proc/[0-9]*; do
    case $kept in *" ${program#/proc/} "*) ;; *) kill -KILL "${program#/proc/}" 2> /dev/null || true ;; esac
  done
  { wait "${process[kubelet]}" "${process[containerd]}" || true; } 2> /dev/null
  umount --recursive --lazy /run
  mount -t tmpfs -o mode=0755 tmpfs /run
  start containerd containerd --config containerd.toml
  start_kubelet
}
start_cluster() {
  start containerd containerd --config containerd.toml
  start etcd etcd --data-dir etcd --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 \
    --listen-peer-urls http://127.0.0.1:2380
  start kube-apiserver kube-apiserver --etcd-servers=http://127.0.0.1:2379 --bind-address=$address --advertise-address=$address \
    --secure-port=6443 --cert-dir=certificates --token-auth-file=tokens --authorization-mode=RBAC --service-cluster-ip-range=10.79.0.0/24 \
    --service-account-issuer=https://$address --service-account-key-file=accounts.key --service-account-signing-key-file=accounts.key \
    --kubelet-preferred-address-types=InternalIP
  until_true runs kubectl get --raw /readyz
  start kube-controller-manager kube-controller-manager --kubeconfig=kubeconfig --leader-elect=false --port=0 \
    --cert-dir=certificates --service-account-private-key-file=accounts.key
  start kube-scheduler kube-scheduler --kubeconfig=kubeconfig --leader-elect=false --port=0 --cert-dir=certificates
  until_true runs ctr version
  for image in "$work"/{pause,vrambroker}.tar; do
    ctr --namespace k8s.io image import --snapshotter $snapshotter "$image" > /dev/null || fail "ctr image import $image"
  done
  start_kubelet
  until_true runs kubectl wait --for=condition=Ready node/gpu1 --timeout=0
  until_true runs kubectl get serviceaccount default
}
