#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The bundle is made, unpacked in an empty folder, and works from there: with an empty environment, with no library of
# this machine but the C library's, and in a root directory that has nothing else.
# Usage: bundle_test.sh BUILD_DIR [PYTHON]
set -euo pipefail
build_dir=$1 python=${2:-}
source_dir=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
daemon_pid=""
cleanup() {
  if [ -n "$daemon_pid" ]; then kill -TERM "$daemon_pid" 2> /dev/null && wait "$daemon_pid" 2> /dev/null || true; fi
  rm -rf "$work"
}
trap cleanup EXIT
say() { printf '\n== %s\n' "$*"; }
fail() { printf '\nbundle_test: FAILED: %s\n' "$*" >&2; exit 1; }
clean() { env -i PATH=/usr/bin:/bin "$@"; }

say "Made, small enough, and the same when made again"
"$source_dir/deploy/bundle.sh" --build-dir "$build_dir" --output "$work/bundle.tar.gz"
"$source_dir/deploy/bundle.sh" --build-dir "$build_dir" --output "$work/again.tar.gz" > /dev/null
cmp "$work/bundle.tar.gz" "$work/again.tar.gz" || fail "two bundles of one build differ"
[ "$(stat -c %s "$work/bundle.tar.gz")" -lt $((48 << 20)) ] || fail "it should stay well under 64 MiB"
mkdir -p "$work/a place"
tar -C "$work/a place" -xf "$work/bundle.tar.gz"
bundle=$(echo "$work/a place"/vrambroker-*)
sed -n '/^files:/,$p' "$bundle/MANIFEST" | tail -n +2 | (cd "$bundle" && sha256sum --check --quiet -) || fail "MANIFEST is wrong"
if grep -rl -e "$source_dir" -e "$work" "$bundle" --include='*.sh' --include='*.py' --include=MANIFEST; then
  fail "these files name folders of this machine"
fi

say "Says its version"
clean "$bundle/bin/vrambrokerd" --version | tee "$work/version"
grep -qF "$(sed -n 's/^version: //p' "$bundle/MANIFEST") ($(sed -n 's/^revision: //p' "$bundle/MANIFEST"))" "$work/version" \
  || fail "MANIFEST names another version"
clean "$bundle/bin/vrambrokerd" --config="$bundle/share/vrambroker/vrambroker.textproto" --check_config

# outside PID: libraries of the process that are neither the bundle's nor the C library's.
outside() {
  awk '$6 ~ /[.]so/ { sub(/^([^ ]+ +){5}/, ""); print }' "/proc/$1/maps" | sort -u | grep -vF "$bundle/lib/" \
    | grep -vE '/(ld-linux-x86-64|libc|libm|libdl|librt|libpthread|libresolv)[.]so[.][0-9]+$' || true
}

say "Loads nothing of this machine but the C library"
env -i "$bundle/bin/vrambrokerd" --socket_dir="$work/run" --device=host --capacity=256MiB --http_address=off 2> "$work/daemon.log" &
daemon_pid=$!
for _ in $(seq 600); do
  grep -q 'daemon ready' "$work/daemon.log" && break
  kill -0 "$daemon_pid" || { cat "$work/daemon.log" >&2; fail "the daemon did not start"; }
  sleep 0.1
done
[ "$(grep -cF "$bundle/lib/" "/proc/$daemon_pid/maps")" -gt 20 ] || fail "the daemon does not use the bundle's libraries"
found=$(outside "$daemon_pid")
[ -z "$found" ] || fail "the daemon has loaded: $found"

say "A C program, compiled against it"
sed 's|return strcmp(back, text)|fflush(stdout); getchar(); return strcmp(back, text)|' "$bundle/share/vrambroker/c_client.c" > "$work/client.c"
grep -q getchar "$work/client.c" || fail "the example has changed: adapt this test"
cc -std=c11 -Wall -Wextra -Werror -I "$bundle/include" "$work/client.c" -L "$bundle/lib" -lvrambroker -Wl,-rpath,"$bundle/lib" -o "$work/client"
mkfifo "$work/hold"
env -i VRAMBROKER_SOCKET_DIR="$work/run" "$work/client" < "$work/hold" > "$work/client.log" &
client_pid=$!
exec 9> "$work/hold"
for _ in $(seq 600); do
  grep -q 'freed twice' "$work/client.log" && break
  kill -0 $client_pid 2> /dev/null || break
  sleep 0.1
done
found=$(outside $client_pid)
exec 9>&-
wait $client_pid || { cat "$work/client.log" >&2; fail "the C program failed"; }
cat "$work/client.log"
[ -z "$found" ] || fail "the C program has loaded: $found"

say "The tests for a GPU, as far as they go here"
tests=$bundle/tests/gpu
clean "$tests/bin/device_test" --gtest_brief=1 > "$work/device_test.log" || { cat "$work/device_test.log" >&2; fail "device_test"; }
clean VRAMBROKER_TEST_BIN="$tests/bin" "$tests/bin/memory_promises_test" --gtest_filter='LimitsTest.*Exact*:LimitsTest.*Byte*' \
  > "$work/limits.log" || { cat "$work/limits.log" >&2; fail "memory_promises_test"; }
grep '  PASSED  ' "$work"/device_test.log "$work/limits.log"
if [ -z "$python" ]; then
  echo "run.sh not run: no Python here"
elif ! clean "$python" -B "$tests/machine.py" | grep '"error"'; then
  echo "run.sh not run: this machine has a GPU, and it would take minutes"
else
  code=0
  clean PATH="$(dirname "$python"):/usr/bin:/bin" "$tests/run.sh" --out "$work/gpu" > "$work/gpu.log" 2>&1 || code=$?
  [ $code -eq 3 ] || { cat "$work/gpu.log" >&2; fail "without a GPU run.sh ended with $code, not 3"; }
  if grep -v -e '^not run ' -e '^allows ' -e '^LACKS ' -e '^run.sh: nothing was run' -e '^0 ok, 0 failed' "$work/gpu.log" | grep .; then fail "run.sh ran something"; fi
  grep -q '"result": "not_run"' "$work"/gpu/*-no-gpu.json || fail "run.sh left no list of what was not run"
fi

say "Python"
if [ ! -d "$bundle/python/vrambroker" ]; then
  echo "not run: this source has no Python package"
elif [ -z "$python" ]; then
  echo "not run: no Python here"
else
  clean PYTHONPATH="$bundle/python" PYTHONDONTWRITEBYTECODE=1 VRAMBROKER_SOCKET_DIR="$work/run" "$python" -c '
import sys, vrambroker
with vrambroker.Client(name="bundle", limit=0.25) as client:
    buffer = client.malloc(1 << 20)
    buffer.write(b"written by a Python program")
    print(buffer.read(27).decode())
    if sys.argv[1] + "/lib/libvrambroker-core.so" not in open("/proc/self/maps").read():
        sys.exit("another library than the bundle has been loaded")' "$bundle"
fi
kill -TERM $daemon_pid
wait $daemon_pid || fail "the daemon did not stop well"
daemon_pid=""

say "The quickstart's demo, in a root directory with the C library and a shell"
root=$work/root
mkdir -p "$root"/{bin,usr/bin,lib64,proc,dev,tmp}
for tool in bash sh env cat date dirname awk grep head mktemp rm sed seq setsid sleep tail; do
  path=$(realpath "$(command -v $tool)")
  cp "$path" "$root/usr/bin/$tool"
  { ldd "$path" || true; } | grep -oE '/[^ ]+[.]so[^ ]*' | while read -r library; do
    mkdir -p "$root$(dirname "$library")"
    cp -L "$library" "$root$library"
  done
done
ln -s ../usr/bin/bash "$root/bin/bash"
ln -s ../usr/bin/sh "$root/bin/sh"
for library in libm libdl librt libpthread libresolv; do  # of the C library, and used by no tool
  for path in /lib/x86_64-linux-gnu/$library.so.?; do
    mkdir -p "$root$(dirname "$path")"
    cp -L "$path" "$root$path"
  done
done
mv "$bundle" "$root/vrambroker"
if [ "$(id -u)" -ne 0 ] || ! unshare --mount --pid --fork mount --bind "$root" "$root" 2> "$work/why"; then
  echo "not run there: needs root and the right to mount ($(cat "$work/why" 2> /dev/null)); run here, with an empty environment, instead"
  clean "$root/vrambroker/quickstart.sh" --seconds 2
else
  ls "$root"/lib/x86_64-linux-gnu
  unshare --mount --pid --fork bash -e -c '
    root=$1
    mount -t proc proc "$root/proc"
    mount --rbind /dev "$root/dev"
    exec env -i PATH=/usr/bin:/bin "$(command -v chroot)" "$root" /vrambroker/quickstart.sh --seconds 2' bash "$root"
fi
say "All well"
