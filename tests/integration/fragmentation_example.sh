#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs the fragmentation example on a real daemon, and checks the printed figures.
# Usage: fragmentation_example.sh VRAMBROKERD EXAMPLE
set -euo pipefail
daemon=$1 example=$2
work=$(mktemp -d)
trap 'kill -TERM "$daemon_pid" 2>/dev/null && wait "$daemon_pid" || true; rm -rf "$work"' EXIT
export VRAMBROKER_SOCKET_DIR=$work/sockets

# The capacity costs no memory, since the example never writes its blocks.
"$daemon" --device=host --socket_dir="$VRAMBROKER_SOCKET_DIR" --capacity=4GiB --http_address=off 2> "$work/log" &
daemon_pid=$!
# 00010000: a process listens.
for _ in $(seq 600); do
  grep -q " 00010000 .* $VRAMBROKER_SOCKET_DIR/vrambroker.sock\$" /proc/net/unix && break
  sleep 0.1
done
"$example" | tee "$work/out"
expect() { grep -qF "$1" "$work/out" || { echo "expected: $1" >&2; cat "$work/log" >&2; exit 1; }; }
expect "95.37 MiB needed new memory although 200.00 MiB were free: in 50 pieces, the largest of 4.74 MiB"
expect "0 B went back to the daemon"
expect "476.84 MiB needed new memory although 1.42 GiB were free: in 15 pieces, the largest of 190.73 MiB"
expect "1.41 GiB went back to the daemon"
