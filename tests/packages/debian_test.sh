#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The Debian packages of a build, in a new Debian that has nothing else: they install, all that they bring works there,
# and when they are purged nothing is left.
# Usage: debian_test.sh BUILD_DIR
set -euo pipefail
build_dir=$(realpath "$1")
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tools=(mmdebstrap cpack dpkg-shlibdeps)
[ "$(id -u)" -eq 0 ] || tools+=(newuidmap)
for tool in "${tools[@]}"; do
  command -v $tool > /dev/null || { echo "debian_test.sh: needs $tool: deploy/packages.sh test" >&2; exit 1; }
done

mkdir "$work/test"
(cd "$work" && cpack --config "$build_dir/CPackConfig.cmake" -B "$work/packages" > "$work/cpack.log") || { cat "$work/cpack.log" >&2; exit 1; }
mv "$work"/packages/*.deb "$work/test/"
cp -r "$here/in_debian.sh" "$here/guides_test.py" "$here/consumer" "$work/test/"
# What a reader of the guides has: the source, and the demos that quickstart.sh builds.
git -C "$here/../.." ls-files -z | tar -C "$here/../.." --null --files-from=- -c \
  | tar -x --one-top-level="$work/test/tree"
mkdir -p "$work/test/tree/build/release/deploy"
cp "$build_dir"/deploy/vrambroker-{demo,fragmentation} "$work/test/tree/build/release/deploy/"
chmod 755 "$work" "$work/test"
ls -l "$work/test"

# What the packages depend on, the first alternative of each, and what their users build with.
depends=$(for package in "$work"/test/*.deb; do dpkg-deb -f "$package" Depends; done | tr ',' '\n' \
  | sed 's/[|(].*//; s/ //g; /vrambroker/d; /^$/d' | sort -u | paste -sd,)
sources=/etc/apt/sources.list.d/debian.sources
[ -f $sources ] || sources=/etc/apt/sources.list
mmdebstrap --quiet --variant=minbase --include="$depends,g++,cmake,make,pkg-config,curl,man-db" \
  --customize-hook="copy-in '$work/test' /" --customize-hook='timeout --kill-after=10 3600 unshare --net --pid --fork --kill-child --mount-proc="$1/proc" chroot "$1" /test/in_debian.sh' \
  "$(. /etc/os-release; echo "$VERSION_CODENAME")" /dev/null $sources
