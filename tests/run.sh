#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs missing packages, builds vrambroker with warnings as errors, and runs its tests. Ends with a table of times.
#
#   --all      all phases of CI: also layout and lint, packages, containers, other Debians, Slurm, sanitizers, fuzzing.
#              Layout to Slurm are for Debian 12 with its security updates
#   --jobs N   compile with N processes (default: the number of processors), test with a few more
set -euo pipefail
cd "$(dirname "$0")/.."

all=false jobs=$(nproc)
while [ $# -gt 0 ]; do
  case "$1" in
    --all) all=true ;;
    --quick) ;;  # the old name of today's default
    --jobs)
      [[ ${2-} =~ ^[1-9][0-9]*$ ]] || { echo "run.sh: --jobs needs a number of processes, not '${2-}'" >&2; exit 2; }
      jobs=$2
      shift
      ;;
    -h|--help) sed -n '4,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "run.sh: unknown option '$1'; see --help" >&2; exit 2 ;;
  esac
  shift
done

# ---- Phases, and the table at the end ----

work=$(mktemp -d)
began=$(date +%s)
phase="" phase_began=$began machines_pid=""
end_phase() {
  if [ -n "$phase" ]; then printf '%s\t%s\t%s\n' "$phase" $(($(date +%s) - phase_began)) "$1" >> "$work/phases"; fi
  phase=""
}
# start_phase NAME: ends the earlier phase as ok.
start_phase() {
  end_phase ok
  phase=$1 phase_began=$(date +%s)
  printf '\n== %s (%d:%02d)\n' "$phase" $(((phase_began - began) / 60)) $(((phase_began - began) % 60))
}
finish() {
  local code=$?
  trap - EXIT
  if [ -n "$machines_pid" ]; then kill -TERM -- "-$machines_pid" 2> /dev/null && wait "$machines_pid" || true; fi
  end_phase "$([ $code -eq 0 ] && echo ok || echo FAILED)"
  if command -v python3 > /dev/null && [ -f "$work/phases" ]; then tests/report.py "$work" "$began" || true; fi
  rm -rf "$work"
  exit $code
}
trap finish EXIT
trap 'exit 130' INT TERM

# ---- How to build and test ----

# The compilers of Debian 12, the project's development system, judge layout, lint and warnings; other compilers find
# other faults. On other systems the faults are shown, not enforced.
judge=$(. /etc/os-release; [ "$ID-${VERSION_ID:-}" = debian-12 ] && echo ON || echo OFF)

# ccache knows files by their content and their place in the source tree, so the cache serves every clone.
export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1
configure() {
  local launcher=()
  if command -v ccache > /dev/null; then
    launcher=(-DCMAKE_C_COMPILER_LAUNCHER=ccache -DCMAKE_CXX_COMPILER_LAUNCHER=ccache -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache)
  fi
  cmake --preset "$1" -DVRAMBROKER_WERROR=$judge "${launcher[@]}" > "$work/configure.log" 2>&1 || { cat "$work/configure.log" >&2; return 1; }
}
# build PRESET [BUILD_OPTIONS...]: configures and builds PRESET; run_tests PRESET PART [CTEST_OPTIONS...]: runs PRESET's
# tests. PART names ctest's report: PRESET.xml or PRESET-unit.xml.
build() {
  configure "$1"
  cmake --build --preset "$1" -j "$jobs" "${@:2}"
}
# AddressSanitizer's defaults (256 MiB of freed memory kept, 30 callers of each allocation) take 1.2 to 1.8 times as long.
export ASAN_OPTIONS=quarantine_size_mb=16:malloc_context_size=8
run_tests() {  # many tests wait; the sanitizers' tests are few and long, and their output may have a failure anywhere
  (cd "build/$1" && ctest --output-on-failure --test-output-size-failed 20000000 --output-junit "$work/$1$2.xml" -j $((jobs + 4)) "${@:3}")
}

start_phase "Packages"
./deploy/packages.sh "$($all && echo ci || echo test)"
echo "  all are installed"

start_phase "Release build$([ "$judge" = ON ] && echo ", warnings are errors")"
build ci
start_phase "Release tests"
run_tests ci ""
if ! $all; then
  printf '\nLeft out: layout, lint, packages, containers, other Debians, Slurm, sanitizers, fuzzing. --all runs them.\n'
  exit 0
fi

# machines: tests the packages, images and programs of the release build in new Debians and in containers.
machines() {
  start_phase "Debian packages"
  tests/packages/debian_test.sh build/ci
  start_phase "Containers"
  tests/containers/run.sh build/ci
  start_phase "Unmodified programs in Debian 11, 12 and 13"
  tests/preload/roots/run.sh build/ci
  start_phase "Slurm"
  tests/slurm/run.sh build/ci
  start_phase "Bare Debian 13 and 12"
  tests/platforms/run.sh
}

if [ "$judge" = ON ]; then
  # Runs the phases beside lint and the compilers, in a process group of their own: they mostly use one processor.
  end_phase ok
  set -m
  (
    trap 'end_phase "$([ $? -eq 0 ] && echo ok || echo FAILED)"' EXIT
    machines
  ) < /dev/null > "$work/machines.log" 2>&1 &
  machines_pid=$!
  set +m
  start_phase "Layout (clang-format)"
  git ls-files '*.h' '*.cc' '*.c' | xargs clang-format --dry-run -Werror
  start_phase "Lint (clang-tidy)"
  build clang --target vrambroker_proto vrambroker_kubelet_proto bench_health
  tests/lint.py build/clang --jobs "$jobs"
else
  printf '\nLeft out: layout, lint, packages, containers, other Debians, Slurm. They are for Debian 12.\n'
fi

start_phase "AddressSanitizer and UndefinedBehaviorSanitizer build"
build asan
start_phase "ThreadSanitizer build"
build tsan
# Unit tests start no daemons, so they run beside the machines' daemons.
daemons='integration|cuda|preload|fault'
start_phase "Fuzzing"
JOBS=$jobs tests/fuzz/run.sh 40
start_phase "AddressSanitizer and UndefinedBehaviorSanitizer unit tests"
run_tests asan -unit -LE "$daemons"
start_phase "ThreadSanitizer unit tests"
run_tests tsan -unit -LE "$daemons"
if [ -n "$machines_pid" ]; then
  start_phase "The rest of packages, containers, other Debians, Slurm"
  code=0
  wait "$machines_pid" || code=$?
  machines_pid=""
  cat "$work/machines.log"
  [ $code -eq 0 ] || exit $code
fi

start_phase "AddressSanitizer and UndefinedBehaviorSanitizer tests"
run_tests asan "" -L "$daemons"
start_phase "ThreadSanitizer tests"
run_tests tsan "" -L "$daemons"
