#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
#
# libvrambroker-preload.so needs only the C library, of version 2.17 or later. The library exports hooks, dlsym
# and dlvsym. Usage: symbols_test.sh LIBRARY
set -eu
library=$1
fail() {
  echo "FAILED: $*" >&2
  exit 1
}

# The dynamic linker is a part of the C library.
needed=$(readelf -d "$library" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | grep -v '^ld-linux' | tr '\n' ' ')
[ "$needed" = "libc.so.6 " ] || fail "it needs $needed"

versions=$(objdump -T "$library" | sed -n 's/.*\*UND\*.*GLIBC_\([0-9.]*\).*/\1/p' | sort -uV)
[ -n "$versions" ] || fail "no versions found: does this check see anything?"
newest=$(echo "$versions" | tail -n 1)
[ "$(printf '%s\n2.17\n' "$newest" | sort -V | tail -n 1)" = 2.17 ] || fail "it needs symbols of glibc $newest"

unversioned=$(objdump -T "$library" | grep '\*UND\*' | grep -v GLIBC_ | awk '{print $NF}' | grep -vE '^(_ITM_|__gmon_start__|__cxa_finalize)' || true)
[ -z "$unversioned" ] || fail "undefined: $unversioned"

others=$(objdump -T "$library" | grep -v '\*UND\*\|\*ABS\*' | awk '/ g /{print $NF}' | grep -vE '^(cu[A-Z]|nvml[A-Z]|dlsym$|dlvsym$)' || true)
[ -z "$others" ] || fail "it exports $others"
objdump -T "$library" | grep -q ' cuMemAlloc_v2$' || fail "it does not export cuMemAlloc_v2"
[ "$(objdump -T "$library" | grep -c ' dlsym$')" = 2 ] || fail "it has not both versions of dlsym"
