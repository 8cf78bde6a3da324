#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Follows a newcomer on bare Debians that have `main` alone and neither compilers nor tools. On the first Debian
# quickstart.sh installs, builds without a warning, and runs. Each Debian has the packages that tests/run.sh installs.
# Usage: run.sh [--packages] [SUITE...]   --packages: checks the packages only; default suites: trixie bookworm
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../support/shell.sh"
. "$here/../support/roots.sh"

cache=${CCACHE_DIR:-$HOME/.cache/ccache}
[ "${1-}" = inside ] || in_own_namespaces 4G "$@"

work=$2
shift 2
first=true
if [ "${1-}" = --packages ]; then
  first=false
  shift
fi
[ $# -gt 0 ] || set -- trixie bookworm
export TMPDIR=$work/tmp
mkdir "$TMPDIR"
log=$work/output.log
explain() { tail -n 40 "$log"; }
mirror=$(mirror_of_debian)

# in_root SUITE COMMAND...: runs COMMAND; the output goes to the log, and to the terminal.
in_root() {
  local suite=$1
  shift
  env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root CCACHE_DIR=/ccache CCACHE_BASEDIR=/vrambroker CCACHE_NOHASHDIR=1 \
    CMAKE_C_COMPILER_LAUNCHER="$launcher" CMAKE_CXX_COMPILER_LAUNCHER="$launcher" ${apt_config:+APT_CONFIG="$apt_config"} \
    timeout 3000 chroot "$work/$suite" sh -c 'cd /vrambroker && exec "$@"' sh "$@" > "$log" 2>&1 < /dev/null || fail "$suite: $*"
  sed 's/^/  | /' "$log"
}
says() { grep -qE "$1" "$log" || fail "it does not say: $1"; }
launcher="" apt_config=""

for suite; do
  say "A bare $suite"
  mmdebstrap --quiet --variant=minbase --components=main "$suite" "$work/$suite" "$mirror" > "$log" 2>&1 || fail "mmdebstrap failed"
  cp -L /etc/resolv.conf "$work/$suite/etc/"
  mount -t proc proc "$work/$suite/proc"
  mkdir "$work/$suite/vrambroker"
  git -C "$here/../.." ls-files -z | tar -C "$here/../.." --null --files-from=- -c | tar -x -C "$work/$suite/vrambroker"
  if $first; then
    # A compiler cache saves the compilation of unchanged files.
    if [ -d "$cache" ]; then
      mkdir "$work/$suite/ccache"
      mount --bind "$cache" "$work/$suite/ccache"
      chroot "$work/$suite" apt-get -qq update
      chroot "$work/$suite" apt-get -qq -y install --no-install-recommends ccache > "$log" 2>&1 || fail "apt-get install ccache"
      launcher=ccache
    fi
    say "$suite: quickstart.sh"
    in_root "$suite" ./deploy/quickstart.sh --seconds 2
    says '^  [0-9]+ packages, [0-9.]+ MB to download, [0-9.]+ MB on disk: cmake '
    says '^  downloaded [0-9]+ % of [0-9.]+ MB after [0-9]+:[0-9]{2}$'
    says '^  [0-9]+ of [0-9]+ steps after '
    says '^All checks passed'
    if grep -i 'warning' "$work/$suite/vrambroker/build/release/quickstart.log"; then fail "$suite: warnings"; fi
    in_root "$suite" cmake --install build/release --prefix /opt/vrambroker
    for unwanted in npm nodejs clang git; do
      if chroot "$work/$suite" dpkg-query -W "$unwanted" > /dev/null 2>&1; then fail "$suite: it installs $unwanted"; fi
    done
    first=false
  fi
  say "$suite: the packages of tests/run.sh"
  echo 'APT::Get::Simulate "true";' > "$work/$suite/simulate.conf"
  apt_config=/simulate.conf
  in_root "$suite" ./deploy/packages.sh test
  says '^  [0-9]+ packages, '
  apt_config=""
done
say "All of it works"
