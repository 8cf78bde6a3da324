#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Containers that are given claims: two of one claim share one limit, nobody sees another claim, and what a killed container
# held comes back.
. "$(dirname "$0")/podman.sh"
fail() { printf '\nclaims_test.sh: FAILED: %s\n' "$*" >&2; cat "$work/daemon.log" >&2; exit 1; }
daemon=""
end() {
  podman rm --all --force > /dev/null 2>&1 || true
  [ -z "$daemon" ] || kill "$daemon" 2> /dev/null || true
}
trap end EXIT
# Where everybody looks for the daemon.
mkdir -p /run/vrambroker "$work/bin"
mount -t tmpfs -o mode=0755 tmpfs /run/vrambroker
printf '#!/bin/sh\nexec "$@"\n' > "$work/bin/sudo" && chmod +x "$work/bin/sudo"
export PATH=$build/client:$build/server:$work/bin:$PATH
unset VRAMBROKER_SOCKET_DIR
start_daemon() {
  vrambrokerd --socket-dir /run/vrambroker --device host --capacity 256MiB --http-address off >> "$work/daemon.log" 2>&1 &
  daemon=$!
  until_true vramctl status > /dev/null 2>&1
}

say "An image with the tools"
base_image debian:12
"$source_dir/deploy/bundle.sh" --build-dir "$build" --output "$work/bundle.tar.gz" > /dev/null
printf 'FROM debian:12\nADD bundle.tar.gz /opt\nRUN mv /opt/vrambroker-* /opt/vrambroker\nENV PATH=/opt/vrambroker/bin:$PATH\n' > "$work/Containerfile"
podman build --quiet --network=none -f "$work/Containerfile" -t vrambroker "$work" > /dev/null

say "deploy/CONTAINERS.md, command by command"
: > "$work/daemon.log"
start_daemon
mkdir -p "$work/tree"
cp -r "$source_dir/deploy" "$work/tree/"
python3 "$source_dir/tests/packages/guides_test.py" "$work/tree" deploy/CONTAINERS.md

say "Two claims"
for claim in one two; do
  vramctl claim create $claim --limit 64MiB
  vramctl claim cdi $claim
done
reserved() { vramctl claim show "$1" --format json | tr -d ' \n' | grep -q "\"reserved_bytes\":$(($2 << 20)),"; }

say "Two containers of one claim have its limit together"
podman run --network=none -d --name first --device vrambroker.dev/claim=one vrambroker vramctl hold 40MiB > /dev/null
until_true reserved one 40
if podman run --network=none --rm --device vrambroker.dev/claim=one vrambroker vramctl hold 40MiB > "$work/refused" 2>&1; then fail "the limit does not bind both"; fi
cat "$work/refused"
grep -q "claim one" "$work/refused" || fail "the error does not name the claim"
podman run --network=none -d --name second --device vrambroker.dev/claim=one vrambroker vramctl hold 24MiB > /dev/null
until_true reserved one 64

say "No container sees another claim, or writes into the machine's /run"
podman run --network=none --rm --device vrambroker.dev/claim=two vrambroker sh -e -c '
  ls /run/vrambroker
  [ "$(ls /run/vrambroker | sort | xargs)" = "vrambroker-fd.sock vrambroker.sock" ]
  vramctl sessions
  vramctl sessions | grep -q "no sessions"
  ! vramctl claim rm one
  ! touch /run/vrambroker/file' || fail "a container of claim two is not alone"

say "A daemon that is killed comes back to its containers"
kill -KILL $daemon
wait $daemon || true
start_daemon
back() { vramctl claim show one --format json | tr -d ' \n' | grep -q '"sessions":2,'; }
until_true back
reserved one 64 || fail "memory was lost, or counted twice: $(vramctl claim show one)"

say "What a killed container held comes back"
podman kill first > /dev/null
until_true reserved one 24
podman run --network=none --rm --device vrambroker.dev/claim=one vrambroker sh -c 'timeout --preserve-status -s INT 1 vramctl hold 40MiB'

say "A removed claim starts no container"
podman kill second > /dev/null
vramctl claim rm one --wait
if podman run --network=none --rm --device vrambroker.dev/claim=one vrambroker true 2> "$work/gone"; then fail "a removed claim was given"; fi
cat "$work/gone"
say "All of it works"
