#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs PyTorch's own caching allocator (libc10_cuda.so of Debian 13's PyTorch 2.6, the CUDA build) over a stand-in CUDA
# runtime and a real daemon with host memory. The check shows the effect of vrambroker_torch_serve() on the real
# library, and the texts of the library's errors. No GPU. Run the script by hand: it needs 500 MB of Debian 13's
# packages, whose C library runs beside this system's, and x86-64.
# Usage: run.sh BUILD_DIR PACKAGES, a folder with the .deb files of Debian 13 (apt-get download, in Debian 13):
#   libtorch-cuda-2.6 libtorch-cuda-dev libc6 libstdc++6 libgcc-s1 libnuma1 libcpuinfo0 zlib1g
set -euo pipefail
[ $# -eq 2 ] || { sed -n '/^# Usage/,/^set/{/^#/s/^# //p}' "$0" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../../.." && pwd)
build=$(cd "$1" && pwd)
packages=$(cd "$2" && pwd)

work=$(mktemp -d)
trap 'kill "${daemon:-0}" 2>/dev/null || true; rm -rf "$work"' EXIT
mkdir "$work/root" "$work/include"
dpkg --fsys-tarfile "$packages"/libtorch-cuda-2.6_*.deb | tar -x -C "$work/root" --wildcards '*/libc10*'
dpkg --fsys-tarfile "$packages"/libtorch-cuda-dev_*.deb | tar -x -C "$work/include" --wildcards '*/c10/*'
for package in libc6 libstdc++6 libgcc-s1 libnuma1 libcpuinfo0 zlib1g; do
  dpkg -x "$packages"/${package}_*.deb "$work/root"
done

libraries=$work/root/usr/lib/x86_64-linux-gnu
for cuda in ${CUDA_HOME:-/usr/local/cuda} /usr/local/cuda-*; do [ ! -e "$cuda/include/cuda_runtime_api.h" ] || break; done
echo 'libcudart.so.12 { global: *; };' > "$work/map"
cc -shared -fPIC -o "$work/libcudart.so.12" "$here/cudart.c" -Wl,-soname,libcudart.so.12,--version-script="$work/map"
c++ -std=c++17 -O1 -w -o "$work/check" "$here/check.cc" -I"$work/include/usr/include" -I"$cuda/include" -I"$root" \
  "$libraries/libc10_cuda.so.2.6" "$libraries/libc10.so.2.6" "$work/libcudart.so.12" -Wl,--allow-shlib-undefined -ldl

mkdir "$work/sockets"
"$build/server/vrambrokerd" --socket_dir="$work/sockets" --device=host --capacity=1GiB --http_address=off 2> "$work/log" &
daemon=$!
until grep -q "daemon ready" "$work/log"; do kill -0 "$daemon" || { cat "$work/log"; exit 1; }; sleep 0.05; done
VRAMBROKER_SOCKET_DIR=$work/sockets "$work/root/usr/lib64/ld-linux-x86-64.so.2" \
  --library-path "$work:$libraries:/usr/lib/x86_64-linux-gnu:/lib/x86_64-linux-gnu" \
  "$work/check" "$build/client/c/libvrambroker.so.1"
