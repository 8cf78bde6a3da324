#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Tests deploy/compose.yaml without Grafana, which no package has: the daemon, Prometheus, which finds the daemon, and
# two clients. The services use the image of image_test.sh.
own_network=--net  # the services publish ports
. "$(dirname "$0")/podman.sh"
for tool in docker-compose prometheus curl; do
  command -v $tool > /dev/null || fail "needs $tool: deploy/packages.sh test"
done
mkdir -p /run/vrambroker
podman image exists vrambroker || fail "image_test.sh comes first"

say "Prometheus, in an image of the name that compose.yaml has"
mkdir -p "$work/prometheus"
cp "$(command -v prometheus)" "$work/prometheus/"
printf 'FROM debian:12\nCOPY prometheus /bin/prometheus\nWORKDIR /prometheus\nENTRYPOINT ["/bin/prometheus"]\n' > "$work/prometheus/Containerfile"
image=$(sed -n 's/^ *image: \(prom.*\)/\1/p' "$source_dir/deploy/compose.yaml")
podman build --quiet --pull=never --network=none -f "$work/prometheus/Containerfile" -t "docker.io/$image" "$work/prometheus" > /dev/null

say "The services"
podman system service --time=0 "unix://$work/podman.sock" > "$work/service.log" 2>&1 &
service=$!
end() {
  local code=$?
  [ $code = 0 ] || cat "$work/service.log" >&2
  # Removes twice: a container goes after the containers that depend on it.
  for _ in 1 2; do podman rm --all --force > /dev/null 2>&1 || true; done
  kill $service
  wait $service || true
}
trap end EXIT
until_true test -S "$work/podman.sock"
export DOCKER_HOST=unix://$work/podman.sock
# Debian 12's Compose does not know the project's name in the file.
sed '/^name:/d' "$source_dir/deploy/compose.yaml" > "$work/compose.yaml"
compose() { docker-compose -p vrambroker-test --project-directory "$source_dir/deploy" -f "$work/compose.yaml" --profile demo "$@"; }
compose up --detach --no-build vrambroker prometheus trainer evaluator
found() {
  curl -fsS 'http://127.0.0.1:9090/api/v1/query?query=vrambroker_client_reserved_bytes>0' 2> /dev/null | tee "$work/found" | grep -q "\"$1\""
}
until_true found trainer
until_true found evaluator
cat "$work/found"
say "All of it works"
