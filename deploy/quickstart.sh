#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs missing packages, builds vrambroker, and shows its main job: one daemon and four client processes with limits
# of 40, 30, 20 and 10 percent. A client asks for too much, a client is killed. Exits 0 only if all goes right.
#
#   --keep             leave the daemon running at the end
#   --build-dir DIR    use the binaries of this build; neither install nor build anything
#                      (a bundle's quickstart.sh uses the bundle's binaries)
#   --seconds N        let the clients work for N seconds before the killing (default 6)
#   --device KIND      cuda, host, or auto (default): host where there is no GPU
set -euo pipefail
from=$PWD
cd "$(dirname "$0")"

bin_dir=""  # a bundle's folder of programs
if [ -x bin/vrambrokerd ]; then bin_dir=$PWD/bin; else cd ..; fi
keep=false build_dir="" seconds=6 device=auto
PATIENCE_SECONDS=300  # a busy machine is slow; a longer wait means a hang
usage_error() { echo "quickstart.sh: $1" >&2; exit 2; }
needs_value() { [ -n "${2-}" ] || usage_error "$1 needs a value; see --help"; }
while [ $# -gt 0 ]; do
  case "$1" in
    --keep) keep=true ;;
    --build-dir) needs_value "$@"; build_dir=$2; [[ $2 = /* ]] || build_dir=$from/$2; shift ;;
    --seconds) needs_value "$@"; seconds=$2; shift ;;
    --device) needs_value "$@"; device=$2; shift ;;
    -h|--help) sed -n '4,12s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) usage_error "unknown option '$1'; see --help" ;;
  esac
  shift
done

[[ $seconds =~ ^[0-9]{1,6}$ ]] || usage_error "--seconds needs a whole number below a million, not '$seconds'"
case $device in auto|cuda|host) ;; *) usage_error "--device is auto, cuda or host, not '$device'" ;; esac
[ -z "$build_dir" ] || [ -x "$build_dir/server/vrambrokerd" ] || usage_error "--build-dir: there is no $build_dir/server/vrambrokerd"

say() { printf '\n== %s\n' "$*"; }
fail() { printf '\nquickstart: FAILED: %s\n' "$*" >&2; exit 1; }

# wait_until COMMAND...: fails when the command has not succeeded within PATIENCE_SECONDS.
wait_until() {
  local deadline=$((SECONDS + PATIENCE_SECONDS))
  until "$@"; do
    [ $SECONDS -lt $deadline ] || return 1
    sleep 0.02
  done
}

# configured_for BUILD_DIR: prints the checkout that BUILD_DIR is configured for.
configured_for() { sed -n 's/^CMAKE_HOME_DIRECTORY:INTERNAL=//p' "$1/CMakeCache.txt"; }

# build: builds all programs and libraries, and shows the progress.
build() {
  local log=build/release/quickstart.log began=$SECONDS done=0 steps=0 status=0 first=true line
  mkdir -p build/release 2> /dev/null && touch "$log" 2> /dev/null || fail "no right to write $PWD/$log; use a checkout of your own"
  # Tests need packages that quickstart.sh does not install. A configured folder stays as it is, unless its
  # configuration is for a checkout elsewhere.
  if [ ! -f build/release/build.ninja ] || ! [ "$(configured_for build/release)" -ef . ]; then
    progress "configuring"
    cmake --fresh --preset release -DVRAMBROKER_TESTS=OFF > "$log" 2>&1 || { cat "$log" >&2; fail "cmake"; }
  fi
  : > "$log"
  cmake --build --preset release --target programs >> "$log" 2>&1 &
  local build=$!
  trap 'kill $build 2>/dev/null || true' EXIT
  while kill -0 $build 2>/dev/null; do
    # Reads ninja's newest line "[DONE/STEPS] TEXT". ninja may first run CMake again, with a count of its own.
    line=$(grep '^\[[0-9]*/[0-9]*\]' "$log" | grep -v '\] Re-' | tail -n 1 || true)
    if [[ $line =~ ^\[([0-9]+)/([0-9]+)\] ]]; then
      done=${BASH_REMATCH[1]} steps=${BASH_REMATCH[2]}
      if $first; then
        progress_end "the daemon, vramctl, the client libraries and the demos: $steps steps on $(nproc) processors"
        first=false
      fi
      progress "$done of $steps steps after $(clock $began)$(left)"
    fi
    sleep 0.5
  done
  wait $build || status=$?
  trap - EXIT
  if [ $status != 0 ]; then cat "$log" >&2; fail "the build"; fi
  if grep -q 'no work to do' "$log"; then progress_end "everything is built"; else progress_end "built in $(clock $began)"; fi
}
# left: prints the expected time of the remaining steps; nothing during the first 5% of steps. Uses build's variables.
left() {
  local seconds=$(((SECONDS - began) * (steps - done) / (done + 1)))
  if [ "$done" -lt $((steps / 20)) ]; then return; fi
  if [ $seconds -lt 60 ]; then echo ", less than a minute left"; else echo ", about $(((seconds + 59) / 60)) minutes left"; fi
}

if [ -z "$build_dir$bin_dir" ]; then
  . deploy/progress.sh
  say "Packages"
  ./deploy/packages.sh programs
  echo "  all are installed"
  say "Build"
  build_dir=build/release
  build
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
finished=false interrupted=false
trap 'interrupted=true; exit 130' INT
cleanup() {
  for name in "${!pid[@]}"; do kill -KILL "${pid[$name]}" 2>/dev/null || true; done
  if [ -n "$daemon_pid" ] && ! { $finished && $keep; }; then
    kill -TERM "$daemon_pid" 2>/dev/null && wait "$daemon_pid" 2>/dev/null || true
    if $finished || $interrupted; then rm -rf "$work"; else echo "logs: $work" >&2; fi
  fi
}
trap cleanup EXIT

say "The daemon"
daemon_ready() {
  kill -0 "$daemon_pid" 2>/dev/null || { cat "$work/daemon.log" >&2; fail "the daemon did not start"; }
  grep -qs 'daemon ready' "$work/daemon.log"
}
start_daemon() {  # start_daemon HTTP_ADDRESS
  rm -f "$work/daemon.log"  # an earlier daemon's log says "daemon ready"
  setsid "$daemon" --socket-dir="$VRAMBROKER_SOCKET_DIR" --device="$device" --capacity=1GiB --http-address="$1" \
    > "$work/daemon.log" 2>&1 &
  daemon_pid=$!
  wait_until daemon_ready || fail "the daemon is not ready; its log: $(cat "$work/daemon.log")"
}
start_daemon 127.0.0.1:9477
if grep -q 'http port taken' "$work/daemon.log"; then  # takes any free port
  kill -TERM "$daemon_pid" && wait "$daemon_pid" || true
  start_daemon 127.0.0.1:0
fi
metrics_url=$(sed -n 's/.* http=\(http[^ ]*\)$/\1/p' "$work/daemon.log")
sed 's/^/  /' "$work/daemon.log"

# page: prints the metrics page, without a need for curl.
page() {
  local host=${metrics_url#http://} connection
  host=${host%%/*}
  exec {connection}<> "/dev/tcp/${host%:*}/${host##*:}"
  printf 'GET /metrics HTTP/1.0\r\nHost: %s\r\nConnection: close\r\n\r\n' "$host" >&$connection
  cat <&$connection
  exec {connection}>&-
}
# metric NAME LABELS: prints a series' value, or nothing without the series. The series may have further labels.
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

# progress: prints each client's number of steps.
progress() {
  local line="" name
  for name in "${names[@]}"; do
    line+=$(printf '%s %s steps   ' "$name" "$(grep -c '^step' "$work/$name.log" || true)")
  done
  if [ -t 1 ]; then printf '\r  %s' "$line"; else printf '  %s\n' "$line"; fi
}
alive() { for name in "$@"; do kill -0 "${pid[$name]}" 2>/dev/null || { cat "$work/$name.log" >&2; fail "$name ended early"; }; done; }
enough() { for name in "${names[@]}"; do [ "$(grep -c '^step' "$work/$name.log")" -ge 3 ] || return 1; done; }
deadline=$((SECONDS + PATIENCE_SECONDS)) earliest=$((SECONDS + seconds))
until enough && [ $SECONDS -ge $earliest ]; do
  [ $SECONDS -lt $deadline ] || fail "the clients make no progress"
  alive "${names[@]}"
  progress
  sleep 1
done
progress; echo

say "On purpose, evaluator asked for one byte more than its limit"
grep '^refused' "$work/evaluator.log" | sed 's/^/  /' || fail "evaluator was not refused"

say "On purpose, notebook is killed with SIGKILL"
gpu='gpu="0"'
held=$(metric client_reserved_bytes "client=\"notebook\",$gpu")
[ "${held:-0}" -gt 0 ] || fail "notebook held nothing"
kill -KILL "${pid[notebook]}"
started=$(date +%s%N)
wait "${pid[notebook]}" 2>/dev/null || true
unset "pid[notebook]"
notebook_gone() { [ -z "$(metric client_reserved_bytes "client=\"notebook\",$gpu")" ]; }
wait_until notebook_gone || fail "notebook's memory did not come back"
printf '  %d ms later its %d MiB were free for others\n' $((($(date +%s%N) - started) / 1000000)) $((held >> 20))
others=$(metric device_allocated_bytes "$gpu")
printf '  the others keep their %d MiB and go on\n' $((others >> 20))
alive trainer finetune evaluator
before=$(grep -c '^step' "$work/trainer.log")
trainer_goes_on() { [ "$(grep -c '^step' "$work/trainer.log")" -gt "$before" ]; }
wait_until trainer_goes_on || fail "the other clients stopped"

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
nothing_allocated() { [ "$(metric device_allocated_bytes "$gpu")" = 0 ]; }  # a busy daemon notices a little later
wait_until nothing_allocated || fail "memory is still allocated after all clients have gone"

finished=true
cat <<END

All checks passed.
END
if $keep; then
  cat <<END
The daemon (pid $daemon_pid) goes on.
  page       ${metrics_url%metrics}
  metrics    $metrics_url
Try:
  export VRAMBROKER_SOCKET_DIR=$VRAMBROKER_SOCKET_DIR
  $vramctl hold 256MiB --limit 0.5        # in one terminal
  $vramctl sessions                       # in another
  curl $metrics_url
  kill $daemon_pid                        # stops it
END
else
  cat <<END
The daemon stops now; run with --keep to leave it running. README.md says what to try next.
END
fi
