#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Writes install_test.sh's baseline for the C library. Run the script only after additions of fields or functions:
# existing fields and functions stay unchanged while VRAMBROKER_ABI_VERSION does.
# Usage: abi_baseline.sh BUILD_DIR
set -euo pipefail
cd "$(dirname "$0")/../.."
abidw --no-corpus-path --no-comp-dir-path --no-show-locs \
  --exported-interfaces-only --type-id-style hash "${1:?usage: abi_baseline.sh BUILD_DIR}/client/c/libvrambroker.so.1" \
  | sed "s/ path=.[^ ]*//" > tests/packages/libvrambroker.so.1.abi
