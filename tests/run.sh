#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs what is missing, builds vrambroker in every way that is checked, and runs all tests.
#
#   --quick    only the release build and its tests
#   --jobs N   compile and test with N processes (default: the number of processors)
set -euo pipefail
cd "$(dirname "$0")/.."

quick=false jobs=$(nproc)
while [ $# -gt 0 ]; do
  case "$1" in
    --quick) quick=true ;;
    --jobs) jobs=${2:?--jobs needs a number}; shift ;;
    -h|--help) sed -n '3,7s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "run.sh: unknown option '$1'; see --help" >&2; exit 2 ;;
  esac
  shift
done

say() { printf '\n== %s (%d:%02d)\n' "$*" $((SECONDS / 60)) $((SECONDS % 60)); }

# Layout, lint and warnings are judged by the compilers of Debian 12, on which the project is developed; others find
# other things. There they are shown, not enforced.
judge=$(. /etc/os-release; [ "$ID-${VERSION_ID:-}" = debian-12 ] && echo ON || echo OFF)

# build PRESET [BUILD_OPTIONS...]: configures and builds it; run_tests PRESET [CTEST_OPTIONS...]: runs its tests.
build() {
  cmake --preset "$1" -DVRAMBROKER_WERROR=$judge > /dev/null
  cmake --build --preset "$1" -j "$jobs" "${@:2}"
}
run_tests() { (cd "build/$1" && ctest --output-on-failure -j $((jobs + 1)) "${@:2}"); }  # many of them wait

say "Packages"
./deploy/packages.sh test

say "Release build, warnings are errors"
build ci
say "Tests"
run_tests ci
$quick && exit 0

if [ "$judge" = ON ]; then
  say "Layout (clang-format)"
  git ls-files '*.h' '*.cc' '*.c' | xargs clang-format --dry-run -Werror
  say "clang-tidy, with clang's warnings and thread-safety analysis"
  build clang --target vrambroker_proto
  tidy() { xargs -P "$jobs" -n 2 clang-tidy --quiet "$@" -p build/clang 2>&1 | { grep -v 'warnings generated' || true; }; }
  # The static analyzer, which takes long, looks at where pointers are handled by hand; its deep mode takes three times as
  # long as all the rest.
  git ls-files 'allocator/*.cc' 'client/*.cc' | grep -v 'cuda_device_absent\|vramctl' \
    | tidy --extra-arg=-Xclang --extra-arg=-analyzer-config --extra-arg=-Xclang --extra-arg=mode=shallow
  git ls-files 'server/*.cc' 'proto/*.cc' 'client/vramctl/*.cc' 'deploy/*.cc' | tidy '--checks=-clang-analyzer-*'
fi

say "Tests under AddressSanitizer and UndefinedBehaviorSanitizer"
build asan
run_tests asan

# What only doubles what AddressSanitizer has seen on the CUDA device is left out; cuda_test is not.
say "Tests under ThreadSanitizer"
build tsan
run_tests tsan -E '^cuda\.'

say "Fuzzing"
JOBS=$jobs tests/fuzz/run.sh 40
