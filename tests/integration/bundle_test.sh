#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes a bundle, unpacks the bundle in an empty folder, and runs its programs: with an empty environment, with no
# library of this machine except the C library, and in a root directory with hardly any other files.
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
. "$source_dir/tests/support/shell.sh"
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
if names_folders "$bundle" --include='*.sh' --include='*.py' --include=MANIFEST; then
  fail "these files name folders of this machine"
fi

say "By itself, bundle.sh builds all that it installs"
read -r -a targets < <(sed -n 's/.*cmake --build .* --target \([^)]*\)).*/\1/p' "$source_dir/deploy/bundle.sh")
[ "${#targets[@]}" -gt 0 ] || fail "bundle.sh has changed: adapt this test"
ninja -C "$build_dir" -t commands "${targets[@]}" > "$work/commands"
find "$bundle" \( -type f -o -type l \) -printf '%f\n' | sort -u > "$work/installed"
ninja -C "$build_dir" -t targets all | sed -n 's|: [^:]*$||; s|.*/||p' | sort -u | grep -Fxf "$work/installed" > "$work/both"
left_out=$(while read -r file; do grep -qwF -- "${file%.gz}" "$work/commands" || echo "$file"; done < "$work/both")
[ -z "$left_out" ] || fail "its targets leave out what it installs: $left_out"

say "Says its version"
clean "$bundle/bin/vrambrokerd" --version | tee "$work/version"
grep -qF "$(sed -n 's/^version: //p' "$bundle/MANIFEST") ($(sed -n 's/^revision: //p' "$bundle/MANIFEST"))" "$work/version" \
  || fail "MANIFEST names another version"
clean "$bundle/bin/vrambrokerd" --config="$bundle/share/vrambroker/vrambroker.textproto" --check_config

# outside PID: prints the process's libraries that belong neither to the bundle nor to the C library.
outside() {
  grep -oE '/.*[.]so[.0-9]*$' "/proc/$1/maps" | sort -u | grep -vF "$bundle/lib/" \
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

say "Beside other libraries of the names that its own had"
mkdir "$work/others"
for library in "$bundle"/lib/vrb*; do
  name=lib${library##*/vrb}
  cc -shared -nostdlib -x c /dev/null -Wl,-soname,"$name" -o "$work/others/$name"  # an empty library
done
[ "$(find "$work/others" -type f | wc -l)" -gt 50 ] || fail "these are not all libraries that Debian's gRPC needs"
LD_PRELOAD=$(echo "$work"/others/*) "$build_dir/server/vrambrokerd" --version 2> "$work/why" && fail "other libraries do not harm a build"
env -i VRAMBROKER_SOCKET_DIR="$work/run" LD_PRELOAD="$(echo "$work"/others/*)" "$work/client" < /dev/null > "$work/client.log" \
  || { cat "$work/client.log" >&2; fail "the C program failed"; }

say "Beside an older libstdc++, as conda's"
if grep -rlaE '(GLIBCXX|CXXABI)_[0-9]' "$bundle/bin" "$bundle/lib" "$bundle/tests/gpu/bin"; then fail "these take a libstdc++ by its usual names"; fi
mkdir "$work/old"
old=$work/old/libstdc++.so.6
sed 's/GLIBCXX_3[.]4[.]29/GLIBCXX_3.4.XX/g; s/GLIBCXX_3[.]4[.]3./GLIBCXX_3.4.YY/g' "$(c++ -print-file-name=libstdc++.so.6)" > "$old"
if LD_PRELOAD=$old "$build_dir/server/vrambrokerd" --version 2> "$work/why"; then fail "that libstdc++ is not too old"; fi
grep -F "version \`GLIBCXX_3.4." "$work/why" | head -n 1
env -i VRAMBROKER_SOCKET_DIR="$work/run" LD_PRELOAD="$old" "$work/client" < /dev/null > "$work/client.log" \
  || { cat "$work/client.log" >&2; fail "the C program failed"; }
cat > "$work/numbers.cc" <<'END'
#include <iomanip>
#include <locale>
#include <sstream>
#include <stdexcept>
#include <string>

// Returns 0 if the C++ library that this was linked with still works.
extern "C" int numbers() {
  std::ostringstream out;
  std::wostringstream wide;
  std::istringstream in("77 3.25");
  int whole = 0;
  double fraction = 0;
  out << 12345 << ' ' << 1.5 << ' ' << std::hex << 255 << ' ' << std::put_money(5) << std::isdigit('4', std::locale());
  wide << 42;
  in >> whole >> fraction;
  bool caught = false;
  try {
    (void)std::stoi("none");
  } catch (const std::invalid_argument&) {
    caught = true;
  }
  return out.str() == "12345 1.5 ff 51" && wide.str() == L"42" && whole == 77 && fraction == 3.25 && caught &&
         std::uncaught_exceptions() == 0 ? 0 : 1;
}
END
cat > "$work/program.cc" <<'END'
#include <vrambroker/vrambroker.h>

#include <iostream>

extern "C" int numbers();
int main() {
  vrambroker_client* client = nullptr;
  void* pointer = nullptr;
  if (numbers() != 0) return 1;
  if (vrambroker_connect(nullptr, &client) != 0 || vrambroker_malloc(client, 5000, 0, &pointer) != 0 ||
      vrambroker_free(client, pointer) != 0 || vrambroker_disconnect(client) != 0) {
    std::cerr << vrambroker_last_error_message() << std::endl;
    return 2;
  }
  std::cout << "A C++ program with " << 1 << " libstdc++ of its own" << std::endl;
  return numbers();
}
END
c++ -O1 -shared -fPIC "$work/numbers.cc" -o "$work/libnumbers.so"
c++ -O1 -I "$bundle/include" "$work/program.cc" "$work/numbers.cc" -L "$bundle/lib" -lvrambroker -Wl,-rpath,"$bundle/lib" -o "$work/program"
printf '#include <iostream>\nextern "C" int numbers();\nint main() { std::cout << "plain\\n"; return numbers(); }\n' > "$work/plain.cc"
c++ -O1 "$work/plain.cc" "$work/numbers.cc" -o "$work/plain"
for libraries in "" "$work/old"; do
  # Programs of gcc 13 and newer do not start with an older libstdc++ either.
  if ! LD_LIBRARY_PATH=$libraries "$work/plain" 2> /dev/null; then
    echo "not run: programs of this compiler need the newer libstdc++"
    continue
  fi
  env -i VRAMBROKER_SOCKET_DIR="$work/run" LD_LIBRARY_PATH="$libraries" "$work/program" || fail "the C++ program failed (LD_LIBRARY_PATH=$libraries)"
done

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
  # Loads a C++ library before or after the bundle's library, with local or global symbols.
  for libraries in "" "$work/old"; do
    for order in before after; do
      for mode in RTLD_LOCAL RTLD_GLOBAL; do
        clean PYTHONPATH="$bundle/python" PYTHONDONTWRITEBYTECODE=1 VRAMBROKER_SOCKET_DIR="$work/run" LD_LIBRARY_PATH="$libraries" "$python" -c '
import ctypes, sys, vrambroker
path, order, mode, libraries = sys.argv[1:]
def numbers():
    assert ctypes.CDLL(path, getattr(ctypes, mode)).numbers() == 0, "the C++ library no longer writes numbers"
    assert libraries + "/libstdc++.so.6" in open("/proc/self/maps").read(), "it is not the one that it would be without the bundle"
if order == "before":
    numbers()
with vrambroker.Client() as client:
    client.malloc(5000).write(b"written beside another libstdc++")
numbers()' "$work/libnumbers.so" $order $mode "$libraries" || fail "$order, $mode, LD_LIBRARY_PATH=$libraries"
      done
    done
  done
  # PyTorch catches the bundle's exceptions. The stand-ins for PyTorch's libraries have a libstdc++ of their own.
  for preload in "" "$old"; do
    clean VRAMBROKERD="$bundle/bin/vrambrokerd" VRAMCTL="$bundle/bin/vramctl" VRAMBROKER_TEST_LIBRARY="$bundle/lib/libvrambroker.so.1" \
      VRAMBROKER_PYTHON_DIR="$bundle/python" VRAMBROKER_STANDINS="$build_dir/tests/python" VRAMBROKER_TEST_PRELOAD="$preload" \
      PYTHONDONTWRITEBYTECODE=1 "$python" "$source_dir/tests/python/torch_test.py" TorchTest 2> "$work/torch.log" \
      || { cat "$work/torch.log" >&2; fail "the tests of PyTorch's part (LD_PRELOAD=$preload)"; }
    tail -n 1 "$work/torch.log"
  done
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
for library in libm libdl librt libpthread libresolv; do  # parts of the C library that no tool uses
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
