#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs what is missing, builds vrambroker, and shows its main job: one daemon, four client processes with limits
# of 40, 30, 20 and 10 percent, one of which asks for too much, one of which is killed. Exits 0 only if all went right.
#
#   --keep             leave the daemon running at the end
#   --build-dir DIR    use the binaries of this build; neither install nor build anything
#                      (a bundle's quickstart.sh uses the bundle's)
#   --seconds N        how long the clients work before the killing (default 6)
set -euo pipefail
cd "$(dirname "$0")"

bin_dir=""  # programs in one folder: a bundle
if [ -x bin/vrambrokerd ]; then bin_dir=$PWD/bin; else cd ..; fi
keep=false build_dir="" seconds=6
while [ $# -gt 0 ]; do
  case "$1" in
    --keep) keep=true ;;
    --build-dir) build_dir=${2:?--build-dir needs a folder}; shift ;;
    --seconds) seconds=${2:?--seconds needs a number}; shift ;;
    -h|--help) sed -n '3,11s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "quickstart.sh: unknown option '$1'; see --help" >&2; exit 2 ;;
  esac
  shift
done

say() { printf '\n== %s\n' "$*"; }
fail() { printf '\nquickstart: FAILED: %s\n' "$*" >&2; exit 1; }

if [ -z "$build_dir$bin_dir" ]; then
  say "Packages"
  ./deploy/packages.sh build
  say "Build (a few minutes the first time)"
  build_dir=build/release
  cmake --preset release > /dev/null
  cmake --build --preset release --target vrambrokerd vramctl vrambroker-demo
fi
if [ -n "$build_dir" ]; then
  daemon=$build_dir/server/vrambrokerd vramctl=$build_dir/client/vramctl demo=$build_dir/deploy/vrambroker-demo
else
  daemon=$bin_dir/vrambrokerd vramctl=$bin_dir/vramctl demo=$bin_dir/vrambroker-demo
fi

work=$(mktemp -d "${TMPDIR:-/tmp}/vrambroker.XXXXXX")
export VRAMBROKER_SOCKET_DIR=$work/run
declare -A pid=()
daemon_pid=""
finished=false
cleanup() {
  for name in "${!pid[@]}"; do kill -KILL "${pid[$name]}" 2>/dev/null || true; done
  if [ -n "$daemon_pid" ] && ! { $finished && $keep; }; then
    kill -TERM "$daemon_pid" 2>/dev/null && wait "$daemon_pid" 2>/dev/null || true
    if $finished; then rm -rf "$work"; else echo "logs: $work" >&2; fi
  fi
}
trap cleanup EXIT

say "The daemon"
http=127.0.0.1:9477
if (exec 3<>/dev/tcp/127.0.0.1/9477) 2>/dev/null; then http=127.0.0.1:0; fi  # taken: any free port
setsid "$daemon" --socket_dir="$VRAMBROKER_SOCKET_DIR" --capacity=1GiB --http_address=$http > "$work/daemon.log" 2>&1 &
daemon_pid=$!
for _ in $(seq 600); do
  grep -qs 'daemon ready' "$work/daemon.log" && break
  kill -0 "$daemon_pid" 2>/dev/null || { cat "$work/daemon.log" >&2; fail "the daemon did not start"; }
  sleep 0.1
done
metrics_url=$(sed -n 's/.* http=\(http[^ ]*\)$/\1/p' "$work/daemon.log")
sed 's/^/  /' "$work/daemon.log"

# The metrics page, without a need for curl.
page() {
  local host=${metrics_url#http://} connection
  host=${host%%/*}
  exec {connection}<> "/dev/tcp/${host%:*}/${host##*:}"
  printf 'GET /metrics HTTP/1.0\r\nHost: %s\r\nConnection: close\r\n\r\n' "$host" >&$connection
  cat <&$connection
  exec {connection}>&-
}
# metric NAME LABELS: the value, or nothing when there is no such series; further labels may follow.
metric() {
  page | awk -v series="vrambroker_$1{$2" 'index($0, series) == 1 && substr($0, length(series) + 1, 1) ~ /[,}]/ { print $2 }'
}

say "Four clients, each with a limit, each like a training loop: write every byte, verify every byte"
names=(trainer finetune notebook evaluator)
limits=(0.4 0.3 0.2 0.1)
for i in 0 1 2 3; do
  extra=()
  [ "${names[$i]}" = evaluator ] && extra=(--ask_beyond_limit)
  "$demo" --name="${names[$i]}" --limit="${limits[$i]}" "${extra[@]}" > "$work/${names[$i]}.log" 2>&1 &
  pid[${names[$i]}]=$!
done

# One line: each client's steps so far and what it holds.
progress() {
  local line="" name
  for name in "${names[@]}"; do
    line+=$(printf '%s %s steps   ' "$name" "$(grep -c '^step' "$work/$name.log" || true)")
  done
  if [ -t 1 ]; then printf '\r  %s' "$line"; else printf '  %s\n' "$line"; fi
}
alive() { for name in "$@"; do kill -0 "${pid[$name]}" 2>/dev/null || { cat "$work/$name.log" >&2; fail "$name ended early"; }; done; }
enough() { for name in "${names[@]}"; do [ "$(grep -c '^step' "$work/$name.log")" -ge 3 ] || return 1; done; }
deadline=$((SECONDS + 40)) earliest=$((SECONDS + seconds))
until enough && [ $SECONDS -ge $earliest ]; do
  [ $SECONDS -lt $deadline ] || fail "the clients make no progress"
  alive "${names[@]}"
  progress
  sleep 1
done
progress; echo

say "evaluator asked for one byte more than its limit, on purpose"
grep '^refused' "$work/evaluator.log" | sed 's/^/  /' || fail "evaluator was not refused"

say "notebook is killed with SIGKILL, on purpose"
gpu='gpu="0"'
held=$(metric client_reserved_bytes "client=\"notebook\",$gpu")
[ "${held:-0}" -gt 0 ] || fail "notebook held nothing"
kill -KILL "${pid[notebook]}"
started=$(date +%s%N)
wait "${pid[notebook]}" 2>/dev/null || true
unset "pid[notebook]"
until [ -z "$(metric client_reserved_bytes "client=\"notebook\",$gpu")" ]; do
  [ $(($(date +%s%N) - started)) -lt 60000000000 ] || fail "notebook's memory did not come back"
  sleep 0.02
done
printf '  its %d MiB were charged to nobody %d ms later\n' $((held >> 20)) $((($(date +%s%N) - started) / 1000000))
others=$(metric device_allocated_bytes "$gpu")
printf '  the others still hold %d MiB and go on\n' $((others >> 20))
alive trainer finetune evaluator
before=$(grep -c '^step' "$work/trainer.log")
for _ in $(seq 600); do
  [ "$(grep -c '^step' "$work/trainer.log")" -gt "$before" ] && break
  sleep 0.1
done
[ "$(grep -c '^step' "$work/trainer.log")" -gt "$before" ] || fail "the other clients stopped"

say "Sessions"
"$vramctl" sessions
echo
"$vramctl" status

say "The clients stop"
for name in trainer finetune evaluator; do
  kill -TERM "${pid[$name]}"
  wait "${pid[$name]}" || { cat "$work/$name.log" >&2; fail "$name found wrong bytes or was refused"; }
  unset "pid[$name]"
  printf '  %-9s %s\n' "$name" "$(grep '^step' "$work/$name.log" | tail -n 1)"
done
[ "$(metric device_allocated_bytes "$gpu")" = 0 ] || fail "memory is still allocated after all clients have gone"

finished=true
cat <<END

All of it was as it should be.
  page       ${metrics_url%metrics}
  metrics    $metrics_url
END
if $keep; then
  cat <<END
The daemon (pid $daemon_pid) goes on. Try:
  export VRAMBROKER_SOCKET_DIR=$VRAMBROKER_SOCKET_DIR
  $vramctl hold 256MiB --limit 0.5        # in one terminal
  $vramctl sessions                       # in another
  curl $metrics_url
  kill $daemon_pid                        # stops it
END
else
  cat <<END
The daemon stops now; run with --keep to leave it running. Next, for example:
  $daemon --socket_dir=/tmp/vrambroker --capacity=4GiB &
  export VRAMBROKER_SOCKET_DIR=/tmp/vrambroker
  $vramctl hold 1GiB --limit 0.5
END
fi
