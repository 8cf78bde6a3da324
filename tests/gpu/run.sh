#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Checks vrambroker on this machine's NVIDIA GPU; --help prints the usage. Needs Python 3.8 or newer, and in a source
# tree a build.
set -euo pipefail
python=$(command -v python3) || { echo "run.sh: needs python3" >&2; exit 2; }
exec "$python" -B "$(dirname "$0")/run.py" "$@"
