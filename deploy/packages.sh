#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs the packages that vrambroker needs and that are missing; asks for root only then.
# Usage: packages.sh build | packages.sh test (what the tests need in addition)
set -euo pipefail

build=(git cmake ninja-build g++ pkg-config libgrpc++-dev protobuf-compiler protobuf-compiler-grpc libprotobuf-dev
       libabsl-dev prometheus-cpp-dev libboost-dev zlib1g-dev libspdlog-dev libncurses-dev nlohmann-json3-dev
       libcli11-dev libgtest-dev libgmock-dev curl dpkg-dev file help2man python3)
# The web page's charts come from the npm registry. Debian's npm does not go with another vendor's Node.js.
command -v npm >/dev/null || build+=(nodejs npm)
test=("${build[@]}" ccache clang libclang-rt-dev clang-format abigail-tools python3-numpy python3-venv python3-yaml
      mmdebstrap uidmap prometheus tmux zsh libjemalloc2 libtcmalloc-minimal4 libmimalloc2.0)

# Ubuntu has no such package as chromium; the tests in a browser are skipped there. Lint, containers and Slurm are for Debian 12 alone.
# Its clang-tidy 22 comes with the security updates. It skips system headers, and so needs a third of the time that Debian's
# default version needs.
case $(. /etc/os-release; echo "$ID-${VERSION_ID:-}") in
  debian-12)
    test+=(chromium clang-tidy-22 podman crun containernetworking-plugins iproute2 iptables docker-compose libslurm-dev)
    # The files of deploy/kubernetes. Debian's kubectl does not go with another vendor's.
    test+=(golang-go golang-github-masterminds-sprig-dev golang-k8s-sigs-yaml-dev python3-jsonschema)
    command -v kubectl >/dev/null || test+=(kubernetes-client)
    ;;
  debian-*) test+=(chromium) ;;
esac

case "${1:-}" in
  build) wanted=("${build[@]}") ;;
  test) wanted=("${test[@]}") ;;
  *) echo "usage: $0 build|test" >&2; exit 2 ;;
esac

missing=()
for package in "${wanted[@]}"; do
  [ "$(dpkg-query -W -f '${db:Status-Abbrev}' "$package" 2>/dev/null | cut -c1-2)" = ii ] || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

echo "Installing: ${missing[*]}"
if [ "$(id -u)" -eq 0 ]; then
  root=()
elif command -v sudo >/dev/null; then
  root=(sudo)
else
  echo "$0: these packages are missing and need root to install: ${missing[*]}" >&2
  exit 1
fi
# A service that a package brings (prometheus) is not wanted running here; only its programs are.
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
  printf '#!/bin/sh\nexit 101\n' | "${root[@]}" tee $policy >/dev/null
  "${root[@]}" chmod +x $policy
  trap '"${root[@]}" rm -f $policy' EXIT
fi
"${root[@]}" apt-get update -qq
"${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
