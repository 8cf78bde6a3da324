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

# build PRESET: configures and builds it; run_tests PRESET: runs its tests.
build() {
  cmake --preset "$1" -DVRAMBROKER_WERROR=$judge > /dev/null
  cmake --build --preset "$1" -j "$jobs"
}
run_tests() { (cd "build/$1" && ctest --output-on-failure -j "$jobs"); }

say "Packages"
./deploy/packages.sh test

say "Release build, warnings are errors"
build ci
say "Tests"
run_tests ci
$quick && exit 0

say "Build with clang: thread-safety analysis, warnings are errors"
build clang

if [ "$judge" = ON ]; then
  say "Layout (clang-format)"
  git ls-files '*.h' '*.cc' | xargs clang-format --dry-run -Werror
  say "clang-tidy"
  git ls-files 'allocator/*.cc' 'server/*.cc' 'client/*.cc' 'deploy/*.cc' | grep -v cuda_device \
    | xargs -P "$jobs" -n 2 clang-tidy --quiet -p build/clang 2>&1 | { grep -v 'warnings generated' || true; }
fi

say "Tests under AddressSanitizer and UndefinedBehaviorSanitizer"
build asan
run_tests asan

say "Tests under ThreadSanitizer"
build tsan
run_tests tsan

say "Fuzzing"
JOBS=$jobs tests/fuzz/run.sh 60
