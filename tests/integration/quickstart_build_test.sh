#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Tests quickstart.sh's messages during a build, and its exit codes. The real CMake and ninja build a project of 40
# short steps. Afterwards quickstart.sh runs the programs of BUILD_DIR.
# Usage: quickstart_build_test.sh SOURCE_DIR BUILD_DIR
set -euo pipefail
source_dir=$1 build_dir=$(realpath "$2")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "FAILED: $*" >&2; cat "$work/out" >&2; exit 1; }

mkdir -p "$work/tree/deploy" "$work/tree/build/release"
cp "$source_dir/deploy/quickstart.sh" "$source_dir/deploy/progress.sh" "$work/tree/deploy/"
printf '#!/bin/sh\n' > "$work/tree/deploy/packages.sh"
chmod +x "$work/tree/deploy/packages.sh"
for folder in server client deploy; do ln -s "$build_dir/$folder" "$work/tree/build/release/"; done
cat > "$work/tree/CMakePresets.json" <<'END'
{"version": 6,
 "configurePresets": [{"name": "release", "generator": "Ninja", "binaryDir": "${sourceDir}/build/release"}],
 "buildPresets": [{"name": "release", "configurePreset": "release"}]}
END
cat > "$work/tree/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.25)
project(steps LANGUAGES NONE)
if(EXISTS ${CMAKE_SOURCE_DIR}/no_configure)
  message(FATAL_ERROR "said by CMake")
endif()
file(GLOB files CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/deploy/*)  # ninja runs CMake again, in steps of its own
set(last CMakeLists.txt)
foreach(step RANGE 1 40)
  add_custom_command(OUTPUT step${step} COMMAND ${CMAKE_SOURCE_DIR}/step.sh ${step} DEPENDS ${last})
  set(last ${CMAKE_BINARY_DIR}/step${step})
endforeach()
add_custom_target(programs DEPENDS ${last})
END
# Makes the script of a step. Steps 3 and 30 wait until quickstart.sh has shown the progress.
cat > "$work/tree/step.sh" <<'END'
#!/bin/sh
tree=$(dirname "$0")
said() { while [ "$(grep -c 'of 40 steps after' "$tree/../out")" -lt "$1" ]; do sleep 0.1; done; }
case $1 in
  3) said 1 ;;
  9) if [ -e "$tree/no_build" ]; then echo "said by the build"; exit 1; fi ;;
  30) said 2 ;;
esac
touch "step$1"
END
chmod +x "$work/tree/step.sh"

# run ARGUMENTS...: runs quickstart.sh, writes the output to $work/out, and prints the exit code.
run() {
  local code=0
  timeout 1500 "$work/tree/deploy/quickstart.sh" --seconds 1 "$@" > "$work/out" 2>&1 || code=$?
  echo $code
}
says() { grep -qE "$1" "$work/out" || fail "it does not say: $1"; }

touch "$work/tree/no_configure"
[ "$(run)" = 1 ] || fail "CMake failed, and it went on"
says 'said by CMake' && says 'FAILED: cmake'
rm "$work/tree/no_configure"
touch "$work/tree/no_build"
[ "$(run)" = 1 ] || fail "the build failed, and it went on"
says 'said by the build' && says 'FAILED: the build'
rm "$work/tree/no_build"
rm -f "$work"/tree/build/release/step*
[ "$(run)" = 0 ] || fail "a build that works"
says ' 40 steps on [0-9]+ processors$' && says 'built in [0-9]+:' && says 'All checks passed.'
if grep ' steps after ' "$work/out" | grep -vE '^  ([1-3]?[0-9]|40) of 40 steps after [0-9]+:[0-9]{2}(, (about [0-9]+ minutes|less than a minute) left)?$'; then
  fail "an untrue figure"
fi
says ' left$'
[ "$(run)" = 0 ] || fail "with nothing to build"
says 'everything is built' && says 'All checks passed.'

# A checkout that was moved with its build folder is configured again.
sed -i 's|^CMAKE_HOME_DIRECTORY:INTERNAL=.*|&/elsewhere|' "$work/tree/build/release/CMakeCache.txt"
[ "$(run)" = 0 ] || fail "a checkout that was moved"
says 'configuring' && says 'All checks passed.'

# quickstart.sh names a wrong option.
for wrong in "--seconds" "--seconds ten" "--build-dir" "--build-dir /nonexistent" "--device" "--device gpu" "--fast"; do
  # shellcheck disable=SC2086  # words
  [ "$(run $wrong)" = 2 ] || fail "it takes $wrong"
  says "^quickstart.sh: .*${wrong%% *}"
done

# Without apt-get, packages.sh names the packages to install, and the next commands.
mkdir "$work/bin"
for tool in bash cut dirname; do ln -s "$(command -v $tool)" "$work/bin/"; done
code=0
PATH=$work/bin "$work/bin/bash" "$source_dir/deploy/packages.sh" programs > "$work/out" 2>&1 || code=$?
[ $code = 1 ] || fail "packages.sh without apt-get: $code"
says 'this system has no apt-get' && says '^cmake ninja-build .* libgrpc\+\+-dev ' && says 'cmake --build --preset release --target programs$'

# Two scripts at once succeed, although the second script finds the metrics port taken.
"$work/tree/deploy/quickstart.sh" --build-dir "$build_dir" --seconds 1 > "$work/other" 2>&1 & other=$!
"$work/tree/deploy/quickstart.sh" --build-dir "$build_dir" --seconds 1 > "$work/out" 2>&1 || fail "one of two at once"
wait $other || fail "the other of two at once: $(cat "$work/other")"
