#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A training job whose sequences differ in length runs well for thousands of steps, within its limit. Its memory
# fragments; the daemon sees it coming and warns; step 8847 is refused. The report says why and names the part of the
# job, vramctl diagnose a setting. With that the same job runs through.
# Exits 0 only if all of that happened, as printed. Needs no GPU, and next to no memory: nothing is computed.
#
#   --build-dir DIR    the build whose programs are used (default build/release)
set -euo pipefail
cd "$(dirname "$0")/../.."

build_dir=build/release
while [ $# -gt 0 ]; do
  case "$1" in
    --build-dir) build_dir=${2:?--build-dir needs a folder}; shift ;;
    -h|--help) sed -n '4,9s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "step_8847.sh: unknown option '$1'; see --help" >&2; exit 2 ;;
  esac
  shift
done
daemon=$build_dir/server/vrambrokerd vramctl=$build_dir/client/vramctl job=$build_dir/deploy/vrambroker-step-8847
rules=deploy/prometheus/vrambroker.rules.yml
for program in "$daemon" "$vramctl" "$job" "$(command -v curl || echo curl)"; do
  [ -x "$program" ] || { echo "step_8847.sh: no $program; build or install it first, or see --build-dir" >&2; exit 2; }
done

limit_mib=1088
steps=10000
work=$(mktemp -d "${TMPDIR:-/tmp}/vrambroker.XXXXXX")
export VRAMBROKER_SOCKET_DIR=$work/run
daemon_pid="" job_pid=""
cleanup() {
  for pid in $job_pid $daemon_pid; do kill -TERM "$pid" 2>/dev/null && wait "$pid" 2>/dev/null || true; done
  rm -rf "$work"
}
trap cleanup EXIT
say() { printf '\n== %s\n' "$*"; }
fail() {
  printf '\nstep_8847: FAILED: %s\n' "$*" >&2
  tail -n 60 "$work"/*.log "$work"/*.out >&2
  exit 1
}
# until_true WHAT COMMAND...: waits for minutes, which only a machine that hangs needs.
until_true() {
  local what=$1 _; shift
  for _ in $(seq 3000); do
    "$@" && return
    sleep 0.1
  done
  fail "waited for this: $what"
}
# expect FILE TEXT: one of its lines has these very words.
expect() { grep -qF -- "$2" "$1" || fail "expected: $2, in: $(cat "$1")"; }
# number KEY FILE: the first one of that name in JSON.
number() { sed -n 's/^ *"'"$1"'": \([0-9]*\),\{0,1\}$/\1/p' "$2" | head -n 1; }
# As the programs print bytes.
size() { awk -v b="$1" 'BEGIN { if (b >= 2 ^ 30) printf "%.2f GiB", b / 2 ^ 30; else printf "%.2f MiB", b / 2 ^ 20 }'; }
indent() { fold -s -w 116 | sed 's/^/  /'; }

# Windows of a second in place of a minute: a training of days in less than a minute.
cat > "$work/config" <<CONFIG
device: "host" capacity: "4GiB" http_address: "127.0.0.1:0" metrics { fragmentation_window: "1s" }
CONFIG
"$daemon" --config="$work/config" --socket_dir="$VRAMBROKER_SOCKET_DIR" 2> "$work/daemon.log" &
daemon_pid=$!
until_true "the daemon to be ready" grep -q 'daemon ready' "$work/daemon.log"
http=$(grep -o 'http=http://[^/ ]*' "$work/daemon.log" | head -n 1 | cut -d/ -f3)

# start CONF: the job, which waits for a line after each report.
start() {
  rm -f "$work/orders"; mkfifo "$work/orders"
  "$job" --name=trainer --limit="${limit_mib}MiB" --steps="$steps" --alloc_conf="$1" \
      < "$work/orders" > "$work/job.out" 2> "$work/job.log" &
  job_pid=$!
  exec 3> "$work/orders"
}
has_lines() { [ "$(wc -l < "$work/job.out")" -ge "$1" ]; }
# The daemon has looked at the job as its newest line says: the last figure of its timeline is that.
has_looked() {
  local allocated
  allocated=$(tail -n 1 "$work/job.out" | sed 's/.*allocated \(.*\), reserved.*/\1/')
  curl -sf "http://$http/api/v1/timeline" | tr -d ' \n' > "$work/timeline" || return 1
  [ "$(size "$(sed 's/.*"allocated_bytes":\[\([^]]*\)\].*/\1/; s/.*,//' "$work/timeline")")" = "$allocated" ]
}
# Seconds, while there is a trend.
expected_seconds() {
  curl -sf "http://$http/metrics" > "$work/metrics"
  sed -n 's/^vrambroker_client_refusal_expected_seconds{.*client="trainer".*} //p' "$work/metrics"
}

say "A training job with a limit of $(size $((limit_mib << 20))), and sequences of different lengths"
start ""
seconds=""
for ((report = 1; ; ++report)); do
  until_true "report $report of the job" has_lines "$report"
  tail -n 1 "$work/job.out" | indent
  ! grep -q REFUSED "$work/job.out" || fail "refused before it was warned about"
  until_true "the daemon to have seen report $report" has_looked
  seconds=$(expected_seconds)
  [ -z "$seconds" ] || break
  echo >&3
done
warned_at=$(tail -n 1 "$work/job.out" | awk '{ print $2 }')

say "The warning, at step $warned_at"
expr=$(grep -A 1 'alert: VrambrokerFragmentationGrows$' "$rules" | sed -n 's/^ *expr: //p')
[ "$expr" = "round(vrambroker_client_refusal_expected_seconds, 60) < 3600" ] || fail "the alert has changed: $expr"
grep '^vrambroker_client_refusal_expected_seconds{.*client="trainer"' "$work/metrics" | indent
awk -v s="$seconds" 'BEGIN { exit !(int((s + 30) / 60) * 60 < 3600) }' || fail "no alert at $seconds s"
echo "The alert VrambrokerFragmentationGrows fires: $expr" | indent

say "It goes on"
exec 3>&-  # nobody waits any more
code=0
wait "$job_pid" || code=$?
job_pid=""
[ "$code" = 1 ] || fail "the job ended with exit code $code, not 1"
tail -n 1 "$work/job.out" | indent
expect "$work/job.out" "step 8847: REFUSED: out of memory (fragmentation) on device 0: "

say "vramctl ooms: the cause, and the part of the job"
"$vramctl" ooms --format=json > "$work/ooms.json"
"$vramctl" ooms > "$work/ooms.out"
indent < "$work/ooms.out"

say "vramctl diagnose trainer --for torch-2.6"
"$vramctl" diagnose trainer --for torch-2.6 > "$work/diagnose.out"
"$vramctl" diagnose trainer --for torch-2.6 --format=json > "$work/diagnose.json"
indent < "$work/diagnose.out"
setting=$(sed -n '/"helping"/,$s/^ *"alloc_conf": "\(.*\)",$/\1/p' "$work/diagnose.json" | head -n 1)

say "The same job with $setting"
start "$setting"
exec 3>&-
wait "$job_pid" || fail "it was refused again"
job_pid=""
tail -n 3 "$work/job.out" | indent
