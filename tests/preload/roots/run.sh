#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Tests libvrambroker-preload.so in the root folders of Debian 11, 12 and 13, each with its own C library and Python,
# and with a daemon of an outside build: in_root.py. Usage: run.sh BUILD_DIR [SUITE...]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../../support/shell.sh"
. "$here/../../support/roots.sh"

[ "${1-}" = inside ] || in_own_namespaces 3G "$(realpath "$1")" "${@:2}"
work=$2 build_dir=$3
shift 3
[ $# -gt 0 ] || set -- bullseye bookworm trixie
export TMPDIR=$work/tmp
mkdir "$TMPDIR" "$work/machine" "$work/sockets" "$work/test"
explain() { tail -n 30 "$work"/*.log; }

mirror=$(mirror_of_debian)
say "Root folders of $*"
makers=()
for suite in "$@"; do
  mmdebstrap --quiet --variant=minbase --include=python3,libjemalloc2 \
    "$suite" "$work/$suite" "$mirror" > "$work/$suite.log" 2>&1 &
  makers+=($!)
done
for maker in "${makers[@]}"; do wait "$maker" || fail "mmdebstrap failed"; done

say "A daemon, on the substitute's GPUs"
"$build_dir/tests/python/make_machine" "$work/machine"
LD_LIBRARY_PATH=$build_dir/tests/cuda_substitute VRAMBROKER_CUDA_SUBSTITUTE=$work/machine "$build_dir/server/vrambrokerd" \
  --device=cuda --capacity=256MiB --socket_dir="$work/sockets" --http_address=off > "$work/daemon.log" 2>&1 &
until_true grep -q 'daemon ready' "$work/daemon.log"

others=$build_dir/tests/preload/others
cp "$build_dir/client/preload/libvrambroker-preload.so" "$others/dlsym_library/libdlsym_library.so" \
  "$others/linked_library/liblinked_library.so" "$here/in_root.py" "$work/test/"
cp -L "$others/empty_driver/libcuda.so.1" "$work/test/"
for suite in "$@"; do
  say "$suite: $(sed -n 's/^PRETTY_NAME=//p' "$work/$suite/etc/os-release" | tr -d '"')"
  mkdir -p "$work/$suite/test" "$work/$suite/run/vrambroker"
  mount --bind "$work/test" "$work/$suite/test"
  mount --bind "$work/sockets" "$work/$suite/run/vrambroker"
  mount -t proc proc "$work/$suite/proc"
  env -i PATH=/usr/sbin:/usr/bin:/bin timeout 300 chroot "$work/$suite" python3 -B /test/in_root.py || fail "$suite"
done
say "All of it works"
