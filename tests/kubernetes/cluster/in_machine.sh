#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# run.sh runs this script: starts the cluster, and checks the cluster. Usage: in_machine.sh WORK_DIR PROGRAMS_DIR
. "$(dirname "$0")/machine.sh"
explain() {
  kubectl get pods --all-namespaces --output wide || true
  kubectl get events --all-namespaces --sort-by .lastTimestamp | tail -n 20 || true
  kubectl logs --namespace vrambroker daemonset/vrambroker --all-containers --tail 30 || true
  tail -n 15 logs/*.log | cut -c1-300
}
resource=vrambroker.dev/memory-256mi
manifests=$work/source/deploy/kubernetes

# ---- Questions and actions of the checks ----

quietly() { "$@" > /dev/null 2>&1; }
# refused TEXT COMMAND...: expects that COMMAND fails and says TEXT. A timeout ends a command that holds memory.
refused() {
  local text=$1
  shift
  if timeout 600 "$@" > refused 2>&1; then fail "done, not refused: $*"; fi
  grep -v '^command terminated' refused | cut -c1-300
  grep -q -- "$text" refused || fail "not said: $text"
}
units() { [ "$(kubectl get node gpu1 --output "jsonpath={.status.allocatable.vrambroker\.dev/memory-256mi}")" = "$1" ]; }
in_daemon() { kubectl exec --namespace vrambroker daemonset/vrambroker --container vrambrokerd -- "$@"; }
plugin_pod() { kubectl get pods --namespace vrambroker --field-selector status.phase=Running --output 'jsonpath={.items[0].metadata.name}'; }
restarts() { kubectl get pods --namespace "$1" "${@:3}" --output "jsonpath={.items[*].status.containerStatuses[?(@.name==\"$2\")].restartCount}"; }
# Prints the claims of a pod or a container: NAMESPACE/POD/CONTAINER NAME LIMIT RESERVED SESSIONS, sizes in MiB.
claims() { in_daemon vramctl claim ls --format json > answer 2> /dev/null && "$here/claims.py" "$@" < answer; }
claim_is() { [ "$(claims "default/$1" | cut -d' ' -f3-)" = "$2" ]; }  # POD "LIMIT RESERVED SESSIONS"
no_claims() { claims "$@" > left && [ ! -s left ]; }
# pod NAME UNITS COMMAND [RESTART_POLICY]: makes a pod with a container that runs COMMAND in a shell. UNITS 0: no units.
pod() {
  local limits=""
  [ "$2" = 0 ] || limits="limits: {$resource: $2}"
  kubectl apply -f - > /dev/null << END
apiVersion: v1
kind: Pod
metadata: {name: $1}
spec:
  restartPolicy: ${4:-Never}
  terminationGracePeriodSeconds: 1
  automountServiceAccountToken: false
  containers:
  - {name: main, image: "vrambroker:$version", command: [sh, -c, "$3"], resources: {$limits}}
END
}
phase() { [ "$(kubectl get pod "$1" --output 'jsonpath={.status.phase}')" = "$2" ]; }
remove() { kubectl delete pod --wait "$@" > /dev/null; }
served() { quietly kubectl rollout status --namespace vrambroker daemonset/vrambroker --timeout 1s && units "$1"; }
plugin_log() { kubectl logs --namespace vrambroker "$(plugin_pod)" --container device-plugin "$@" 2> /dev/null; }
# guide NUMBER: runs commands of the guide, word by word.
guide() {
  "$here/guide.py" "$work/source/deploy/kubernetes/README.md" "$1" > guide
  (cd "$work/source" && bash "$work/machine/guide" 2>&1) | grep -v '^# Warning:' || fail "the guide's commands"
}

say "A cluster of one node"
version=$(cat "$work/version")
start_cluster
echo "Kubernetes of Debian's source package $(cat "$programs/version")"
etcd --version | head -n 1
containerd --version | cut -c1-70
runc --version | head -n 1
kubectl get nodes --output wide | cut -c1-170
sed -i 's/^# capacity: .*/capacity: "2GiB"/' "$manifests/base/vrambroker.textproto"

say "1. The API server takes the manifests, and not others"
kubectl apply -f "$manifests/base/namespace.yaml"
for folder in base host runtime-class; do kubectl apply --dry-run=server -k "$manifests/$folder" 2>&1 | grep -v '^# Warning:'; done
for file in "$manifests"/examples/*.yaml; do kubectl apply --dry-run=server -f "$file"; done
kubectl kustomize "$manifests/base" | sed 's/nodeSelector:/nodeSelektor:/' > misspelt.yaml
refused nodeSelektor kubectl apply --dry-run=server -f misspelt.yaml
kubectl kustomize "$manifests/base" | sed 's/hostPID: true/hostPID: 7/' > wrong.yaml
refused hostPID kubectl apply --dry-run=server --validate=false -f wrong.yaml
kubectl delete namespace vrambroker

say "2. The guide, command by command: from nothing to a pod with a limit"
guide 1
until_true served 8
until_true claim_is trainer "1024 512 1"
kubectl get pods --all-namespaces --output wide | cut -c1-90
guide 2 | awk '/^\+/ { long = /describe node/ } !long || /^\+/ || /vrambroker.dev\/memory/' | cut -c1-200
until_true no_claims

say "3. Two processes of a pod, and a shell in it, have one limit: 512 MiB"
pod first 2 "vramctl hold 200MiB --name one & vramctl hold 200MiB --name two & wait"
until_true claim_is first "512 400 2"
refused "claim k8s-" kubectl exec first -- vramctl hold 200MiB
kubectl exec first -- sh -c 'vramctl hold 100MiB --name shell > /dev/null 2>&1 & echo $! > /tmp/shell'
until_true claim_is first "512 500 3"
refused "claim k8s-" kubectl exec first -- vramctl hold 20MiB
kubectl exec first -- sh -c 'kill $(cat /tmp/shell)'
until_true claim_is first "512 400 2"

say "4. What does not fit waits"
pod second 7 "exec vramctl hold 1700MiB --name big"
has_waited() { kubectl get events --field-selector reason=FailedScheduling,involvedObject.name=second | grep "Insufficient $resource"; }
until_true quietly has_waited
has_waited | tail -n 1 | cut -c1-200
phase second Pending || fail "it does not wait"
claims
remove first
until_true claim_is second "1792 1700 1"
phase second Running || fail "it does not run"
until_true no_claims default/first
claims
in_daemon vramctl status | tail -n 2
remove second
until_true no_claims

say "5. A pod sees its own claim alone, and without the resource nothing"
for name in first second; do pod $name 2 "exec vramctl hold 100MiB --name $name"; done
pod without 0 "exec sleep 1000000"
until_true claim_is first "512 100 1"
until_true claim_is second "512 100 1"
until_true phase without Running
in_daemon vramctl claim show "$(claims default/first | cut -d' ' -f2)" | grep -E '^(claim|device|label) '
[ "$(kubectl exec first -- ls /run/vrambroker | sort | xargs)" = "vram-count.sock vrambroker-fd.sock vrambroker.sock" ] || fail "it sees more than its sockets"
kubectl exec first -- vramctl sessions
[ "$(kubectl exec first -- vramctl sessions --format json | grep -c '"name": "second"')" = 0 ] || fail "it sees the other's session"
refused "." kubectl exec first -- vramctl claim rm "$(claims default/second | cut -d' ' -f2)"
refused "Read-only" kubectl exec first -- touch /run/vrambroker/file
refused "No such file" kubectl exec without -- ls /run/vrambroker
refused "." kubectl exec without -- vramctl status
remove second without
until_true no_claims default/second

say "6. Metrics of the pod's claim, at the daemon's pod"
daemon_address=$(kubectl get pods --namespace vrambroker --output 'jsonpath={.items[0].status.podIP}')
echo "$daemon_address"
has_metrics() {
  curl --silent --fail "http://$daemon_address:9477/metrics" > metrics \
    && grep '^vrambroker_claim_info{.*label_pod="first"' metrics && grep '^vrambroker_claim_reserved_bytes{.*} 104857600' metrics
}
until_true quietly has_metrics
has_metrics

# goes_on [UNITS]: expects `first` with its memory as before, the node with its units, and units for a new pod.
goes_on() {
  until_true served "${1:-8}"
  until_true claim_is first "512 100 1"
  [ "$(restarts default main)" = 0 ] || fail "the pod was started again"
  pod new 6 "exec vramctl hold 1500MiB --name new"
  until_true claim_is new "1536 1500 1"
  claims
  remove new
  until_true no_claims default/new
}

say "7. The kubelet is killed"
registrations() { plugin_log | grep -c 'resource registered'; }
known=$(registrations)
kill -KILL "${process[kubelet]}"
{ wait "${process[kubelet]}" || true; } 2> /dev/null
start_kubelet
registered_again() { [ "$(registrations)" -gt "$known" ]; }
until_true registered_again
plugin_log | tail -n 2 | cut -c1-150
goes_on

say "8. The daemon is killed, again and again until the node has no units"
killed_and_noticed() { pkill -KILL -x vrambrokerd; units 0; }
until_true killed_and_noticed
kubectl get node gpu1 --output 'jsonpath={.status.allocatable}' && echo
pod waits 1 "exec vramctl hold 100MiB --name waits"
until_true claim_is waits "256 100 1"
plugin_log | grep -E 'daemon (unavailable|back)' | cut -c1-150
remove waits
goes_on

say "9. The device plugin is killed"
before=$(restarts vrambroker device-plugin)
has_restarted() { [ "$(restarts vrambroker device-plugin)" = $((before + 1)) ]; }
pkill -KILL -f '^vrambroker-device-plugin'
until_true has_restarted
goes_on

say "10. A changed configuration is rolled out: one unit more"
old=$(plugin_pod)
sed -i 's/^capacity: .*/capacity: "2304MiB"/' "$manifests/base/vrambroker.textproto"
kubectl apply -k "$manifests/host" 2>&1 | grep -v '^# Warning:'
goes_on 9
[ "$(plugin_pod)" != "$old" ] || fail "it is the same pod"

say "11. Pods that end while the DaemonSet is away"
kubectl delete -k "$manifests/host" 2>&1 | grep -v '^# Warning:'
until_true units 0
remove first
kubectl apply -k "$manifests/host" > /dev/null 2>&1
until_true served 9
until_true no_claims

say "12. A container that is started again is in its claim; each container has its own"
pod again 2 "exec vramctl hold 100MiB --name again" Always
until_true claim_is again "512 100 1"
claim=$(claims default/again)
pkill -KILL -x vramctl
has_come_back() { [ "$(restarts default main)" = 1 ]; }
until_true has_come_back
until_true claim_is again "512 100 1"
[ "$(claims default/again)" = "$claim" ] || fail "the claim is another one"
claims
remove again
kubectl apply -f - > /dev/null << END
apiVersion: v1
kind: Pod
metadata: {name: several}
spec:
  terminationGracePeriodSeconds: 1
  initContainers:
  - {name: init, image: "vrambroker:$version", command: [vramctl, status], resources: {limits: {$resource: 4}}}
  containers:
  - {name: one, image: "vrambroker:$version", command: [vramctl, hold, 200MiB], resources: {limits: {$resource: 1}}}
  - {name: two, image: "vrambroker:$version", command: [vramctl, hold, 400MiB], resources: {limits: {$resource: 2}}}
END
until_true eval '[ "$(claims default/several/one | cut -d" " -f3-)" = "256 200 1" ]'
until_true eval '[ "$(claims default/several/two | cut -d" " -f3-)" = "512 400 1" ]'
claims
remove several
until_true no_claims

say "13. Eight pods at once, and again"
all_hold() { [ "$(claims | grep -c '256 200 1$')" = 8 ]; }
for round in 1 2; do
  for number in $(seq 8); do pod "pod-$round-$number" 1 "exec vramctl hold 200MiB --name pod"; done
  until_true all_hold
  remove --all
done
until_true no_claims

say "14. A pod that has ended has no units, while Kubernetes still shows it"
pod ended 9 "until [ -e /tmp/end ]; do sleep 0.1; done"
until_true claim_is ended "2304 0 0"
kubectl exec ended -- touch /tmp/end
until_true phase ended Succeeded
until_true no_claims
pod next 9 "exec vramctl hold 2000MiB --name next"
until_true claim_is next "2304 2000 1"
kubectl get pods
claims
remove ended next
until_true no_claims

say "15. A pod that is made again under its name has one claim"
for _ in $(seq 4); do
  pod same 2 "exec vramctl hold 200MiB --name same"
  until_true eval 'claims default/same/main | grep -q " 512 200 1$"'
  remove same
done
pod same 2 "exec vramctl hold 200MiB --name same"
until_true claim_is same "512 200 1"
claims
remove same
until_true no_claims

say "16. The node starts again"
pod stays 2 "exec vramctl hold 100MiB --name stays" Always
until_true claim_is stays "512 100 1"
claim=$(claims default/stays)
restart_node
has_come_back() { [ "$(kubectl get pod stays --output 'jsonpath={.status.containerStatuses[0].restartCount}')" -gt 0 ]; }
until_true has_come_back
until_true served 9
until_true claim_is stays "512 100 1"
[ "$(claims default/stays)" = "$claim" ] || fail "the claim is another one"
claims
remove stays
until_true no_claims

say "17. The guide: removed"
guide 3
until_true units 0
gone() { [ -z "$(kubectl get pods --all-namespaces --output name)" ]; }
until_true gone
ls /var/lib/vrambroker
say "All of it works"
