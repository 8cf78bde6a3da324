#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# 60% of a device is reclaimable in a training job. An inference server asks for memory and gets it, from the job's
# reclaimable memory, in milliseconds. The job grows again later, and waits for the server's end. No process dies.
# Then the load runs again with reclaim switched off: the server gets nothing, although 60% of the device is unused.
# Exits 0 only if the story happens as told. Needs a gigabyte of ordinary memory, and no GPU.
#
#   --build-dir DIR    the build whose programs are used (default build/release)
set -euo pipefail
cd "$(dirname "$0")/../.."

build_dir=build/release
while [ $# -gt 0 ]; do
  case "$1" in
    --build-dir) build_dir=${2:?--build-dir needs a folder}; shift ;;
    -h|--help) sed -n '4,9s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "idle_memory.sh: unknown option '$1'; see --help" >&2; exit 2 ;;
  esac
  shift
done
daemon=$build_dir/server/vrambrokerd vramctl=$build_dir/client/vramctl job=$build_dir/deploy/vrambroker-job
for program in "$daemon" "$vramctl" "$job"; do
  [ -x "$program" ] || { echo "idle_memory.sh: no $program; build it first, or see --build-dir" >&2; exit 2; }
done

work=$(mktemp -d "${TMPDIR:-/tmp}/vrambroker.XXXXXX")
export VRAMBROKER_SOCKET_DIR=$work/run
daemon_pid=""
declare -A pid=() shown=()  # pid: each job's process; shown: each job's number of shown lines
cleanup() {
  for name in "${!pid[@]}"; do kill -KILL "${pid[$name]}" 2>/dev/null || true; done
  if [ -n "$daemon_pid" ]; then kill -TERM "$daemon_pid" 2>/dev/null && wait "$daemon_pid" 2>/dev/null || true; fi
  rm -rf "$work"
}
trap cleanup EXIT
say() { printf '\n== %s\n' "$*"; }
fail() { printf '\nidle_memory: FAILED: %s\n' "$*" >&2; cat "$work"/*.log >&2; exit 1; }

# start_daemon CONFIG: starts the daemon with CONFIG, and waits until the daemon is ready.
start_daemon() {
  echo "$1" > "$work/config"
  "$daemon" --config="$work/config" --socket_dir="$VRAMBROKER_SOCKET_DIR" --device=host --capacity=1000MiB --http_address=off 2> "$work/daemon.log" &
  daemon_pid=$!
  for _ in $(seq 600); do
    grep -q 'daemon ready' "$work/daemon.log" && return
    sleep 0.1
  done
  fail "the daemon did not start"
}
stop_daemon() { kill -TERM "$daemon_pid"; wait "$daemon_pid" || fail "the daemon ended badly"; daemon_pid=""; }

# start NAME FLAG...: starts a job, which reads orders from $work/NAME and writes its actions to $work/NAME.out.
start() {
  local name=$1; shift
  rm -f "$work/$name"; mkfifo "$work/$name"
  "$job" --name="$name" --began-ms="$began_ms" "$@" < "$work/$name" > "$work/$name.out" 2> "$work/$name.log" &
  pid[$name]=$!
}
# await NAME TEXT: waits until the job says TEXT, and shows the new lines.
await() {
  local _
  for _ in $(seq 600); do
    if tail -n +$((${shown[$1]:-0} + 1)) "$work/$1.out" | grep -q "$2"; then
      tail -n +$((${shown[$1]:-0} + 1)) "$work/$1.out"
      shown[$1]=$(wc -l < "$work/$1.out")
      return
    fi
    kill -0 "${pid[$1]}" 2>/dev/null || break
    sleep 0.1
  done
  fail "$1 did not say: $2"
}
waits() { "$vramctl" sessions --format=json | grep -q '"waited_ms"'; }
# end NAME: waits for the end of the job, whose input has ended.
end() { wait "${pid[$1]}" || fail "$1 found other bytes than it wrote"; unset "pid[$1]"; }

run() {
  began_ms=$(date +%s%3N) shown=()
  start trainer --wait-seconds="$1"; exec 3> "$work/trainer"
  await trainer starts
  echo "take 48 20MiB" >&3; await trainer "got it"
  echo "drop 30" >&3; await trainer "freed"
  # The daemon hears of the freed memory within a second.
  for _ in $(seq 600); do
    "$vramctl" sessions --format=json | grep -q '"allocated_bytes": 377487360' && break
    sleep 0.1
  done
  start server; exec 4> "$work/server"
  await server starts
  echo "take 1 400MiB" >&4
}

say "With reclaim"
start_daemon 'reclaim_timeout: "1m"'  # milliseconds are enough, except on a busy machine
run 60
await server "got it"
echo "take 30 20MiB" >&3
for _ in $(seq 600); do waits && break; sleep 0.1; done
waits || fail "the trainer does not wait"
await trainer "asks"
"$vramctl" sessions | sed 's/^/            | /'
echo "verify" >&4; await server "verified"
exec 4>&-; await server ends; end server
await trainer "got it"
echo "verify" >&3; await trainer "verified"
exec 3>&-; await trainer ends; end trainer
stop_daemon

say "The same load, without reclaim (reclaim_timeout: 0s)"
start_daemon 'reclaim_timeout: "0s"'
run 0
await server "cause CAPACITY"
exec 4>&-; end server
echo "verify" >&3; await trainer "verified"
exec 3>&-; end trainer
stop_daemon

say "As it should be: with reclaim both jobs got their memory, without it the server got none."
