#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Tests the Debian packages of a build in a new, otherwise empty Debian: the packages install, all their programs work,
# and a purge leaves no file.
# Usage: debian_test.sh BUILD_DIR
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
exec "$here/new_debian.sh" "$1" "$here/in_debian.sh" g++,cmake,make,pkg-config,curl,man-db "$here/consumer"
