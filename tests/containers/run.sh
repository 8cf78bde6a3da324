#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs all tests with real containers. Usage: run.sh BUILD_DIR
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
if [ "$(id -u)" -ne 0 ]; then
  echo "Skipped: making containers of images of its own needs root."
  exit
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for test in image claims preload compose; do "$here/${test}_test.sh" "$work" "$1"; done
