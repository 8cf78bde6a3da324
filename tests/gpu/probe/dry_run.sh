#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs the probe's controllers with agents that have no GPU: every experiment ends with an outcome, also when an agent
# hangs or dies. The outcomes' values mean nothing here.
# Usage: dry_run.sh PROBE_WITH_FAKE_AGENTS
set -euo pipefail
probe=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "dry_run: FAILED: $*" >&2; exit 1; }

"$probe" run --json "$work/all.json" > "$work/all"
tail -n 1 "$work/all"
count=$("$probe" list | wc -l)
[ "$count" -gt 30 ] || fail "only $count experiments are listed"
grep -q "^-- $count experiments, 0 without a result" "$work/all" || { cat "$work/all" >&2; fail "some experiments gave no result"; }
[ "$(grep -c '"name":' "$work/all.json")" -eq "$count" ] || fail "the JSON file lacks experiments"

malloc=4 memory_info=9  # numbers of the operations in common.h
FAKE_CRASH_OP=$malloc "$probe" run --only ipc_latency,env --json "$work/crash.json" > "$work/crash"
grep -q 'agent-died' "$work/crash" || { cat "$work/crash" >&2; fail "an agent's death was not noticed"; }
grep -q '^-- 2 experiments' "$work/crash" || fail "it ended with its agent"
FAKE_HANG_OP=$memory_info "$probe" run --only env --budget 4 --json "$work/hang.json" > "$work/hang"
grep -q 'timeout' "$work/hang" || { cat "$work/hang" >&2; fail "a hanging agent was not noticed"; }
grep -q '"kernel":' "$work/hang.json" || fail "what was known before the hang is lost"
echo "all well"
