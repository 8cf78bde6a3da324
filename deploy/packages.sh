#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs missing Debian or Ubuntu packages that vrambroker needs. Asks for root only if packages are missing.
# Usage: packages.sh WHAT; each WHAT includes the packages of the lines above:
#
#   programs   packages to build the programs of quickstart.sh
#   build      packages to build man pages, Debian packages, bundles, and all tests
#   test       packages for the tests of tests/run.sh
#   ci         packages for the tests of tests/run.sh --all
set -euo pipefail
. "$(dirname "$0")/progress.sh"

# A|B: the first package that this distribution has.
packages=(cmake ninja-build g++ pkg-config libgrpc++-dev protobuf-compiler protobuf-compiler-grpc libprotobuf-dev libabsl-dev
          prometheus-cpp-dev libboost-dev zlib1g-dev libspdlog-dev libncurses-dev nlohmann-json3-dev libcli11-dev)
build=(git curl dpkg-dev file help2man python3 libgtest-dev libgmock-dev)
test=(python3-numpy python3-venv python3-yaml python3-jsonschema tmux zsh prometheus abigail-tools libjemalloc2)
ci=(ccache clang libclang-rt-dev clang-format mmdebstrap uidmap "libtcmalloc-minimal4|libtcmalloc-minimal4t64"
    "libmimalloc2.0|libmimalloc3")
# Debian's npm does not go with another vendor's Node.js.
command -v npm > /dev/null || ci+=(nodejs npm)
# Lint, containers and Slurm are for Debian 12 alone. clang-tidy 22 comes with Debian's security updates. clang-tidy 22
# skips system headers, and needs a third of the time of Debian's default version. Ubuntu has no package chromium, and
# skips the tests in a browser.
case $(. /etc/os-release; echo "$ID-${VERSION_ID:-}") in
  debian-12)
    ci+=(chromium clang-tidy-22 podman crun containernetworking-plugins iproute2 iptables docker-compose libslurm-dev)
    # Packages for the files of deploy/kubernetes. Debian's kubectl does not go with another vendor's kubectl.
    ci+=(golang-go golang-github-masterminds-sprig-dev golang-k8s-sigs-yaml-dev)
    command -v kubectl > /dev/null || ci+=(kubernetes-client)
    ;;
  debian-*) ci+=(chromium) ;;
esac

case "${1:-}" in
  programs) ;;
  build) packages+=("${build[@]}") ;;
  test) packages+=("${build[@]}" "${test[@]}") ;;
  ci) packages+=("${build[@]}" "${test[@]}" "${ci[@]}") ;;
  -h|--help) sed -n '4,10s/^# \{0,1\}//p' "$0"; exit ;;
  *) echo "usage: $0 programs|build|test|ci" >&2; exit 2 ;;
esac

fail() { printf '%s\n' "$0: $1" "${@:2}" >&2; exit 1; }

if ! command -v apt-get > /dev/null; then
  fail "this system has no apt-get. Install what these Debian packages hold, by the names of your distribution:" "${packages[*]//|/ or }" \
    "Then build without this script: cmake --preset release -DVRAMBROKER_TESTS=OFF && cmake --build --preset release --target programs"
fi

is_installed() { [ "$(dpkg-query -W -f '${db:Status-Abbrev}' "$1" 2> /dev/null | cut -c1-2)" = ii ]; }
missing=()
for package in "${packages[@]}"; do
  for name in ${package//|/ }; do is_installed "$name" && continue 2; done
  missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0

if [ "$(id -u)" -eq 0 ]; then
  root=()
elif command -v sudo > /dev/null; then
  root=(sudo)
  sudo -v || fail "sudo refuses; run $0 $1 as root"
else
  fail "these packages are missing, and there is no sudo. Run as root: apt-get install ${missing[*]//|/ or }"
fi

began=$SECONDS
log=$(mktemp)
policy=/usr/sbin/policy-rc.d
our_policy=false
trap 'rm -f "$log"; if $our_policy; then "${root[@]}" rm -f $policy; fi' EXIT
# apt ARGUMENTS...: runs apt-get, writes apt-get's status, and leaves all other output in the log. The status has a
# descriptor of its own, which apt-get closes for the packages' scripts. sudo passes only the standard descriptors on.
own_session=()
apt() {
  "${root[@]}" env LC_ALL=C DEBIAN_FRONTEND=noninteractive \
    "${own_session[@]}" sh -c 'exec apt-get -y -qq -o APT::Status-Fd=3 -o DPkg::Lock::Timeout=300 "$@" 3>&1 >&2' sh "$@" 2>> "$log"
}
advice() {
  if grep -q 'Failed to fetch' "$log"; then echo "It needs a network, or another mirror of the distribution's packages in /etc/apt."; fi
}
apt_failed() { fail "apt-get $1 failed:" "$(grep -v '^debconf: delaying' "$log" | tail -n 20)" "$(advice)"; }

progress "reading the lists of packages"
# apt-get only warns of lists that it cannot fetch: the earlier lists may be enough.
apt update > /dev/null || apt_failed "update"
names=()
for package in "${missing[@]}"; do
  for name in ${package//|/ }; do
    if [[ $(LC_ALL=C apt-cache policy "$name") =~ Candidate:\ [^\(] ]]; then names+=("$name"); continue 2; fi
  done
  what="apt-get knows no package ${package//|/ or }"
  case $package in clang-tidy-22) what+=", which Debian 12 has in its security updates: add bookworm-security to /etc/apt" ;; esac
  fail "$what" "$(grep '^[WE]:' "$log" || true)" "$(advice)"
done

install=(install --no-install-recommends "${names[@]}")
summary=$(LC_ALL=C apt-get --assume-no "${install[@]}" 2> /dev/null || true)
count=$(sed -n 's/.* \([0-9]*\) newly installed.*/\1/p' <<< "$summary")
download=$(sed -n 's/^Need to get \([0-9.,]* [kMG]*B\).*/\1/p' <<< "$summary")
disk=$(sed -n 's/^After this operation, \([0-9.,]* [kMG]*B\) .*used.*/\1/p' <<< "$summary")
# The count is empty if apt-get refuses. The installation below prints the reason.
[ -z "$count" ] || progress_end "$count packages, ${download:-nothing} to download, ${disk:-nothing} on disk: ${names[*]}"

# The policy starts no service of a new package (prometheus): only the package's programs are wanted.
if [ ! -e $policy ]; then
  our_policy=true
  printf '#!/bin/sh\nexit 101\n' | "${root[@]}" tee $policy > /dev/null
  "${root[@]}" chmod +x $policy
fi
unpacked=0 installed=0
# follow: shows the progress from the lines of apt's status, KIND:PACKAGE:PERCENT:TEXT.
follow() {
  local kind percent text _
  while IFS=: read -r kind _ percent text; do
    case "$kind:$text" in
      dlstatus:*) progress "downloaded ${percent%.*} % of ${download:-0 B} after $(clock $began)" ;;
      pmstatus:Unpacking\ *) unpacked=$((unpacked + 1)) ;;
      pmstatus:Installed\ *) installed=$((installed + 1)) ;;
    esac
    if [ "$kind" = pmstatus ]; then
      progress "unpacked $unpacked and installed $installed of ${count:-some} packages after $(clock $began); Ctrl-C waits for these"
    fi
  done
}
apt --download-only "${install[@]}" | follow || apt_failed "install"
trap '' INT  # an interrupted dpkg would leave packages in pieces
own_session=(setsid --wait)
apt "${install[@]}" | follow || apt_failed "install"
trap - INT
progress_end "installed in $(clock $began)"
