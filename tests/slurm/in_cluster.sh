#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
#
# run.sh runs this script as root of a new Debian with Slurm: deploy/slurm/README.md sets up a cluster of a single
# machine.
. /test/machine.sh
explain() {
  squeue --all || true
  sinfo --Node --format '%N %T %E' || true
  tail -n 30 /var/log/slurm/*.log /tmp/vrambrokerd*.log /tmp/gpu2.log | cut -c1-300
}

# ---- A machine: its name and address, users, Slurm's daemons and vrambrokerd, run like their units ----

hostname gpu1
ip link set lo up
ip address add 10.77.0.1/32 dev lo  # Slurm ignores the loopback address
printf '127.0.0.1 localhost\n10.77.0.1 gpu1\n' > /etc/hosts
useradd --create-home alice
useradd --create-home bob  # joins the daemon's group once the group exists
mkdir -p tree/build/release/packages /var/spool/slurmd.gpu{1,2} /run/munge /var/log/slurm /test/jobs
chmod 1777 /test/jobs
cp ./*.deb tree/build/release/packages/
put_sudo
cat > /usr/local/bin/systemctl << 'END'
#!/bin/bash
[ "$*" = "restart slurmctld slurmd" ] || exec /usr/bin/systemctl "$@"
pkill -x slurmd
pkill -x slurmctld
while pgrep -x slurmd || pgrep -x slurmctld; do sleep 0.1; done
slurmctld -c && slurmd -c
END
chmod +x /usr/local/bin/systemctl
munged --force
cat > /etc/slurm/slurm.conf << 'END'
ClusterName=test
SlurmctldHost=gpu1
SlurmUser=root
SlurmdUser=root
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.%n.pid
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd.%n
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmdParameters=config_overrides
ReturnToService=2
MessageTimeout=5
SchedulerParameters=bf_interval=1,sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName=gpu1 CPUs=8 RealMemory=2000
PartitionName=all Nodes=ALL Default=YES OverSubscribe=YES:8 State=UP
END
echo 'CgroupPlugin=cgroup/v1' > /etc/slurm/cgroup.conf
start_daemon() {
  install -d -m 0755 -o vrambroker -g vrambroker /run/vrambroker
  install -d -m 0700 -o vrambroker -g vrambroker /var/lib/vrambroker
  "${as_the_unit[@]}" vrambrokerd --config /etc/vrambroker/vrambroker.textproto >> /tmp/vrambrokerd.log 2>&1 &
  daemon=$!
  until_true serves
}
serves() {
  kill -0 $daemon || fail "vrambrokerd has ended"
  vramctl status > /dev/null 2>&1
}
node_is() { [ "$(sinfo --noheader --Node --nodes "$1" --format %T 2> /dev/null)" = "$2" ]; }

say "deploy/slurm/README.md, command by command"
# The package's configuration is for a GPU. The daemon must run when Slurm reads the rule.
dpkg -i ./vrambroker_*.deb > /dev/null
usermod --append --groups vrambroker bob
sed -i 's/^device: .*/device: "host"/; s/^# capacity: .*/capacity: "256MiB"/; s/^http_address: .*/http_address: "off"/' \
  /etc/vrambroker/vrambroker.textproto
start_daemon
python3 guides_test.py tree deploy/slurm/README.md

# ---- Questions and actions of the tests ----

# submit USER MIB COMMAND [OPTION...]: sets $job to the number of a job of 8 tasks, whose output is $job.out.
cd /test/jobs
submit() {
  local gres=()
  [ "$2" = 0 ] || gres=(--gres=vram:"$2")
  job=$(printf '#!/bin/bash\n%s\n' "$3" | sudo -u "$1" sbatch --parsable --output="/test/jobs/%j.out" -n8 "${gres[@]}" "${@:4}")
}
state() { scontrol show job "$1" --oneliner | grep -o 'JobState=[A-Z_]*' | cut -d= -f2 | sort -u; }
has_ended() { case $(state "$1") in COMPLETED | FAILED | CANCELLED | NODE_FAIL) ;; *) false ;; esac; }
figure() { vramctl claim show "slurm-$1" --format json 2> /dev/null | tr -d ' \n' | grep -o "\"$2\":[0-9]*" | head -1 | cut -d: -f2; }
reserved() { [ "$(figure "$1" reserved_bytes)" = $(($2 << 20)) ]; }
# Compares the claims of both nodes' daemons; both daemons must answer.
claims_are() {
  local all
  all=$(vramctl claim ls --format json && nsenter --target $gpu2 --mount --root --wd=/ vramctl claim ls --format json) || return 1
  [ "$(grep -o '"name": "slurm-[0-9.]*' <<< "$all" | cut -d'"' -f4 | sort | xargs)" = "$*" ]
}
lines() { [ "$(cat "${@:2}" 2> /dev/null | wc -l)" = "$1" ]; }
# refused TEXT COMMAND...: expects that COMMAND fails and says TEXT. A timeout ends a command that holds memory.
refused() {
  local text=$1
  shift
  if timeout 600 "$@" > /tmp/refused 2>&1; then fail "done, not refused: $*"; fi
  cat /tmp/refused
  grep -q -- "$text" /tmp/refused || fail "not said: $text"
}

say "The node has 256 MiB, as its daemon, and there is a second node, with a daemon of its own"
sed -i 's/80000/256/; s/CPUs=8/CPUs=64/' /etc/slurm/slurm.conf /etc/slurm/gres.conf
sed -i 's/^required.*/& timeout=600/' /etc/slurm/plugstack.conf.d/vrambroker.conf
echo 'NodeName=gpu2 NodeHostname=gpu1 NodeAddr=10.77.0.1 Port=6900 CPUs=64 RealMemory=2000 Gres=vram:256' >> /etc/slurm/slurm.conf
echo 'NodeName=gpu2 Name=vram Count=256 Flags=CountOnly' >> /etc/slurm/gres.conf
sed -i 's/^NodeName=gpu1/& Port=6818/' /etc/slurm/slurm.conf
cat /etc/slurm/slurm.conf /etc/slurm/gres.conf /etc/slurm/plugstack.conf.d/vrambroker.conf
cat > /tmp/gpu2 << 'END'
mkdir /tmp/munge && mount --bind /run/munge /tmp/munge
mount -t tmpfs -o mode=0755 tmpfs /run
mkdir /run/munge && mount --bind /tmp/munge /run/munge
vrambrokerd --device host --capacity 256MiB --http-address off --socket-dir /run/vrambroker --claims_file /run/claims 2> /tmp/vrambrokerd2.log &
until vramctl status > /dev/null 2>&1; do sleep 0.1; done
exec slurmd -D -c -N gpu2
END
pkill -x slurmd
pkill -x slurmctld
have_stopped() { ! pgrep -x slurmd && ! pgrep -x slurmctld; }
until_true have_stopped
start_slurmd() { slurmd -N gpu1 "$@"; }
slurmctld -c
start_slurmd -c
unshare --mount --propagation unchanged bash -e /tmp/gpu2 > /tmp/gpu2.log 2>&1 &
gpu2=$!
until_true node_is gpu1 idle
until_true node_is gpu2 idle

say "The limit of a job holds for its 8 tasks together"
submit alice 64 'srun -n8 bash -c "vramctl hold 16MiB > task.\$SLURM_JOB_ID.\$SLURM_PROCID 2>&1 || echo \$? >> refused.\$SLURM_JOB_ID"' -w gpu1
first=$job
until_true lines 4 "refused.$first"
until_true reserved "$first" 64
cat task."$first".* | grep "claim slurm-$first" | head -1 || fail "the refusal does not name the claim"
vramctl claim show "slurm-$first"

say "Another user's job has a claim of its own, and what does not fit waits"
submit bob 192 'srun -n1 vramctl hold 100MiB' -w gpu1
second=$job
until_true reserved "$second" 100
submit bob 1 'vramctl claim ls' -w gpu1
third=$job
waits_for_memory() { [ "$(squeue --noheader --jobs "$third" --format '%T %r')" = "PENDING Resources" ]; }
until_true waits_for_memory
squeue
refused "may not use the claim" sudo -u bob env VRAMBROKER_SOCKET_DIR=/run/vrambroker/claims/slurm-"$first" vramctl hold 1MiB

say "What is cancelled gives its memory back"
began=$(date +%s%N)
scancel "$first"
given_back() { vramctl claim ls > /dev/null && { [ -z "$(figure "$first" sessions)" ] || reserved "$first" 0; }; }
until_true given_back
echo "after $((($(date +%s%N) - began) / 1000000)) ms"
until_true has_ended "$third"
until_true grep -q "slurm-$third" "$third.out"

say "slurmd and vrambrokerd are killed in the middle of a job"
kill -KILL "$(cat /run/slurmd.gpu1.pid)"
kill -KILL $daemon
wait $daemon || true
start_daemon
start_slurmd
until_true reserved "$second" 100
back() { [ "$(figure "$second" sessions)" = 1 ]; }
until_true back
in_second() { refused "$1" sudo -u bob srun --jobid="$second" --overlap -n1 "${@:2}"; }
in_second "sessions of claim slurm-$second already have" vramctl hold 93MiB

say "A step cannot raise its job's limit"
in_second "more than the job's" --gres=vram:256 vramctl hold 93MiB
in_second "does not give it the right CLIENT" bash -c "VRAMBROKER_SOCKET_DIR=/run/vrambroker vramctl hold 1MiB"
in_second "may not change claims" vramctl claim set "slurm-$second" --limit 256MiB
[ "$(figure "$second" limit_bytes)" = $((192 << 20)) ] || fail "the limit is another one"
scancel "$second"
until_true claims_are ""

say "Steps side by side share the claim"
submit alice 64 'srun -n1 --exact --gres=none vramctl hold 40MiB & srun -n1 --exact --gres=none vramctl hold 24MiB & wait' -w gpu1
until_true reserved "$job" 64
scancel "$job"

say "A job of two nodes has its limit on each, and a heterogeneous one those of its parts"
submit alice 64 'srun -n2 -N2 bash -c "vramctl claim ls; vramctl hold 65MiB; true" > nodes 2>&1' -N2
until_true has_ended "$job"
until_true eval '[ "$(grep -c "^slurm-.* 64.00 MiB" nodes)" = 2 ] && [ "$(grep -c "out of memory (limit)" nodes)" = 2 ]'
until_true claims_are ""
job=$(sudo -u alice sbatch --parsable --output=het.out --gres=vram:20 -w gpu1 : --gres=vram:30 -w gpu2 << 'END'
#!/bin/bash
srun --het-group=0,1 vramctl claim ls --format json
END
)
until_true has_ended "$job"
limits() { grep -o 'limit_bytes": [0-9]*' het.out | cut -d' ' -f2 | sort -n | xargs; }
until_true eval '[ "$(limits)" = "$((20 << 20)) $((30 << 20))" ]'
until_true claims_are ""

say "Without the resource nothing is given, whatever the job says"
# nothing USER COMMAND TEXT: expects that a job without the resource is refused, and told TEXT.
nothing() {
  submit "$1" 0 "$2 || echo refused" -w gpu1
  until_true has_ended "$job"
  until_true grep -q '^refused' "$job.out"
  grep "$3" "$job.out" || fail "refused for another reason: $(cat "$job.out")"
}
nothing alice 'vramctl hold 1MiB' "group vrambroker"
nothing bob 'vramctl hold 1MiB' "the right CLIENT"
nothing bob 'VRAMBROKER_SOCKET_DIR=/run/vrambroker vramctl hold 1MiB' "the right CLIENT"
submit alice 0 'vramctl claim ls' -w gpu1 --exclusive
until_true has_ended "$job"
until_true grep -q '256.00 MiB' "$job.out"  # Slurm gives an exclusive job all of the node's resource
submit alice 0 'echo "dir: $VRAMBROKER_SOCKET_DIR"' -w gpu1 --export=ALL,VRAMBROKER_SOCKET_DIR=/run/vrambroker/claims/slurm-1
until_true has_ended "$job"
until_true grep -qx 'dir: ' "$job.out"  # the variable with another job's directory is gone

say "A daemon that is down delays a job; what could not be removed is removed later"
kill -TERM $daemon
wait $daemon
submit alice 64 'vramctl claim ls' -w gpu1
until_true grep -q "job $job waits for the daemon" /var/log/slurm/slurmd.gpu1.log
start_daemon
until_true has_ended "$job"
until_true grep -q "slurm-$job" "$job.out"
submit alice 64 'srun -n1 vramctl hold 16MiB' -w gpu1
left=$job
until_true reserved "$left" 16
kill -KILL $daemon
wait $daemon || true
scancel "$left"
is_forgotten() { [ ! -e "/run/vrambroker-slurm/$1" ]; }
until_true is_forgotten "$left"
until_true grep -q "claim slurm-$left: no vrambrokerd" /var/log/slurm/slurmd.gpu1.log
start_daemon
claims_are "slurm-$left" || fail "the claim is not there any more"
submit alice 0 true -w gpu1
until_true has_ended "$job"
until_true claims_are ""

say "A job that is queued again has a new claim while another process holds memory of the old one"
submit alice 64 'srun -n1 vramctl hold 16MiB' -w gpu1 --requeue
again=$job
until_true reserved "$again" 16
submit alice 20 "VRAMBROKER_SOCKET_DIR=/run/vrambroker/claims/slurm-$again exec vramctl hold 4MiB" -w gpu1
thief=$job
until_true reserved "$again" 36
pkill -STOP -f 'vramctl hold 4MiB'
# In the first two seconds after a job's end slurmd itself skips the job's prolog.
requeue() {
  scontrol requeue "$again"
  until_true is_forgotten "$again"
  scontrol update JobId="$again" StartTime=now+5
}
requeue
until_true reserved "$again.1" 16
vramctl claim show "slurm-$again" | grep 'vramctl-2.* ended ' || fail "the guide says that this names the process"
until_true claims_are "slurm-$again slurm-$again.1 slurm-$thief"
scancel "$thief"
until_true claims_are "slurm-$again.1"
kill -KILL $daemon
wait $daemon || true
requeue
start_daemon
until_true reserved "$again.2" 16
submit bob 0 true -w gpu1
until_true has_ended "$job"
reserved "$again.2" 16 || fail "it was taken for the one before"
scancel "$again"
until_true claims_are ""

say "slurmctld is away when a job is about to start"
# Stops slurmctld between its message to slurmd and the plugin's question to slurmctld. Tries again after an early stop.
asks() { grep -q "waits for slurmctld, to ask what job $job may have" /var/log/slurm/slurmd.gpu1.log; }
has_started() { [ "$(state "$job")" != PENDING ]; }
for _ in $(seq 20); do
  kill -STOP "$(cat /run/slurmd.gpu1.pid)"
  submit alice 64 'vramctl claim ls' -w gpu1
  until_true has_started
  kill -STOP "$(cat /run/slurmctld.pid)"
  kill -CONT "$(cat /run/slurmd.gpu1.pid)"
  for _ in $(seq 300); do
    if asks; then break; fi
    sleep 0.1
  done
  kill -CONT "$(cat /run/slurmctld.pid)"
  until_true has_ended "$job"
  until_true grep -q "slurm-$job" "$job.out"
  if asks; then break; fi
done
asks || fail "slurmctld was never away at the right time"
until_true claims_are ""

say "After a reboot, which no epilog sees, claims of jobs from before are removed"
vramctl claim create slurm-999 --owner bob > /dev/null
submit alice 0 true -w gpu1
until_true has_ended "$job"
until_true claims_are ""

say "What slurmd has not seen the end of is removed when it starts, and later on"
# left_behind JOB: makes the traces of a job without an epilog.
left_behind() {
  vramctl claim create "slurm-$1" --owner bob > /dev/null
  echo "$(id -u bob) 0" > "/run/vrambroker-slurm/$1"
}
left_behind 998
slurmd=$(cat /run/slurmd.gpu1.pid)
kill "$slurmd"
has_left() { ! kill -0 "$slurmd" 2> /dev/null; }
until_true has_left
start_slurmd
until_true claims_are ""
left_behind 997
submit alice 64 'srun -n1 vramctl hold 16MiB' -w gpu1  # the job's prolog does not ask slurmctld again so soon
until_true reserved "$job" 16
claims_are "slurm-$job slurm-997" || fail "slurmctld was asked again at once"
touch -d '1 hour ago' /run/vrambroker-slurm/lock
scancel "$job"
until_true claims_are ""

say "A job's number that is used again is not the old job's claim"
submit alice 0 true -w gpu1
until_true has_ended "$job"
next=$((job + 1))
vramctl claim create "slurm-$next" --owner bob --limit 2MiB > /dev/null
echo "$(id -u bob) 0" > "/run/vrambroker-slurm/$next"
sudo -u bob env VRAMBROKER_SOCKET_DIR=/run/vrambroker/claims/slurm-$next vramctl hold 1MiB > /tmp/old_job 2>&1 &
until_true reserved "$next" 2
submit alice 64 'vramctl claim ls' -w gpu1
[ "$job" = $next ] || fail "not the number that was expected"
until_true has_ended $next
until_true grep -q 'alice.*64.00 MiB' "$next.out"
until_true claims_are ""

say "What plugstack.conf says counts, and a prolog that fails is made good as the guide says"
setting() { sed -i "s|^required.*|required spank_vrambroker.so $*|" /etc/slurm/plugstack.conf.d/vrambroker.conf; }
is_held() { squeue --noheader --jobs "$job" --format %r | grep -i held; }
# runs_after_failing TEXT: expects that the job is held and slurmd's log says TEXT; then releases the job, which runs.
runs_after_failing() {
  until_true is_held
  until_true node_is gpu1 drained
  grep "claim slurm-$job: $1" /var/log/slurm/slurmd.gpu1.log | tail -n 1 || fail "not in slurmd's log: $1"
  setting timeout=600 device=0
  [ -n "$(pgrep -u vrambroker vrambrokerd)" ] || start_daemon
  scontrol update NodeName=gpu1 State=RESUME
  scontrol release "$job"
  scontrol update JobId="$job" StartTime=now+5  # Slurm would wait two minutes after the requeue
  until_true has_ended "$job"
  until_true grep -q "slurm-$job" "$job.out"
  until_true claims_are ""
}
setting device=1
submit alice 64 'vramctl claim ls' -w gpu1
runs_after_failing ".*device 1"
kill -TERM $daemon
wait $daemon
setting timeout=1
submit alice 64 'vramctl claim ls' -w gpu1
runs_after_failing "no vrambrokerd"
setting colour=red
refused "may have socket_dir=.*, not 'colour=red'" sudo -u alice srun -w gpu1 true
setting timeout=soon
refused "timeout=soon in plugstack.conf is not a number of seconds" sudo -u alice srun -w gpu1 true
setting timeout=600
submit alice 64 'touch started; exec sleep 600' -w gpu2
until_true [ -e started ]
sed 's/timeout=600/colour=red/' /etc/slurm/plugstack.conf.d/vrambroker.conf > /tmp/colour_red
on_gpu2() { nsenter --target $gpu2 --mount --root --wd=/ "$@"; }
on_gpu2 mount --bind /tmp/colour_red /etc/slurm/plugstack.conf.d/vrambroker.conf
refused "may have socket_dir=.*, not 'colour=red'" sudo -u alice srun --jobid="$job" --overlap -n1 touch has_run
[ ! -e has_run ] || fail "a step that was refused has run"
on_gpu2 umount /etc/slurm/plugstack.conf.d/vrambroker.conf
sudo -u alice srun --jobid="$job" --overlap -n1 vramctl claim ls | grep "slurm-$job"
scancel "$job"
until_true claims_are ""
until_true node_is gpu2 idle

say "Of several --gres the last one counts"
submit alice 64 'vramctl claim ls' -w gpu1 --gres=vram:20
until_true has_ended "$job"
until_true grep -q "slurm-$job.* 20.00 MiB" "$job.out"

say "Without the package Slurm runs jobs as before"
submit alice 64 'srun -n1 vramctl hold 16MiB' -w gpu1
until_true reserved "$job" 16
dpkg --remove vrambroker-slurm
reserved "$job" 16 || fail "it has lost its memory"
sudo -u alice srun -w gpu1 true
scancel "$job"
until_true claims_are ""
dpkg -i /test/vrambroker-slurm_*.deb > /dev/null
sudo -u alice srun -w gpu1 --gres=vram:64 vramctl claim ls | grep slurm-
grep timeout=600 /etc/slurm/plugstack.conf.d/vrambroker.conf || fail "the settings are lost"
say "All of it works"
