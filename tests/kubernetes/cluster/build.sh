#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds a Kubernetes from Debian's source package: kube-apiserver, kube-controller-manager, kube-scheduler and kubelet.
# The build takes about eight minutes on two cores, and 4 GB beside the programs until its end. Usage: build.sh
# PROGRAMS_DIR
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../../support/shell.sh"
mkdir -p "$1"
programs=$(realpath "$1")
for tool in go dpkg-source patch; do command -v $tool > /dev/null || fail "needs $tool: apt-get install golang-go dpkg-dev"; done
work=$(mktemp -d "$programs/build.XXXXXX")
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT

say "Debian's source package kubernetes"
# Uses the machine's own package sources, for source packages, in a list that only this script reads.
mkdir -p "$work/apt/state/partial"
if [ -f /etc/apt/sources.list.d/debian.sources ]; then
  sed 's/^Types:.*/Types: deb-src/' /etc/apt/sources.list.d/debian.sources > "$work/apt/own.sources"
  list=$work/apt/own.sources
else
  sed -n 's/^deb /deb-src /p' /etc/apt/sources.list > "$work/apt/own.list"
  list=$work/apt/own.list
fi
apt=(apt-get -qq -o "Dir::Etc::SourceList=$list" -o Dir::Etc::SourceParts=/dev/null -o "Dir::State::Lists=$work/apt/state"
  -o APT::Sandbox::User=root)
"${apt[@]}" update
mkdir -p "$work/go/src/k8s.io"
(cd "$work/go/src/k8s.io" && "${apt[@]}" source kubernetes > "$work/apt/log" 2>&1) || { cat "$work/apt/log"; fail "apt-get source kubernetes"; }
mv "$work"/go/src/k8s.io/kubernetes-*/ "$work/go/src/k8s.io/kubernetes"
cd "$work/go/src/k8s.io/kubernetes"
source_version=$(dpkg-parsechangelog --show-field Version)
version=$(sed 's/.*really//; s/-.*//' <<< "$source_version")
echo "kubernetes $source_version"

unset GOROOT GOFLAGS
export GOPATH=$work/go GOCACHE=$work/cache GOPROXY=off GO111MODULE=off
# Sets the programs' version like Kubernetes' own build.
IFS=. read -r major minor _ <<< "$version"
flags="-s -w"
for package in component-base/version client-go/pkg/version; do
  for value in gitVersion="v$version" gitMajor="$major" gitMinor="$minor"; do
    flags+=" -X k8s.io/kubernetes/vendor/k8s.io/$package.$value"
  done
done
# build PROGRAM PACKAGE
build() {
  say "$1"
  local began=$SECONDS
  go build -tags providerless,dockerless -ldflags "$flags" -o "$work/built/$1" "$2"
  echo "$((SECONDS - began)) s"
}
build kubelet ./cmd/kubelet
build openapi-gen ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
# kube-apiserver does not compile without the generated description of its API.
inputs=$(grep -rl --include='*.go' '^// +k8s:openapi-gen=' pkg $(ls -d vendor/k8s.io/*/ | grep -vE 'code-generator|sample-apiserver') \
  | xargs -n1 dirname | LC_ALL=C sort -u | sed 's|^|k8s.io/kubernetes/|' | paste -sd,)
"$work/built/openapi-gen" -i "$inputs" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
  -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r "$work/violations" 2> "$work/openapi.log" \
  || { tail "$work/openapi.log"; fail "openapi-gen"; }
for program in kube-apiserver kube-scheduler kube-controller-manager; do build $program ./cmd/$program; done
for program in kubelet kube-apiserver kube-scheduler kube-controller-manager; do mv "$work/built/$program" "$programs/$program"; done
echo "$source_version" > "$programs/version"
say "All of them are in $1"
