#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# PyTorch 2.14.1 of Debian sid: PyTorch's guide calls PYTORCH_CUDA_ALLOC_CONF an alias of PYTORCH_ALLOC_CONF for
# backward compatibility. If both variables are set the alias counts, and PyTorch ignores the other variable as a whole
# and without a word, even with an empty alias. PYTORCH_HIP_ALLOC_CONF lies between the two, even in a build without
# HIP.
#
# Needs a C++ compiler, x86-64. Usage: torch_settings_order.sh
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/../tests/support/shell.sh"
. "$here/../tests/support/debian.sh"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
unpack_from_debian sid "$work" libtorch2.14=2.14.1+dfsg-1 libc6 libcpuinfo0 libgcc-s1 libnuma1 libstdc++6 \
  || { echo "$(basename "$0"): these versions cannot be had" >&2; exit 2; }
libraries=$work/usr/lib/x86_64-linux-gnu
cat > "$work/asks.cc" << 'END'
#include <cstddef>
#include <cstdio>
namespace c10::CachingAllocator {
struct AcceleratorAllocatorConfig {
  static std::size_t roundup_power2_divisions(std::size_t size);
};
}  // namespace c10::CachingAllocator
int main() {
  std::printf("%zu\n", c10::CachingAllocator::AcceleratorAllocatorConfig::roundup_power2_divisions(std::size_t{1} << 20));
}
END
c++ -std=c++17 -o "$work/asks" "$work/asks.cc" -Wl,--allow-shlib-undefined "$libraries/libc10.so.2.14"
# expect DIVISIONS VARIABLE=DIVISIONS...: expects PyTorch to use DIVISIONS with these variables; DIVISIONS may be empty.
expect() {
  local variables=() seen
  for each in "${@:2}"; do
    variables+=("${each%%=*}=${each#*=}")
    [ -z "${each#*=}" ] || variables[-1]="${each%%=*}=roundup_power2_divisions:${each#*=}"
  done
  seen=$(env -i "${variables[@]}" "$libraries/ld-linux-x86-64.so.2" --library-path "$libraries" "$work/asks")
  echo "${variables[*]}: roundup_power2_divisions is $seen"
  [ "$seen" = "$1" ] || fail "it was $1: it has changed"
}
expect 4 PYTORCH_ALLOC_CONF=4
expect 8 PYTORCH_ALLOC_CONF=4 PYTORCH_CUDA_ALLOC_CONF=8
expect 0 PYTORCH_ALLOC_CONF=4 PYTORCH_CUDA_ALLOC_CONF=
expect 2 PYTORCH_ALLOC_CONF=4 PYTORCH_HIP_ALLOC_CONF=2
expect 8 PYTORCH_HIP_ALLOC_CONF=2 PYTORCH_CUDA_ALLOC_CONF=8
