#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs a script in a new Debian, beside machine.sh, the Debian packages of a build and the source tree. The script is
# root there, in a pid and a network namespace of its own: its processes end with the script, and all ports are free.
# Usage: new_debian.sh BUILD_DIR SCRIPT PACKAGE,PACKAGE... [FILE...]
#   PACKAGE: an additional package of Debian; FILE: a file beside the script
set -euo pipefail
build_dir=$(realpath "$1") script=$(realpath "$2") wanted=$3
shift 3
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tools=(mmdebstrap cpack dpkg-shlibdeps)
[ "$(id -u)" -eq 0 ] || tools+=(newuidmap)
for tool in "${tools[@]}"; do
  command -v $tool > /dev/null || { echo "new_debian.sh: needs $tool: deploy/packages.sh test" >&2; exit 1; }
done

mkdir "$work/test"
(cd "$work" && cpack --config "$build_dir/CPackConfig.cmake" -B "$work/packages" > "$work/cpack.log") || { cat "$work/cpack.log" >&2; exit 1; }
mv "$work"/packages/*.deb "$work/test/"
cp -r "$script" "$here/machine.sh" "$here/../support/shell.sh" "$here/guides_test.py" "$@" "$work/test/"
# Copies the files of a guide's reader: the source, and the demos that quickstart.sh builds.
git -C "$here/../.." ls-files -z | tar -C "$here/../.." --null --files-from=- -c \
  | tar -x --one-top-level="$work/test/tree"
mkdir -p "$work/test/tree/build/release/deploy"
cp "$build_dir"/deploy/vrambroker-{demo,fragmentation} "$work/test/tree/build/release/deploy/"
chmod 755 "$work" "$work/test"
ls -l "$work/test"

# Lists the packages' dependencies, the first alternative of each.
depends=$(for package in "$work"/test/*.deb; do dpkg-deb -f "$package" Depends; done | tr ',' '\n' \
  | sed 's/[|(].*//; s/ //g; /vrambroker/d; /^$/d' | sort -u | paste -sd,)
sources=/etc/apt/sources.list.d/debian.sources
[ -f $sources ] || sources=/etc/apt/sources.list
mmdebstrap --quiet --variant=minbase --include="$depends,$wanted" \
  --customize-hook="copy-in '$work/test' /" --customize-hook='timeout --kill-after=10 3600 unshare --net --uts --pid --fork --kill-child --mount-proc="$1/proc" chroot "$1" /test/'"$(basename "$script")" \
  "$(. /etc/os-release; echo "$VERSION_CODENAME")" /dev/null $sources
