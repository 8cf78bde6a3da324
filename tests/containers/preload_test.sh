#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Tests `vramctl claim cdi --preload` in a container whose image preloads a library of its own: deploy/CONTAINERS.md.
. "$(dirname "$0")/podman.sh"
daemon=""
end() {
  local code=$?
  podman rm --all --force > /dev/null 2>&1 || true
  [ -z "$daemon" ] || kill "$daemon" 2> /dev/null || true
  if [ $code != 0 ] && [ -e "$work/preload-daemon.log" ]; then cat "$work/preload-daemon.log" >&2; fi
}
trap end EXIT
export PATH=$build/client:$build/server:$PATH
unset VRAMBROKER_SOCKET_DIR

say "An image that preloads a library of its own"
own=/usr/lib/x86_64-linux-gnu/libdl.so.2 ours=/run/libvrambroker-preload.so
base_image debian:12-slim
printf 'FROM docker.io/library/debian:12-slim\nENV LD_PRELOAD=%s\n' "$own" | podman build --quiet --pull=never -t preloads - > /dev/null
vrambrokerd --device host --capacity 256MiB --http-address off > "$work/preload-daemon.log" 2>&1 &
daemon=$!
serves() { kill -0 $daemon || fail "the daemon has ended"; vramctl status > /dev/null 2>&1; }
until_true serves
vramctl claim create team --limit 64MiB
vramctl claim cdi team --preload

# loads LIBRARY... -- ARGUMENT...: expects that a container with the arguments loads only LIBRARY... of both libraries.
loads() {
  local expected=() found
  while [ "$1" != -- ]; do expected+=("$1") && shift; done
  found=$(podman run --network=none --rm "${@:2}" cat /proc/self/maps | grep -oE "$own|$ours" | sort -u | xargs)
  [ "$found" = "${expected[*]}" ] || fail "${*:2} loads '$found'"
}
loads "$own" -- preloads
loads "$ours" -- --device vrambroker.dev/claim=team preloads

say "Both, as the guide says"
loads "$ours" -- --device vrambroker.dev/claim=team --env LD_PRELOAD="$ours:$own" preloads  # the device's variable wins
loads "$ours" "$own" -- --device vrambroker.dev/claim=team preloads env LD_PRELOAD="$ours:$own"
loads "$ours" "$own" -- --device vrambroker.dev/claim=team --entrypoint env preloads LD_PRELOAD="$ours:$own"
grep -q "env LD_PRELOAD=$ours:" "$source_dir/deploy/CONTAINERS.md" || fail "the guide says something else"
say "All of it works"
