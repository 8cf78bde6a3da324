#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds deploy/Dockerfile for real, on Debian from its packages. The image starts the daemon, and the daemon serves a
# client in another container. Later tests use the image, built from WORK_DIR/source.
. "$(dirname "$0")/podman.sh"
trap 'podman rm --all --force > /dev/null 2>&1 || true' EXIT

say "The image"
base_image debian:12-slim
# Makes the base image, with a compiler cache that outlives the test. The cache has most of the objects from the machine's
# own build, if options and locale are the same.
cache=$(ccache --get-config cache_dir)
{
  cat << 'END'
FROM docker.io/library/debian:12-slim
RUN apt-get update -qq && apt-get install -y -qq --no-install-recommends ccache > /dev/null
RUN echo 'set(VRAMBROKER_WERROR ON CACHE BOOL "")' > /options.cmake
ENV CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache CCACHE_DIR=/ccache CCACHE_BASEDIR=/src CCACHE_NOHASHDIR=1
ENV CMAKE_TOOLCHAIN_FILE=/options.cmake
END
  for name in LANG LC_ALL LC_CTYPE LC_MESSAGES; do [ -z "${!name-}" ] || echo "ENV $name=${!name}"; done
} | podman build --quiet --pull=never --network=host -t docker.io/library/debian:12 - > /dev/null
rm -rf "$work/source"
git -C "$source_dir" ls-files -z | tar -C "$source_dir" --null --files-from=- -c | tar -x --one-top-level="$work/source"
podman build --format docker --network=host -v "$cache:/ccache" -f "$work/source/deploy/Dockerfile" -t vrambroker "$work/source"

say "The daemon, and a client in another container"
mkdir -p "$work/sockets"
podman run --network=none -d --name daemon --pid=host -v "$work/sockets:/run/vrambroker" vrambroker \
  vrambrokerd --socket-dir=/run/vrambroker --device=host --capacity=256MiB --http-address=off > /dev/null
serves() { podman exec daemon vramctl status > /dev/null 2>&1; }
until_true serves
podman run --network=none -d --name client --pid=host -v "$work/sockets:/run/vrambroker" vrambroker vramctl hold 64MiB --name client > /dev/null
holds() { podman exec daemon vramctl summary client 2> /dev/null | grep -q Allocated; }
until_true holds
podman stop --time 600 client > /dev/null
podman healthcheck run daemon || fail "the image's health check"
podman stop --time 600 daemon > /dev/null
[ "$(podman inspect --format '{{.State.ExitCode}}' daemon)" = 0 ] || fail "the daemon did not stop well"

say "A daemon without --pid=host says what it needs"
podman run --network=none -d --name inside -v "$work/sockets:/run/vrambroker" vrambroker \
  vrambrokerd --socket-dir=/run/vrambroker --device=host --capacity=256MiB --http-address=off > /dev/null
inside_serves() { podman exec inside vramctl status > /dev/null 2>&1; }
until_true inside_serves
if podman run --network=none --rm -v "$work/sockets:/run/vrambroker" vrambroker vramctl status; then
  fail "a daemon serves whom it cannot see"
fi
said() { podman logs inside 2>&1 | grep -q "start the daemon's container with --pid=host"; }
until_true said
say "All of it works"
