#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Checks that the files of cmake --install can be moved, and found by find_package and pkg-config; the headers stand
# alone. The client libraries build without the dependencies of only the daemon and the tools. The interface of
# libvrambroker.so.1 is unchanged.
# Usage: install_test.sh BUILD_DIR
set -euo pipefail
build_dir=$1
source_dir=$(cd "$(dirname "$0")/../.." && pwd)
consumer=$source_dir/tests/packages/consumer
work=$(mktemp -d)
alone=$build_dir/tests/alone  # a compiler cache knows files by their place in the source tree
daemon_pid=""
cleanup() {
  if [ -n "$daemon_pid" ]; then kill "$daemon_pid" && wait "$daemon_pid" || true; fi
  rm -rf "$work" "$alone"
}
trap cleanup EXIT
werror=()  # tests/run.sh decides whether warnings are errors
if grep -q '^VRAMBROKER_WERROR:BOOL=ON$' "$build_dir/CMakeCache.txt"; then werror=(-Werror); fi
. "$source_dir/tests/support/shell.sh"

say "Installed, and moved"
cmake --install "$build_dir" --prefix "$work/first" > "$work/install.log"
mv "$work/first" "$work/a place"
prefix="$work/a place"
if names_folders "$prefix/lib/cmake" "$prefix/lib/pkgconfig" "$prefix/include"; then
  fail "these files name folders of this machine"
fi
grep -qx "ExecStart=\"$work/first/bin/vrambrokerd\" \"--config=$work/first/etc/vrambroker/vrambroker.textproto\"" \
  "$prefix/lib/systemd/system/vrambroker.service" || fail "the unit has other paths than those it was installed to"
"$prefix/bin/vrambrokerd" --config="$prefix/etc/vrambroker/vrambroker.textproto" --check_config

say "Installed again: the configuration stays as its owner has changed it"
echo "# mine" >> "$prefix/etc/vrambroker/vrambroker.textproto"
cmake --install "$build_dir" --prefix "$prefix" > "$work/install.log"
tail -n 1 "$prefix/etc/vrambroker/vrambroker.textproto" | grep -qx '# mine' || fail "the configuration was overwritten"
if command -v systemd-analyze > /dev/null; then
  systemd-analyze verify "$prefix/lib/systemd/system/vrambroker.service" > "$work/verify.log" 2>&1 || true
  if grep -F "$work" "$work/verify.log"; then fail "systemd does not find the program: its path has a space"; fi
fi

export VRAMBROKER_SOCKET_DIR=$work/run
"$prefix/bin/vrambrokerd" --device=host --capacity=256MiB --http_address=off --socket_dir="$work/run" 2> "$work/daemon.log" &
daemon_pid=$!
for _ in $(seq 600); do
  grep -q 'daemon ready' "$work/daemon.log" && break
  kill -0 "$daemon_pid" || { cat "$work/daemon.log" >&2; fail "the daemon did not start"; }
  sleep 0.1
done

say "find_package"
cmake -S "$consumer" -B "$work/consumer" -DCMAKE_PREFIX_PATH="$prefix" > "$work/cmake.log" || { cat "$work/cmake.log"; fail "find_package"; }
cmake --build "$work/consumer" > "$work/build.log" || { cat "$work/build.log"; fail "a program does not build"; }
"$work/consumer/consumer_c"
"$work/consumer/consumer_cc"

say "pkg-config"
export PKG_CONFIG_PATH="$prefix/lib/pkgconfig"
[ "$(pkg-config --modversion vrambroker)" = "$(pkg-config --modversion vrambroker-client)" ] || fail "two versions"
eval "cc -std=c11 -Wall -Wextra -Wpedantic ${werror[*]} '$consumer/consumer.c' $(pkg-config --cflags --libs vrambroker) -o '$work/c'"
LD_LIBRARY_PATH="$prefix/lib" "$work/c"
eval "c++ -std=c++17 -Wall -Wextra -Wpedantic ${werror[*]} '$consumer/consumer.cc' $(pkg-config --cflags --libs vrambroker-client) -o '$work/cc'"
"$work/cc"

say "Each header by itself, from C++17 on; older ones are told what is missing"
for header in $(cd "$prefix/include" && find . -name '*.h' -printf '%P\n'); do
  for standard in 17 20; do
    echo "#include <$header>" | c++ -x c++ -std=c++$standard -Wall -Wextra "${werror[@]}" -fsyntax-only -I"$prefix/include" - \
      || fail "$header does not stand alone in C++$standard"
  done
done
echo '#include <vrambroker/vrambroker.h>' | c++ -x c++ -std=c++11 -Wall -Wextra "${werror[@]}" -fsyntax-only -I"$prefix/include" -
if echo '#include <vrambroker/client.h>' | c++ -x c++ -std=c++14 -fsyntax-only -I"$prefix/include" - 2> "$work/c++14.log"; then
  fail "client.h takes C++14"
fi
grep -q 'needs C++17' "$work/c++14.log" || { cat "$work/c++14.log"; fail "the error does not say what is missing"; }

say "The libraries alone, where the packages of the daemon and the tools are missing"
without=()
for package in spdlog nlohmann_json Curses Boost prometheus-cpp GTest; do without+=("-DCMAKE_DISABLE_FIND_PACKAGE_$package=ON"); done
rm -rf "$alone"
launcher=$(sed -n 's/^CMAKE_CXX_COMPILER_LAUNCHER:[A-Z]*=//p' "$build_dir/CMakeCache.txt")
cmake -S "$source_dir" -B "$alone" -G Ninja -DCMAKE_BUILD_TYPE=Release -DVRAMBROKER_UNITY=ON \
  -DVRAMBROKER_WERROR="$(sed -n "s/^VRAMBROKER_WERROR:BOOL=//p" "$build_dir/CMakeCache.txt")" -DVRAMBROKER_CLIENT_ONLY=ON \
  "${without[@]}" -DCMAKE_C_COMPILER_LAUNCHER="$launcher" -DCMAKE_CXX_COMPILER_LAUNCHER="$launcher" > "$work/cmake.log" 2>&1 \
  || { cat "$work/cmake.log"; fail "the libraries cannot be configured alone"; }
CCACHE_BASEDIR=$source_dir cmake --build "$alone" > "$work/build.log" || { cat "$work/build.log"; fail "the libraries do not build alone"; }
cmake --install "$alone" --prefix "$work/alone-installed" > /dev/null
(cd "$work/alone-installed" && find . ! -type d | sort) > "$work/alone.files"
[ ! -e "$work/alone-installed/bin" ] || fail "programs were installed"
for file in lib/libvrambroker.so lib/libvrambroker-core.so lib/libvrambroker-client.a include/vrambroker/client.h; do
  grep -qx "./$file" "$work/alone.files" || fail "$file is missing"
done

say "The ABI of libvrambroker.so.1"
if ! command -v abidiff > /dev/null; then fail "abidiff is missing: deploy/packages.sh test installs abigail-tools"; fi
compare() { abidiff --exported-interfaces-only "$1" "$build_dir/client/c/libvrambroker.so.1"; }
baseline=$source_dir/tests/packages/libvrambroker.so.1.abi
sed "/<class-decl name='vrambroker_device'/s/size-in-bits='[0-9]*'/size-in-bits='64'/" "$baseline" > "$work/other.abi"
if compare "$work/other.abi" > "$work/abi.log"; then cat "$work/abi.log"; fail "abidiff does not see a struct of another size"; fi
code=0
compare "$baseline" || code=$?
# Bits of abidiff's code: 1 and 2 an error, 4 a change that needs a person's judgement, 8 a change that breaks programs.
[ $((code & 11)) -eq 0 ] || fail "programs that were built with an older version would break (abidiff: $code)"
[ $code -eq 0 ] || fail "the interface has changed. If things were added only: tests/packages/abi_baseline.sh $build_dir"
