#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# deploy/Dockerfile, built for real: on Debian as it comes from its packages. The image starts the daemon, and serves a client in
# another container.
. "$(dirname "$0")/podman.sh"
fail() { printf '\nimage_test.sh: FAILED: %s\n' "$*" >&2; exit 1; }
trap 'podman rm --all --force > /dev/null 2>&1 || true' EXIT

say "The image"
base_image debian:12-slim
# What it is built on, with a compiler cache, which outlives the test.
cache=$(ccache --get-config cache_dir)
podman build --quiet --network=host -t docker.io/library/debian:12 - > /dev/null << 'END'
FROM docker.io/library/debian:12-slim
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends ccache > /dev/null
ENV CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache CCACHE_DIR=/ccache CCACHE_BASEDIR=/src CCACHE_NOHASHDIR=1
END
rm -rf "$work/source"
git -C "$source_dir" ls-files -z | tar -C "$source_dir" --null --files-from=- -c | tar -x --one-top-level="$work/source"
podman build --format docker --network=host -v "$cache:/ccache" -f "$work/source/deploy/Dockerfile" -t vrambroker "$work/source"

say "The daemon, and a client in another container"
mkdir -p "$work/sockets"
podman run --network=none -d --name daemon --pid=host -v "$work/sockets:/run/vrambroker" vrambroker \
  vrambrokerd --socket-dir=/run/vrambroker --device=host --capacity=256MiB --http-address=off > /dev/null
until_true podman exec daemon vramctl status
podman run --network=none --rm --pid=host -v "$work/sockets:/run/vrambroker" vrambroker timeout --preserve-status -s INT 1 vramctl hold 64MiB
podman healthcheck run daemon || fail "the image's health check"
podman stop --time 600 daemon > /dev/null
[ "$(podman inspect --format '{{.State.ExitCode}}' daemon)" = 0 ] || fail "the daemon did not stop well"
say "All of it works"
