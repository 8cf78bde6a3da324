#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes a tarball that runs on any x86-64 Linux with nothing installed, with or without a GPU: daemon, tools, libraries
# for C and Python, GPU tests, and all shared libraries, except the system's C library, which must be as new as this
# machine's. Equal sources and packages give equal bytes.
#
#   --build-dir DIR    bundle this build, as it is; build nothing (default: build build/release first)
#   --output FILE      write the tarball to FILE (default: build/vrambroker-VERSION-linux-x86_64.tar.gz)
set -euo pipefail

source_dir=$(cd "$(dirname "$0")/.." && pwd)
build_dir="" output=""
while [ $# -gt 0 ]; do
  case "$1" in
    --build-dir) build_dir=${2:?--build-dir needs a folder}; shift ;;
    --output) output=$(realpath -m "${2:?--output needs a file}"); shift ;;
    -h|--help) sed -n '4,9s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "bundle.sh: unknown option '$1'; see --help" >&2; exit 2 ;;
  esac
  shift
done
fail() { echo "bundle.sh: $*" >&2; exit 1; }
for tool in cmake ldd objdump dpkg-query python3; do
  command -v $tool > /dev/null || fail "needs $tool: bundles are made on Debian 12, with the packages of deploy/packages.sh"
done

if [ -z "$build_dir" ]; then
  build_dir=$source_dir/build/release
  "$source_dir/deploy/packages.sh" build
  (cd "$source_dir" && cmake --preset release > /dev/null && cmake --build --preset release --target programs gpu_test_programs)
fi
[ -f "$build_dir/CMakeCache.txt" ] || fail "$build_dir is no build folder: it has no CMakeCache.txt"
grep -q '^VRAMBROKER_SANITIZER:STRING=$' "$build_dir/CMakeCache.txt" || fail "$build_dir was built with sanitizers"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# Reads a line like: vrambrokerd 0.1.0 (0123456789ab)
read -r _ version revision < <("$build_dir/server/vrambrokerd" --version)
revision=${revision//[()]/}
name=vrambroker-$version-linux-x86_64
output=${output:-$source_dir/build/$name.tar.gz}
tree=$work/$name
for component in daemon lib dev bundle; do
  cmake --install "$build_dir" --prefix "$tree" --strip --component $component > /dev/null
done
[ -d "$tree/lib" ] || fail "$build_dir installs libraries elsewhere than in lib/: configure it with a prefix other than /usr"
# Tests look for all programs in one folder.
ln -s ../../../bin/vrambrokerd ../../../bin/vramctl "$tree/tests/gpu/bin/"

# Lists the files that find their libraries by themselves.
mapfile -t own < <(find "$tree/bin" "$tree/lib" "$tree/tests/gpu/bin" -type f | sort)
# loaded: prints NAME PATH of each library that the files load, except the parts of the system's C library.
loaded() {
  ldd "${own[@]}" 2> /dev/null | awk '$2 == "=>" { print $1, $3 }' | sort -u \
    | grep -vE '^(ld-linux-x86-64|libc|libm|libdl|librt|libpthread|libresolv|libutil|libanl)[.]so[.]'
}

# ---- Shared libraries ----
loaded > "$work/needed"
if grep ' not$' "$work/needed"; then fail "these libraries are missing"; fi
libraries=()
packages=(nlohmann-json3-dev libspdlog-dev libgtest-dev libgmock-dev zlib1g)  # parts of the programs themselves
mkdir -p "$tree/share/licenses"
paths=()
while read -r soname path; do
  if [[ $path == "$tree"/* ]]; then continue; fi
  cp -L "$path" "$tree/lib/$soname"
  chmod 644 "$tree/lib/$soname"
  paths+=("$(realpath "$path")")
done < "$work/needed"
# Asks dpkg-query about all files at once: a call takes as long for a file as for a hundred. Packages name files in
# /usr/lib by /usr/lib or by /lib. dpkg-query prints lines like "libre2-9:amd64: /usr/lib/...".
declare -A package_of
while read -r package path; do package_of[$path]=$package; done \
  < <(dpkg-query -S "${paths[@]}" "${paths[@]#/usr}" 2> /dev/null | sed -E 's/^([^:, ]+).*: /\1 /')
for path in "${paths[@]}"; do
  package=${package_of[$path]:-${package_of[${path#/usr}]:-}}
  [ -n "$package" ] || fail "$path is of no package, so its licence is unknown"
  libraries+=("$package")
done

# ---- New names for the libraries: a process may have libraries of the old names ----
find "$tree/bin" "$tree/lib" "$tree/tests/gpu/bin" -type f -exec "$source_dir/deploy/bundle/private_names.py" {} +

# ---- Licences ----
for package in $(printf '%s\n' "${packages[@]}" "${libraries[@]}" | sort -u); do
  copyright=/usr/share/doc/$package/copyright
  [ -f $copyright ] || fail "$copyright is missing: the licence of $package"
  install -D -m 644 "$(realpath $copyright)" "$tree/share/licenses/$package/copyright"
done
cat > "$tree/share/licenses/changes" <<END
The libraries in lib/, but vrambroker's own and libgcc_s, are those of the packages below, with unchanged code. Their file names
begin with vrb in place of lib, the versions of libstdc++'s symbols have other names, and unique symbols are ordinary ones:
deploy/bundle/private_names.py in vrambroker's source did that, on the date in MANIFEST, and says why.

package, version, and the source package that it was made from (Debian archives all sources of its packages):
$(printf '%s\n' "${libraries[@]}" | sort -u | xargs dpkg-query -W -f '${Package} ${Version} ${source:Package} ${source:Version}\n')
END
# Copies the licence texts that the copyright files only name.
grep -rhoE '/usr/share/common-licenses/[A-Za-z0-9.-]*[A-Za-z0-9]' "$tree/share/licenses" | sort -u | while read -r text; do
  if [ -f "$text" ]; then install -D -m 644 "$(realpath "$text")" "$tree/share/licenses/common-licenses/${text##*/}"; fi
done
install -m 644 "$source_dir/LICENSE" "$tree/share/licenses/vrambroker"
cuda=no
if grep -q cuMemAlloc_v2 "$tree/bin/vrambrokerd"; then cuda="driver 525 or newer"; else
  echo "bundle.sh: warning: $build_dir was built without CUDA: this bundle serves no GPU" >&2
fi
if [ -f "$tree/tests/gpu/bin/gpu_probe" ]; then
  toolkit=$(sed -n 's/^VRAMBROKER_CUDA_VERSION:INTERNAL=//p' "$build_dir/CMakeCache.txt")
  cat > "$tree/share/licenses/nvidia-cuda-runtime" <<END
Two programs for tests, tests/gpu/bin/gpu_probe and gpu_client, contain NVIDIA's CUDA runtime (cudart_static, toolkit
$toolkit), linked statically. NVIDIA's End User License Agreement for the CUDA Toolkit, attachment A, names it among the
parts that may be distributed with an application: https://docs.nvidia.com/cuda/eula/. Nothing else in here is NVIDIA's:
the daemon, the tools and the libraries use the driver that is installed.
END
else
  echo "bundle.sh: warning: $build_dir was built without nvcc: this bundle lacks the GPU programs of tests/gpu" >&2
fi

# ---- Everything is there ----
if loaded | grep -vF " $tree/"; then fail "these libraries would come from outside of the bundle"; fi
find "$tree/bin" "$tree/lib" "$tree/tests/gpu/bin" -type f > "$work/elf"
needs=$(xargs objdump -T < "$work/elf" | grep -oE 'GLIBC_[0-9.]+' | sort -Vu | tail -n 1)

# ---- The tarball, with equal bytes each time ----
epoch=$(git -C "$source_dir" log -1 --format=%ct 2> /dev/null || echo 0)
cat > "$tree/MANIFEST" <<END
name: vrambroker
version: $version
revision: $revision
date: $(date -u -d "@$epoch" +%Y-%m-%dT%H:%M:%SZ)
machine: x86_64 Linux, glibc ${needs#GLIBC_} or newer
cuda: $cuda
libraries from: $(. /etc/os-release; echo "$PRETTY_NAME")
files:
$(cd "$tree" && find . -type f ! -name MANIFEST -printf '%P\n' | LC_ALL=C sort | xargs sha256sum)
END
mkdir -p "$(dirname "$output")"
tar -C "$work" --sort=name --mtime="@$epoch" --owner=0 --group=0 --numeric-owner --mode=u+rwX,go+rX,go-w -cf - "$name" \
  | gzip -n > "$output.part"
mv "$output.part" "$output"
echo "$output: $(($(stat -c %s "$output") >> 10)) KiB, $(du -sm "$tree" | cut -f1) MiB unpacked, needs glibc ${needs#GLIBC_}"
