#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the fuzz targets, and runs each on a copy of its corpus. Usage: tests/fuzz/run.sh [SECONDS]
# SECONDS (default 60) is the time for all targets together. JOBS targets (default 1) run at a time. Failing inputs go
# to build/asan/crashes.
set -euo pipefail
cd "$(dirname "$0")/../.."

seconds=${1:-60} jobs=${JOBS:-1}
for number in "$seconds" "$jobs"; do
  case $number in ''|0|*[!0-9]*) echo "run.sh: '$number' is not a number above 0" >&2; exit 2 ;; esac
done
targets=(alloc_conf config count_socket operations pickle plan rpc session_stream trace)

[ -f build/asan/CMakeCache.txt ] || cmake --preset asan > /dev/null
cmake --build --preset asan -j "$jobs" --target "${targets[@]/%/_fuzz}"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export scratch crashes=build/asan/crashes each=$(((seconds * jobs + ${#targets[@]} - 1) / ${#targets[@]}))
mkdir -p "$crashes"
fuzz() {
  corpus=tests/fuzz/corpus/$1 program=build/asan/tests/fuzz/$1_fuzz
  [ -n "$(ls "$corpus")" ] || { echo "run.sh: $corpus is empty" >&2; exit 1; }
  mkdir "$scratch/$1"
  # -timeout bounds one input. -entropic=1 costs more than its gain here.
  if ! "$program" -max_total_time="$each" -timeout=200 -entropic=0 -print_final_stats=1 -artifact_prefix="$crashes/$1-" \
      "$scratch/$1" "$corpus" > "$scratch/$1.log" 2>&1; then
    cat "$scratch/$1.log" >&2
    echo "run.sh: $1 failed; again with: $program $crashes/$1-..." >&2
    exit 1
  fi
  echo "$1: $(sed -n 's/^stat::number_of_executed_units: *//p' "$scratch/$1.log") inputs, nothing found"
}
export -f fuzz
printf '%s\n' "${targets[@]}" | xargs -P "$jobs" -I{} bash -euo pipefail -c 'fuzz {}'
