#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Tests containers with claims: two containers of a claim share its limit, no container sees another claim, and the
# memory of a killed container comes back. The containers use the image of image_test.sh.
own_network=--net
. "$(dirname "$0")/podman.sh"
daemon=""
end() {
  local code=$?
  podman rm --all --force > /dev/null 2>&1 || true
  [ -z "$daemon" ] || kill "$daemon" 2> /dev/null || true
  [ $code = 0 ] || cat "$work/daemon.log" >&2
}
trap end EXIT
podman image exists vrambroker || fail "image_test.sh comes first"
mkdir -p "$work/bin"
printf '#!/bin/sh\nexec "$@"\n' > "$work/bin/sudo" && chmod +x "$work/bin/sudo"
export PATH=$build/client:$build/server:$work/bin:$PATH
unset VRAMBROKER_SOCKET_DIR
start_daemon() {
  vrambrokerd --socket-dir "$1" --device host --capacity 256MiB --http-address off >> "$work/daemon.log" 2>&1 &
  serves() { kill -0 "$!" || fail "the daemon has ended"; vramctl --socket-dir "$1" status > /dev/null 2>&1; }
  until_true serves "$1"
}
contained() { podman run --network=none "$@"; }
# refused TEXT COMMAND...: expects that COMMAND fails and says TEXT.
refused() {
  local text=$1
  shift
  if "$@" > "$work/refused" 2>&1; then fail "done, not refused: $*"; fi
  cat "$work/refused"
  grep -q -- "$text" "$work/refused" || fail "not said: $text"
}
figure() { vramctl claim show "$1" --format json | tr -d ' \n' | grep -o "\"$2\":[0-9]*" | head -1 | cut -d: -f2; }
reserved() { [ "$(figure "$1" reserved_bytes)" = $(($2 << 20)) ]; }
no_file() { [ ! -e /run/cdi/vrambroker-$1.json ] || fail "/run/cdi/vrambroker-$1.json is still there"; }

say "deploy/CONTAINERS.md, command by command"
: > "$work/daemon.log"
start_daemon /run/vrambroker && daemon=$!
python3 "$source_dir/tests/packages/guides_test.py" "$work/source" deploy/CONTAINERS.md
no_file team-a

say "Two claims"
for claim in one two; do
  vramctl claim create $claim --limit 64MiB
  vramctl claim cdi $claim
done

say "Two containers of one claim have its limit together"
contained -d --name first --device vrambroker.dev/claim=one vrambroker vramctl hold 40MiB > /dev/null
until_true reserved one 40
refused "claim one" timeout 600 podman run --network=none --rm --device vrambroker.dev/claim=one vrambroker vramctl hold 40MiB
contained -d --name second --device vrambroker.dev/claim=one vrambroker vramctl hold 24MiB > /dev/null
until_true reserved one 64

say "No container sees another claim, or writes into the machine's /run"
contained --rm --device vrambroker.dev/claim=two vrambroker sh -e -c '
  ls /run/vrambroker
  [ "$(ls /run/vrambroker | sort | xargs)" = "vram-count.sock vrambroker-fd.sock vrambroker.sock" ]
  vramctl sessions
  vramctl sessions | grep -q "no sessions"
  if vramctl claim rm one; then exit 1; fi
  if touch /run/vrambroker/file; then exit 1; fi' || fail "a container of claim two is not alone"
[ "$(figure one sessions)" = 2 ] || fail "claim one is not as it was"

say "A claim is its owner's, also in the machine's pid namespace"
vramctl claim create own --limit 64MiB --owner 1000
vramctl claim cdi own
refused "belongs to user 1000" contained --rm --pid=host --user 2000 --device vrambroker.dev/claim=own vrambroker vramctl hold 1MiB
contained -d --name own --pid=host --user 1000 --device vrambroker.dev/claim=own vrambroker vramctl hold 24MiB > /dev/null
until_true reserved own 24

say "A daemon that is killed comes back to its containers"
kill -KILL $daemon
wait $daemon || true
start_daemon /run/vrambroker && daemon=$!
back() { [ "$(figure one sessions)" = 2 ]; }
until_true back
until_true reserved one 64

say "What a killed container held comes back"
podman kill first > /dev/null
until_true reserved one 24
contained -d --name third --device vrambroker.dev/claim=one vrambroker vramctl hold 40MiB > /dev/null
until_true reserved one 64

say "A removed claim starts no container"
vramctl claim rm one
no_file one
refused "is being removed" vramctl claim cdi one
podman kill second third > /dev/null
vramctl claim rm one --wait --timeout 600
refused "unresolvable CDI devices" contained --rm --device vrambroker.dev/claim=one vrambroker true

say "Files of claims that are gone, and of other daemons"
cp /run/cdi/vrambroker-two.json "$work/two.json"
vramctl claim rm two --wait --timeout 600
cp "$work/two.json" /run/cdi/vrambroker-two.json
refused "no claim is named" vramctl claim rm two
no_file two
start_daemon "$work/other" && other=$!
vramctl --socket-dir "$work/other" claim create own
refused "another claim" vramctl --socket-dir "$work/other" claim cdi own
vramctl --socket-dir "$work/other" claim rm own
[ -e /run/cdi/vrambroker-own.json ] || fail "it has removed the file of another daemon's claim"
kill $other
vramctl claim create for-all --owner any
chmod 0755 /run/vrambroker && chmod 0777 /run/vrambroker/*.sock
refused "run vramctl with sudo" setpriv --reuid 65534 --clear-groups vramctl claim cdi for-all
mknod "$work/null" c 1 3
refused "it exists and is not a file" vramctl claim cdi own -o "$work/null"
(umask 077 && vramctl claim cdi own -o "$work/own.json")
[ "$(stat -c %a "$work/own.json")" = 644 ] || fail "runtimes of other users cannot read it"
say "All of it works"
