#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# libvrambroker exports exactly the functions that its header declares, and needs only the system's C library.
# Usage: c_symbols.sh HEADER LIBVRAMBROKER CORE [sanitized]
set -euo pipefail
header=$1 library=$2 core=$3 sanitized=${4:-}
exports() { nm -D --defined-only "$1" | awk '{print $NF}' | sort; }

declared=$(grep -o '^VRAMBROKER_API [^(]*(' "$header" | grep -o 'vrambroker_[a-z0-9_]*(' | tr -d '(' | sort)
[ "$(wc -l <<< "$declared")" -gt 20 ]
diff <(echo "$declared") <(exports "$library") || { echo "< declared, > exported by $library" >&2; exit 1; }
diff <(printf '%s\n' vrambroker_core_release vrambroker_core_v1) <(exports "$core") || { echo "> exported by $core" >&2; exit 1; }
[ -z "$sanitized" ] || exit 0
needed=$(readelf -d "$library" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | grep -v -e '^libc\.so' -e '^ld-linux' -e '^libdl\.so' || true)
[ -z "$needed" ] || { echo "$library needs $needed" >&2; exit 1; }
