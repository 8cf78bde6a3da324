#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The story of step 8847 happens, and says what the README shows of it.
# Usage: step_8847_example.sh SOURCE_DIR BUILD_DIR
set -euo pipefail
source=$1 build=$2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$source/deploy/examples/step_8847.sh" --build-dir "$build" | tee "$work/out"
# The block after the script's name.
awk '/step_8847\.sh/ { near = 1 } /^```/ { if (inside) exit; if (near) inside = 1; next } inside' "$source/README.md" > "$work/shown"
[ -s "$work/shown" ] || { echo "the README shows nothing of it" >&2; exit 1; }
while IFS= read -r line; do
  grep -qxF -- "$line" "$work/out" || { echo "the README shows what it does not say: $line" >&2; exit 1; }
done < "$work/shown"
