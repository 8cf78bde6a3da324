#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Tests the daemon's web page in a real browser. Without node, npm's registry or Chromium the test is skipped (77), but
# in CI the test fails.
# Usage: run.sh WORK_DIR BUILD_DIR [--pictures DIR] [history] [page] [many]
# Without names, all three tests run. Pictures go to WORK_DIR/pictures if no folder is named.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=$1 build=$2
shift 2
pictures=()
if [ "${1:-}" = --pictures ]; then
  pictures=(--pictures "$2")
  shift 2
fi
[ $# -gt 0 ] || set -- history page many
missing() {
  echo "web page test: $*" >&2
  if [ -n "${CI:-}" ]; then exit 1; else exit 77; fi
}
for tool in node npm chromium; do
  command -v $tool > /dev/null || missing "$tool is missing; on Debian tests/run.sh --all installs it"
done
mkdir -p "$work"
cp "$here"/package.json "$here"/package-lock.json "$here"/*.mjs "$work"
cp "$here"/../../server/http/web/format.js "$work"/format.mjs  # the page's way to write sizes
cp "$here"/../../server/http/web/history.js "$work"/history.mjs
cp "$here"/../../server/http/web/map_layout.js "$work"/map_layout.mjs
cd "$work"
if ! cmp -s package-lock.json installed; then
  npm ci --ignore-scripts --no-audit --no-fund --fetch-retries=5 --fetch-timeout=120000 > npm.log 2>&1 \
    || missing "npm ci failed: $(head -n 3 npm.log)"
  cp package-lock.json installed
fi
# The product's copy of the plotting library must equal the npm package's files.
for file in dist/uPlot.iife.min.js dist/uPlot.min.css LICENSE; do
  cmp "node_modules/uplot/$file" "$here/../../server/http/web/uplot/${file##*/}"
done
for test; do
  node "${test}_test.mjs" "$build" "${pictures[@]}"
done
