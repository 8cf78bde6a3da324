#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# A training job whose sequences differ in length runs well for thousands of steps, within its limit. The job's memory
# fragments. The daemon warns early; step 8847 is refused. The report explains the refusal and names the part of the
# job. vramctl diagnose finds a setting, and with the setting the job runs through.
# Exits 0 only if the story happens as printed. Needs no GPU and hardly any memory: the job computes nothing.
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
command -v curl > /dev/null || { echo "step_8847.sh: needs curl; install it" >&2; exit 2; }
for program in "$daemon" "$vramctl" "$job"; do
  [ -x "$program" ] || { echo "step_8847.sh: no $program; build or install it first, or see --build-dir" >&2; exit 2; }
done

limit_mib=1280 refused_at=8847 steps=10000
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
# until_true WHAT COMMAND...: waits up to five minutes until COMMAND succeeds. A longer wait means a hang.
until_true() {
  local what=$1 _; shift
  for _ in $(seq 3000); do
    "$@" && return
    sleep 0.1
  done
  fail "waited for this: $what"
}
# expect FILE TEXT: expects a line with TEXT in FILE.
expect() { grep -qF -- "$2" "$1" || fail "expected: $2, in: $(cat "$1")"; }
# expect_like FILE EXPRESSION: expects a line in FILE that matches EXPRESSION.
expect_like() { grep -qE -- "$2" "$1" || fail "expected a line like: $2, in: $(cat "$1")"; }
# number KEY FILE: prints KEY's first value in the JSON file.
number() { sed -n 's/^ *"'"$1"'": \([0-9]*\),\{0,1\}$/\1/p' "$2" | head -n 1; }
# size BYTES: prints BYTES as the programs do.
size() { awk -v b="$1" 'BEGIN { if (b >= 2 ^ 30) printf "%.2f GiB", b / 2 ^ 30; else printf "%.2f MiB", b / 2 ^ 20 }'; }
# exactly BYTES: also prints the number of bytes where two decimals are inexact.
exactly() {
  local unit=1
  while [ $((unit * 1024)) -le "$1" ]; do unit=$((unit * 1024)); done
  if [ $(($1 % unit * 100 % unit)) = 0 ]; then size "$1"; else echo "$1 B ($(size "$1"))"; fi
}
mib_of() { echo $((($1 + (1 << 20) - 1) >> 20)); }  # rounds up
indent() { fold -s -w 116 | sed 's/^/  /; s/ *$//'; }

# Windows of a second instead of a minute let the daemon see a training of days in less than a minute.
cat > "$work/config" <<CONFIG
device: "host" capacity: "4GiB" http_address: "127.0.0.1:0" metrics { fragmentation_window: "1s" }
CONFIG
"$daemon" --config="$work/config" --socket_dir="$VRAMBROKER_SOCKET_DIR" 2> "$work/daemon.log" &
daemon_pid=$!
until_true "the daemon to be ready" grep -q 'daemon ready' "$work/daemon.log"
http=$(grep -o 'http=http://[^/ ]*' "$work/daemon.log" | head -n 1 | cut -d/ -f3)

# start CONF: starts the job with CONF. The job waits for a line after each report.
start() {
  rm -f "$work/orders"; mkfifo "$work/orders"
  "$job" --name=trainer --limit="${limit_mib}MiB" --steps="$steps" --alloc-conf="$1" \
      < "$work/orders" > "$work/job.out" 2> "$work/job.log" &
  job_pid=$!
  exec 3> "$work/orders"
}
has_lines() { [ "$(wc -l < "$work/job.out")" -ge "$1" ]; }
# has_looked: succeeds if the last figure of the daemon's timeline equals the job's newest report.
has_looked() {
  local allocated
  allocated=$(tail -n 1 "$work/job.out" | sed 's/.*allocated \(.*\), reserved.*/\1/')
  curl -sf "http://$http/api/v1/timeline" | tr -d ' \n' > "$work/timeline" || return 1
  [ "$(size "$(sed 's/.*"allocated_bytes":\[\([^]]*\)\].*/\1/; s/.*,//' "$work/timeline")")" = "$allocated" ]
}
# expected_seconds: prints the expected seconds until a refusal, and nothing without a trend.
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

say "The warning, at step $warned_at of $steps"
expression=$(grep -A 1 'alert: VrambrokerFragmentationGrows$' "$rules" | sed -n 's/^ *expr: //p')
[ "$expression" = "round(vrambroker_client_refusal_expected_seconds, 60) < 3600" ] || fail "the alert is now: $expression"
awk -v s="$seconds" 'BEGIN { exit !(int(s / 60 + 0.5) * 60 < 3600) }' || fail "$seconds s are no alert"
grep '^vrambroker_client_refusal_expected_seconds{.*client="trainer"' "$work/metrics" | indent
echo "VrambrokerFragmentationGrows fires where $expression" | indent

say "Nobody reacts"
exec 3>&-  # at the end of its input the job no longer waits
code=0
wait "$job_pid" || code=$?
job_pid=""
[ "$code" = 1 ] || fail "the job ended with exit code $code, not 1"
tail -n 2 "$work/job.out" | indent

# All reports have equal figures, and the figures add up.
"$vramctl" ooms --format=json > "$work/ooms.json"
for key in refusal requested_bytes block_bytes segment_bytes limit_bytes room_bytes reserved_bytes allocated_bytes \
           hole_bytes holes hole_segments largest_free_block_bytes; do
  declare "$key=$(number "$key" "$work/ooms.json")"
done
sed -n '/"scopes"/,$p' "$work/ooms.json" > "$work/scopes.json"  # the first scope pins most
for key in allocated_bytes bytes_at_peak blocks pinned_hole_bytes; do
  declare "metrics_$key=$(number "$key" "$work/scopes.json")"
done
sed -n '/"pinned_segments"/,$p' "$work/ooms.json" > "$work/pinned.json"
for key in segment_bytes hole_bytes block_bytes held_seconds; do declare "pinned_$key=$(number "$key" "$work/pinned.json")"; done
[ "$limit_bytes" = $((limit_mib << 20)) ] || fail "the limit is $limit_bytes"
[ $((allocated_bytes + block_bytes)) -le "$limit_bytes" ] || fail "that is no fragmentation: it would not have fit anyway"
[ "$room_bytes" = $((limit_bytes - reserved_bytes)) ] && [ "$room_bytes" -lt "$segment_bytes" ] || fail "there was room: $room_bytes"
[ "$hole_bytes" = $((reserved_bytes - allocated_bytes)) ] || fail "not all that is free are holes: $hole_bytes"
[ "$largest_free_block_bytes" -lt "$block_bytes" ] || fail "it would have fit into a hole"
why="what is allocated and $(size "$block_bytes") more would fit within the limit of $(exactly "$limit_bytes"), but it needs \
a segment of $(exactly "$segment_bytes"), and only $(size "$room_bytes") can still be reserved; $(size "$hole_bytes") is \
fragmented: $holes holes between used blocks, in $hole_segments segments, "
expect "$work/job.out" "step $refused_at: REFUSED: out of memory (fragmentation) on device 0: $(exactly "$requested_bytes") requested; $why"
expect "$work/job.out" "and the largest free block is $(exactly "$largest_free_block_bytes"); the segment with most of them has \
$(size "$pinned_hole_bytes") of $(size "$pinned_segment_bytes") in holes, and is pinned by 1 block of $(size "$pinned_block_bytes") held for \
$pinned_held_seconds s in scope metrics; the largest scope is metrics, with $(size "$metrics_allocated_bytes") in \
$metrics_blocks blocks; "
expect "$work/job.out" "limit $(exactly "$limit_bytes"), reserved $(exactly "$reserved_bytes"), allocated $(exactly "$allocated_bytes"). "
advice="Free the blocks that pin partly used segments (vramctl map shows these), or raise the session's limit to \
$(mib_of $((reserved_bytes + segment_bytes)))MiB (vramctl limit), or look for settings that make fewer holes: \
vramctl ooms --diagnose $refusal tries them."
expect "$work/job.out" "$advice"

say "vramctl ooms: the cause, and the part of the job"
"$vramctl" ooms > "$work/ooms.out"
indent < "$work/ooms.out"
expect_like "$work/ooms.out" "^$refusal +[-0-9]+ [:0-9]+ +trainer +0 +fragmentation +$(size "$requested_bytes") +$(size "$limit_bytes") +\
$(size "$reserved_bytes") +$(size "$allocated_bytes") +0 B$"
expect "$work/ooms.out" "  why: $why"
[ "$(grep -cE '^       segment .* [0-9]+ blocks? in use, held longest: .* in metrics$' "$work/ooms.out")" = 3 ] ||
  fail "expected three segments that are pinned by metrics"
expect_like "$work/ooms.out" '^  in:  scope (forward/layer[123]|backward)$'
[ $((metrics_pinned_hole_bytes * 10)) -gt $((hole_bytes * 9)) ] || fail "metrics pin only $metrics_pinned_hole_bytes"
expect_like "$work/ooms.out" "^ +$(size "$metrics_allocated_bytes") +$(size "$metrics_bytes_at_peak") +$metrics_blocks +\
$(size "$metrics_pinned_hole_bytes")  metrics$"
expect_like "$work/ooms.out" "^ +256.00 MiB +256.00 MiB +1 +0 B  optimizer$"
expect_like "$work/ooms.out" "^ +128.00 MiB +128.00 MiB +1 +0 B  weights$"
expect "$work/ooms.out" "  do:  $advice"

say "vramctl diagnose trainer --for torch-2.6: a setting"
"$vramctl" diagnose trainer --for torch-2.6 > "$work/diagnose.out"
indent < "$work/diagnose.out"
"$vramctl" diagnose trainer --for torch-2.6 --format=json > "$work/diagnose.json"
sed -n '/"helping"/,$p' "$work/diagnose.json" > "$work/helping.json"
sed -n '/"recorded": {/,$p' "$work/diagnose.json" > "$work/recorded.json"
setting=$(sed -n 's/^ *"alloc_conf": "\(.*\)",$/\1/p' "$work/helping.json" | head -n 1)
[ -n "$setting" ] || fail "no setting helps: $(cat "$work/diagnose.json")"
peak=$(number peak_reserved_bytes "$work/helping.json") peak_before=$(number peak_reserved_bytes "$work/recorded.json")
expect_like "$work/diagnose.out" "^refusal $refusal: trainer, device 0, [-0-9]+ [:0-9]+, FRAGMENTATION$"
expect "$work/diagnose.out" "why: $why"
expect_like "$work/diagnose.out" "^recorded: $(number operations "$work/diagnose.json") operations in the [0-9.]+ s before it, \
with 0 B reserved at the beginning$"
expect_like "$work/diagnose.out" "^tried: [0-9]+ settings that torch-2.6 has( \(in 120 s; not all\))?, each on these operations \
and then on the request$"
expect "$work/diagnose.out" "$setting would have served it, peak reserved $(size "$peak") instead of $(size "$peak_before")."
expect_like "$work/diagnose.out" "^$setting +$(size "$peak") +.* +served$"
missing=$(size "$(number missing_bytes "$work/recorded.json")")
expect_like "$work/diagnose.out" "^default \(as it was\) +$(size "$peak_before") +.* +$missing missing$"
expect "$work/diagnose.out" "  PYTORCH_CUDA_ALLOC_CONF=$setting"
[ "$peak" -lt "$peak_before" ] || fail "$setting needs as much: $peak"

say "The same job with $setting"
start "$setting"
exec 3>&-
wait "$job_pid" || fail "it was refused again"
job_pid=""
tail -n 3 "$work/job.out" | indent
expect_like "$work/job.out" "^step $steps  allocated [0-9.]+ MiB, reserved "
[ "$(grep -c '^step' "$work/job.out")" = $((steps / 400)) ] || fail "it did not report each 400 steps"
[ "$(number total_events <("$vramctl" ooms --format=json))" = 1 ] || fail "something else was refused"

say "As it should be: refused at step $refused_at without it, all $steps steps with it, in the same limit."
