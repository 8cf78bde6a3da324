#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Asks the promtool of Prometheus 3, from Debian sid, the questions of dashboards_files to this machine's promtool of
# Prometheus 2: ranges of Prometheus 3 are open on the left.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../support/shell.sh"
. "$here/../support/debian.sh"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if ! command -v apt-get > /dev/null || ! unpack_from_debian sid "$work" promtool > "$work/log" 2>&1; then
  cat "$work/log" 2> /dev/null || true
  echo "Skipped: Debian sid, where promtool 3 is, cannot be reached"
  exit 77
fi
promtool=$work/usr/bin/promtool
"$promtool" --version | tee "$work/version"
if ! grep -q '^promtool, version 3\.' "$work/version"; then
  echo "Skipped: Debian sid has another version than 3 by now"
  exit 77
fi
cd "$here/../../deploy/prometheus"
"$promtool" check config prometheus.yml
"$promtool" check rules vrambroker.rules.yml
"$promtool" test rules vrambroker.rules.test.yml
