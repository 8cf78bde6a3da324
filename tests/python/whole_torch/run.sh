#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs the whole of PyTorch 2.6 of Debian 13, the CUDA build, without a GPU: over a stand-in CUDA runtime (cudart.c,
# whose comment explains its environment variables) and stand-ins of NVIDIA's other libraries (libraries.c). Kernels do
# nothing. Root runs the script by hand: the script needs 560 MB of Debian 13's packages, 2 GB of disk, a root directory
# of its own and x86-64.
#
# Usage: run.sh BUILD_DIR PACKAGES PROGRAM [ARGUMENT...]
#   BUILD_DIR  build folder of vrambroker. The script starts a daemon with host memory ($CAPACITY, default 1GiB).
#              PROGRAM's environment leads to the daemon and the package `vrambroker`. With - no broker runs.
#   PACKAGES   a folder with the .deb files of Debian 13; `run.sh - PACKAGES download` fills the folder by apt-get
#   PROGRAM    in Python, a path or a name beside this script. PROGRAM runs with its folder at /program, and with
#              vrambroker's source folder at /repository
#
# $ROOT: a folder for the unpacked packages, kept for the next run; default: a new folder, removed at the end.
set -euo pipefail
[ $# -ge 3 ] || { sed -n '/^# Usage/,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2; exit 2; }
here=$(cd "$(dirname "$0")" && pwd)
build=$1
packages=$2
program=$3
shift 3

# ---- Packages: python3-torch-cuda and its dependencies, without NVIDIA's libraries ----

stood_in="libcuda1 libcudart12 libcublas12 libcublaslt12 libcufft11 libcurand10 libcusolver11 libcusparse12 libnccl2 \
libnvrtc12 libnvtoolsext1 nvidia-cudnn"
not_needed="libcupti12 libnvjitlink12 libnvidia-ml1 libxnvctrl0 libamdhip64-5 adduser debconf passwd openssl perl perl-base \
dpkg binutils ca-certificates python3-pkg-resources"
if [ "$program" = download ]; then
  mkdir -p "$packages"
  apt=$(mktemp -d)
  trap 'rm -rf "$apt"' EXIT
  mkdir -p "$apt"/{state,lists/partial,archives/partial}
  # Uses the mirror of this system's packages.
  mirror=${MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | awk '/debian/ && !n++')}
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror trixie main contrib" > "$apt/sources"
  for package in $stood_in $not_needed; do # apt takes these packages for installed
    printf 'Package: %s\nStatus: install ok installed\nMaintainer: -\nArchitecture: amd64\nVersion: 999\nMulti-Arch: foreign\nDescription: -\n\n' \
      "$package"
  done > "$apt/status"
  cat > "$apt/conf" << END
Dir::Etc::sourcelist "$apt/sources"; Dir::Etc::sourceparts "/dev/null"; Dir::Etc::preferencesparts "/dev/null";
Dir::State "$apt/state"; Dir::State::lists "$apt/lists"; Dir::State::status "$apt/status";
Dir::Cache "$apt"; Dir::Cache::archives "$apt/archives"; APT::Install-Recommends "false"; APT::Sandbox::User "root";
END
  export APT_CONFIG=$apt/conf
  apt-get update
  mapfile -t names < <(apt-get install -s -y python3-torch-cuda dash coreutils | sed -n 's/^Inst \([^ ]*\).*/\1/p')
  cd "$packages" && apt-get download "${names[@]}"
  exit
fi
packages=$(cd "$packages" && pwd)
[ -e "$program" ] || program=$here/$program
[ -e "$program" ] || { echo "run.sh: there is no program ${program##*/}, here or beside run.sh" >&2; exit 2; }
program_folder=$(cd "$(dirname "$program")" && pwd)
program=$(basename "$program")
repository=$(cd "$here/../../.." && pwd)

# ---- The root directory ----

work=$(mktemp -d)
trap 'kill "${daemon:-}" 2>/dev/null || true; rm -rf "$work"' EXIT
root=${ROOT:-$work/root}
if [ ! -e "$root/unpacked" ]; then
  mkdir -p "$root"/usr/{bin,sbin,lib,lib64} "$root"/{etc,tmp,proc,dev,program,repository,opt}
  for folder in bin sbin lib lib64; do ln -sfn usr/$folder "$root/$folder"; done
  for package in "$packages"/*.deb; do
    dpkg-deb --fsys-tarfile "$package" |
      tar -x -C "$root" --keep-directory-symlink --exclude=./usr/share/doc --exclude=./usr/share/man
  done
  echo 'root:x:0:0:root:/tmp:/bin/sh' > "$root/etc/passwd"
  touch "$root/unpacked"
fi
libraries=$root/usr/lib/x86_64-linux-gnu

# ---- The stand-ins: each library's symbols that PyTorch's libraries import, under the version that PyTorch needs ----

standin=$root/opt/standin
rm -rf "$standin" && mkdir -p "$standin"
nm -D --undefined-only "$libraries"/lib{torch,c10,caffe2,tensorpipe}*.so.* "$root"/usr/lib/libgloo_cuda.so.* |
  awk '/^ / { print $NF }' | sort -u > "$work/imports"
# Columns: library, source, and the prefix of the library's functions where the functions have no version.
while read -r library source prefix; do
  name=${library%%.*}
  sed -n "s/@$library\$//p; ${prefix:+/^${prefix}[^@]*\$/p}" "$work/imports" | sort -u > "$work/names"
  cc -Wall -Wextra -O1 -fPIC -D"$name" -c -o "$work/$name.o" "$here/$source"
  nm --defined-only "$work/$name.o" | awk '{ print $NF }' | sort -u > "$work/have"
  comm -23 "$work/names" "$work/have" | sed 's/.*/int &(void) { return 0; }/' > "$work/$name.rest.c"
  if [ -z "$prefix" ]; then echo "$library { global: *; };"; else echo '{ global: *; };'; fi > "$work/map"
  cc -shared -fPIC -w -o "$standin/$library" "$work/$name.o" "$work/$name.rest.c" \
    "-Wl,-soname,$library,-z,nodelete,--version-script=$work/map" # nodelete: the real driver stays loaded, too
done << END
libcudart.so.12 cudart.c
libcublas.so.12 libraries.c
libcublasLt.so.12 libraries.c
libcudnn.so.9 libraries.c
libcufft.so.11 libraries.c
libcurand.so.10 libraries.c
libcusolver.so.11 libraries.c
libcusparse.so.12 libraries.c
libnvrtc.so.12 libraries.c
libnvToolsExt.so.1 libraries.c
libnccl.so.2 libraries.c nccl
libcuda.so.1 libraries.c cu[A-Z]
END

# ---- The daemon, and the C library with the system libraries that Debian 13 lacks ----

environment=(PATH=/usr/bin HOME=/tmp LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1
  LD_LIBRARY_PATH=/opt/standin:/opt/vrambroker:/usr/lib/x86_64-linux-gnu/blas:/usr/lib/x86_64-linux-gnu/lapack)
for variable in ${!STANDIN_*} ${!PYTORCH_*} ${!VRAMBROKER_*}; do environment+=("$variable=${!variable}"); done
if [ "$build" != - ]; then
  build=$(cd "$build" && pwd)
  rm -rf "$root/opt/vrambroker" && mkdir -p "$root/opt/vrambroker"
  cp "$build"/client/c/libvrambroker.so.1 "$build"/client/c/libvrambroker-core.so "$root/opt/vrambroker/"
  ldd "$build/client/c/libvrambroker-core.so" | awk '$2 == "=>" { print $1, $3 }' | while read -r name path; do
    [ -e "$libraries/$name" ] || cp "$path" "$root/opt/vrambroker/$name"
  done
  sockets=$root/tmp/sockets.$$
  mkdir -p "$sockets"
  : > "$work/log"
  "$build/server/vrambrokerd" --socket_dir="$sockets" --device=host --capacity="${CAPACITY:-1GiB}" --http_address=off \
    2> "$work/log" &
  daemon=$!
  until grep -q "daemon ready" "$work/log"; do kill -0 "$daemon" || { cat "$work/log"; exit 1; }; sleep 0.05; done
  environment+=(PYTHONPATH=/repository/client/python VRAMBROKER_LIBRARY=/opt/vrambroker/libvrambroker.so.1
    VRAMBROKER_SOCKET_DIR=/tmp/sockets.$$)
fi

mkdir -p "$root"/{program,repository,proc,dev,tmp}
status=0
# shellcheck disable=SC2016 # the inner shell expands these variables
unshare --mount bash -c '
  root=$1 program=$2 repository=$3; shift 3
  mount --rbind /proc "$root/proc" && mount --rbind /dev "$root/dev" &&
  mount --bind -o ro "$program" "$root/program" && mount --bind -o ro "$repository" "$root/repository" || exit 1
  exec chroot "$root" "$@"' bash "$root" "$program_folder" "$repository" \
  /usr/bin/env -i "${environment[@]}" /usr/bin/python3 "/program/$program" "$@" || status=$?
[ "$status" = 0 ] || [ "$build" = - ] || { echo "--- the daemon's log"; cat "$work/log"; } >&2
[ "$build" = - ] || rm -rf "$sockets"
exit "$status"
