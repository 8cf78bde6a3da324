#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Prometheus 3.5.3 of Debian sid: the range [10m] is open on its left. Where scrapes and evaluations fall together, as
# in promtool's tests, the range holds a sample fewer than in Prometheus 2.42. No range includes the events between that
# sample and the next sample, so the rate() of a counter that grows steadily, but some at a time, has two values in
# turn: here 0.947 and 1.263 a minute instead of 1.2. An alert `> 1` with `for` that Prometheus 2 fires never fires in
# Prometheus 3.
#
# Usage: prometheus3_open_ranges.sh
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../tests/support/shell.sh"
. "$here/../tests/support/debian.sh"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
{ unpack_from_debian bookworm "$work/2" prometheus=2.42.0+ds-5+deb12u1 && unpack_from_debian sid "$work/3" promtool=3.5.3+ds1-6; } \
  || { echo "$(basename "$0"): these versions cannot be had" >&2; exit 2; }

echo '{groups: [{name: all, rules: [{alert: Often, expr: "rate(refusals_total[10m]) * 60 > 1", for: 5m}]}]}' > "$work/rules.yml"
# expectations FIRST SECOND ALERTS: the counter grows by 3 in 150 s, a rate of 1.2 a minute; the rate at two times, and
# the alerts.
expectations() {
  cat << END
rule_files: [rules.yml]
evaluation_interval: 30s
tests:
  - interval: 30s
    input_series: [{series: refusals_total, values: '0x4 3x4 6x4 9x4 12x4 15x4 18x4 21x4 24x4'}]
    promql_expr_test:
      - {expr: 'round(rate(refusals_total[10m]) * 60, 0.001)', eval_time: 18m, exp_samples: [{value: $1}]}
      - {expr: 'round(rate(refusals_total[10m]) * 60, 0.001)', eval_time: 19m30s, exp_samples: [{value: $2}]}
      - {expr: 'count(ALERTS{alertstate="firing"})', eval_time: 20m, exp_samples: [$3]}
END
}
expectations 1.2 1.2 '{value: 1}' > "$work/as_2.yml"
expectations 1.263 0.947 '' > "$work/as_3.yml"

# expect RELEASE FILE OTHER: expects that RELEASE's promtool gives FILE's results, and not OTHER's results.
expect() {
  local promtool=$work/$1/usr/bin/promtool
  "$promtool" --version | sed -n 1p
  "$promtool" test rules "$work/$2" || fail "$1: it has changed"
  if "$promtool" test rules "$work/$3" > "$work/other" 2>&1; then fail "$1: it is as the other one"; fi
}
expect 2 as_2.yml as_3.yml
expect 3 as_3.yml as_2.yml
