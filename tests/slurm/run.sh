#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Tests Slurm's jobs and their claims: a real Slurm in a new Debian, with the packages of a build. Usage: run.sh
# BUILD_DIR
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
if [ "$(id -u)" -ne 0 ]; then
  echo "Skipped: slurmd's own tests need root."
  exit
fi
exec "$here/../packages/new_debian.sh" "$1" "$here/in_cluster.sh" slurmctld,slurmd,slurm-client,munge,iproute2,procps,python3
