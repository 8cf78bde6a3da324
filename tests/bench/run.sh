#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the release preset, runs every benchmark, prints the tables, and writes the figures as JSON.
#   tests/bench/run.sh [--out DIR]      DIR: bench-results in the current directory by default
set -euo pipefail

out=bench-results
case "${1-}" in
  "") ;;
  --out) out=${2:?--out needs a directory} ;;
  *) echo "usage: $0 [--out DIR]" >&2; exit 2 ;;
esac
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/../.."

cmake --preset release > "$out/build.log"
cmake --build --preset release --target vrambrokerd allocator_bench rpc_bench fast_path_bench scrape_bench waiting_bench claims_bench preload_bench >> "$out/build.log"
bin=build/release

echo "== Remote allocation: one Allocate + Free pair against two empty calls =="
"$bin/tests/bench/rpc_bench" --daemon="$bin/server/vrambrokerd" --json="$out/rpc.json"
echo
echo "== The allocator alone, beside host allocators: best of 11 =="
"$bin/tests/bench/allocator_bench" --golden=tests/golden --json="$out/allocator.json"
echo
echo "== Leasing clients =="
"$bin/tests/bench/fast_path_bench" --golden=tests/golden --json="$out/fast_path.json"
echo
echo "== A scrape of the metrics =="
"$bin/tests/bench/scrape_bench" --json="$out/scrape.json"
echo
echo "== Requests that wait =="
"$bin/tests/bench/waiting_bench" --json="$out/waiting.json"
echo
echo "== Many claims =="
"$bin/tests/bench/claims_bench" --json="$out/claims.json"
echo
echo "== Unmodified programs =="
"$bin/tests/bench/preload_bench" --json="$out/preload.json"
echo
echo "Figures: $out"
