#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the fuzz targets and runs each on a copy of its corpus. Usage: tests/fuzz/run.sh [SECONDS]
# SECONDS (default 60) is for all targets together. Inputs that break something are kept in build/fuzz/crashes.
set -euo pipefail
cd "$(dirname "$0")/../.."

seconds=${1:-60}
case $seconds in ''|*[!0-9]*) echo "run.sh: '$seconds' is no number of seconds" >&2; exit 2 ;; esac
targets=(alloc_conf config operations pickle rpc session_stream trace)

cmake --preset fuzz > /dev/null
cmake --build --preset fuzz ${JOBS:+-j "$JOBS"}

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
crashes=build/fuzz/crashes
mkdir -p "$crashes"
for target in "${targets[@]}"; do
  corpus=tests/fuzz/corpus/$target
  program=build/fuzz/tests/fuzz/${target}_fuzz
  [ -n "$(ls "$corpus")" ] || { echo "run.sh: $corpus is empty" >&2; exit 1; }
  mkdir "$scratch/$target"
  # -timeout is for one input. What -entropic costs is more than it brings here.
  if ! "$program" -max_total_time=$(((seconds + ${#targets[@]} - 1) / ${#targets[@]})) -timeout=20 -entropic=0 \
      -print_final_stats=1 -artifact_prefix="$crashes/$target-" "$scratch/$target" "$corpus" > "$scratch/log" 2>&1; then
    cat "$scratch/log" >&2
    echo "run.sh: $target failed; again with: $program $crashes/$target-..." >&2
    exit 1
  fi
  echo "$target: $(sed -n 's/^stat::number_of_executed_units: *//p' "$scratch/log") inputs, nothing found"
done
