#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Slurm 22.05.8 of Debian 12: a SPANK plugin that is `required` refuses a step by returning -1. If the plugin refuses in
# init_post_opt() in slurmstepd, srun says "Plugin initialization failed" and has exit code 0. A batch job is COMPLETED
# with exit code 0 though its script never ran, and the node is drained. If the plugin refuses in task_init(), srun has
# exit code 1, the job is FAILED, and the node stays.
#
# Root runs the script, since the cluster of a single machine has a root folder of its own; needs mmdebstrap and a C
# compiler.
# Usage: slurm_refusing_plugin.sh
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
if [ "${1-}" != inside ]; then
  . "$here/../tests/support/shell.sh"
  . "$here/../tests/support/debian.sh"
  version=22.05.8-4+deb12u3
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  unpack_from_debian bookworm "$work" "libslurm-dev=$version" || { echo "$(basename "$0"): this version cannot be had" >&2; exit 2; }
  mkdir "$work/test"
  cat > "$work/refuses.c" << 'END'
#include <slurm/spank.h>
#include <stdio.h>
#include <string.h>
SPANK_PLUGIN(refuses, 1)
/* Where to refuse is in a file. */
static int answer(const char* place) {
  char text[32] = "";
  FILE* const file = fopen("/test/place", "re");
  const int refuses = file != NULL && fgets(text, sizeof text, file) != NULL && strcmp(text, place) == 0;
  if (file != NULL) fclose(file);
  return refuses ? -1 : 0;
}
int slurm_spank_init_post_opt(spank_t spank, int argc, char** argv) {
  (void)spank, (void)argc, (void)argv;
  return spank_context() == S_CTX_REMOTE ? answer("init_post_opt") : 0;
}
int slurm_spank_task_init(spank_t spank, int argc, char** argv) {
  (void)spank, (void)argc, (void)argv;
  return answer("task_init");
}
END
  cc -shared -fPIC -I "$work/usr/include" -o "$work/test/refuses.so" "$work/refuses.c"
  cp "$0" "$here/../tests/support/shell.sh" "$work/test/"
  # shellcheck disable=SC2016  # mmdebstrap's shell knows $1
  mmdebstrap --quiet --variant=minbase --include="slurmctld=$version,slurmd=$version,slurm-client=$version,munge,iproute2,procps" \
    --customize-hook="copy-in '$work/test' /" --customize-hook='unshare --net --uts --pid --fork --kill-child \
      --mount-proc="$1/proc" chroot "$1" "/test/'"$(basename "$0")"'" inside' \
    bookworm /dev/null "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $(mirror_of_debian) bookworm main"
  exit
fi

# ---- A cluster of a single machine ----

. "$here/shell.sh"
hostname node
ip link set lo up
ip address add 10.77.0.1/32 dev lo
printf '127.0.0.1 localhost\n10.77.0.1 node\n' > /etc/hosts
mkdir -p /var/spool/slurmd /run/munge /var/log/slurm
munged --force
echo 'required /test/refuses.so' > /etc/slurm/plugstack.conf
echo 'CgroupPlugin=cgroup/v1' > /etc/slurm/cgroup.conf
cat > /etc/slurm/slurm.conf << 'END'
ClusterName=test
SlurmctldHost=node
SlurmUser=root
SlurmdUser=root
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
NodeName=node CPUs=4
PartitionName=all Nodes=ALL Default=YES State=UP
END
slurmctld -c
slurmd -c
node_is() { [ "$(sinfo --noheader --format %T 2> /dev/null)" = "$1" ]; }
until_true node_is idle
slurmd -V

# expect PLACE SRUN_CODE JOB_STATE JOB_CODE HAS_RUN NODE: expects these results when the plugin refuses at PLACE.
expect() {
  local code=0 job seen
  printf %s "$1" > /test/place
  srun /bin/true || code=$?
  until_true node_is idle
  rm -f /test/has_run
  job=$(printf '#!/bin/sh\ntouch /test/has_run\n' | sbatch --parsable --output=/dev/null)
  has_ended() { [[ $(scontrol show job "$job") =~ JobState=(COMPLETED|FAILED) ]]; }
  until_true has_ended
  until_true node_is "$6"
  seen="$code $(scontrol show job "$job" --oneliner | sed 's/.*JobState=\([A-Z]*\).* ExitCode=\([0-9:]*\).*/\1 \2/')"
  seen+=" $([ -e /test/has_run ] && echo yes || echo no) $(sinfo --noheader --format %T)"
  echo "refused in $1: srun's exit code, the batch job's state and exit code, whether it ran, the node: $seen"
  [ "$seen" = "$2 $3 $4 $5 $6" ] || fail "it was $2 $3 $4 $5 $6: it has changed"
  if node_is drained; then scontrol update NodeName=node State=RESUME; fi
  until_true node_is idle
}
expect nowhere 0 COMPLETED 0:0 yes idle
expect init_post_opt 0 COMPLETED 0:0 no drained
expect task_init 1 FAILED 1:0 no idle
