#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs the story of step 8847. The shipped alert fires on the story's figure, and the story prints all lines that the
# README shows.
# Usage: step_8847_example.sh SOURCE_DIR BUILD_DIR
set -euo pipefail
source=$1 build=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$source/deploy/examples/step_8847.sh" --build-dir "$build" | tee "$work/out"
# The alert's test repeats the figure for as long as the alert needs.
command -v promtool > /dev/null || { echo "promtool is missing; tests/run.sh installs it (Debian package prometheus)" >&2; exit 1; }
read -r series seconds < <(grep -o 'vrambroker_client_refusal_expected_seconds{.*' "$work/out" | head -n 1)
labels=${series#*\{} labels=${labels%\}}
cat > "$work/alert.yml" <<ALERT
rule_files: ["$(realpath "$source")/deploy/prometheus/vrambroker.rules.yml"]
tests:
  - interval: 1m
    input_series: [{series: '$series', values: '${seconds}x10'}]
    promql_expr_test:
      - expr: ALERTS{alertname="VrambrokerFragmentationGrows"}
        eval_time: 6m
        exp_samples:
          - labels: 'ALERTS{alertname="VrambrokerFragmentationGrows", alertstate="firing", severity="warning", $labels}'
            value: 1
ALERT
promtool test rules "$work/alert.yml"

# Takes the README's block after the script's name.
awk '/step_8847\.sh/ { near = 1 } /^```/ { if (inside) exit; if (near) inside = 1; next } inside' \
  "$source/README.md" > "$work/shown"
[ -s "$work/shown" ] || { echo "the README shows nothing of it" >&2; exit 1; }
while IFS= read -r line; do
  grep -qxF -- "$line" "$work/out" || { echo "the README shows what it does not say: $line" >&2; exit 1; }
done < "$work/shown"
