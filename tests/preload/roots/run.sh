#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# libvrambroker-preload.so in the root folders of Debian 11, 12 and 13, each with its own C library and Python, with a daemon of a
# build outside: in_root.py. Usage: run.sh BUILD_DIR [SUITE...]
#
# Everything is made in a memory file system of a mount namespace of its own, and runs in a pid namespace of its own. So nothing is
# left when this is interrupted: no mount, no process, no folder but an empty one after SIGKILL.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../../support/shell.sh"

if [ "${1-}" != inside ]; then
  build_dir=$(realpath "$1")
  shift
  if [ "$(id -u)" -ne 0 ]; then
    echo "Skipped: making root folders and entering them needs root."
    exit
  fi
  command -v mmdebstrap > /dev/null || fail "needs mmdebstrap: deploy/packages.sh test"
  work=$(mktemp -d)
  # Only the mount point is on a real disk, and empty. unshare ignores SIGTERM.
  child=
  trap '[ -z "$child" ] || kill -KILL $child 2> /dev/null || true; wait; rmdir "$work"' EXIT
  trap 'exit 130' INT TERM HUP
  setpriv --pdeathsig KILL unshare --mount --pid --fork --kill-child "$here/run.sh" inside "$work" "$build_dir" "${@:-}" &
  child=$!
  wait $child
  exit
fi

work=$2 build_dir=$3
shift 3
[ -n "${1-}" ] || set -- bullseye bookworm trixie
mount -t tmpfs -o size=3G,mode=755 tmpfs "$work"
mount -t proc proc /proc
export TMPDIR=$work/tmp
mkdir "$TMPDIR" "$work/machine" "$work/sockets" "$work/test"
explain() { tail -n 30 "$work"/*.log; }

# The mirror that this machine uses.
mirror=$(apt-get indextargets --format '$(LABEL) $(REPO_URI)' 'Identifier: Packages' | awk '$1 == "Debian" { print $2; exit }')
[ -n "$mirror" ] || fail "apt knows no mirror of Debian"
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
