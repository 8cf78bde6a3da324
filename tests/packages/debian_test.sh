#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The Debian packages of a build, in a new Debian that has nothing else: they install, all that they bring works there,
# and when they are purged nothing is left.
# Usage: debian_test.sh BUILD_DIR
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
exec "$here/new_debian.sh" "$1" "$here/in_debian.sh" g++,cmake,make,pkg-config,curl,man-db "$here/consumer"
