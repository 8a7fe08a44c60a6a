#!/usr/bin/env bash
# A throw-away SLURM of some virtual nodes on this machine, for tests: no systemd, no cgroups, no /etc/slurm.
#   lab.sh install    the Debian packages slurm-wlm and munge, if they are missing (as root)
#   lab.sh up [N]     start the controller and N nodes (default 2); prints the line to export
#   lab.sh down       end what "up" has started
#   lab.sh status
# All state is in $SLURM_LAB (default: slurm-lab in $TMPDIR), but for the names of the nodes in /etc/hosts while it is up.
set -euo pipefail

LAB=${SLURM_LAB:-${TMPDIR:-/tmp}/slurm-lab}
CPUS=${SLURM_LAB_CPUS:-2} # of each node
HOST=$(hostname -s)
MARK="# lightning_zero slurm lab $LAB"
export SLURM_CONF=$LAB/slurm.conf

has() { # COMMAND...
  local name
  for name in "$@"; do command -v "$name" >/dev/null || return 1; done
}

install() {
  if has slurmctld slurmd munged sbatch; then return; fi
  if [ "$(id -u)" != 0 ]; then
    echo "lab.sh install: needs root, to install slurm-wlm and munge" >&2
    exit 1
  fi
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends slurm-wlm munge
}

spawn() { # NAME COMMAND...: in a session of its own; its process id is kept
  local name=$1
  shift
  setsid "$@" >"$LAB/log/$name.out" 2>&1 </dev/null &
  echo $! >"$LAB/run/$name.pid"
}

alive() { # NAME: is what was spawned still there (and no other process that got its number)
  local pid
  pid=$(cat "$LAB/run/$1.pid" 2>/dev/null) && kill -0 "$pid" 2>/dev/null &&
    tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -q "$LAB"
}

# Several labs may be up at a time: the first of fifty ports in a row on which nobody listens.
free_port() {
  local base port
  for base in $(seq 27000 50 32000); do
    for port in $(seq "$base" $((base + 49))); do
      (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null && continue 2
    done
    echo "$base"
    return
  done
  echo "lab.sh up: no fifty free ports in a row between 27000 and 32050; SLURM_LAB_PORT=..." >&2
  exit 1
}

configure() { # N
  local i nodes=""
  for i in $(seq 0 $(($1 - 1))); do
    nodes+="NodeName=vn$i NodeHostname=$HOST NodeAddr=127.0.0.1 Port=$((PORT + 10 + i)) CPUs=$CPUS RealMemory=4000"$'\n'
  done
  cat >"$SLURM_CONF" <<CONF
ClusterName=lab
SlurmctldHost=$HOST(127.0.0.1)
SlurmctldPort=$PORT
SlurmdPort=$((PORT + 1))
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
AuthInfo=socket=$LAB/run/munge.sock
CredType=cred/munge
SlurmctldParameters=enable_configless
SlurmdParameters=config_overrides
StateSaveLocation=$LAB/state
SlurmdSpoolDir=$LAB/spool/%n
SlurmctldPidFile=$LAB/run/slurmctld.realpid
SlurmdPidFile=$LAB/run/slurmd-%n.realpid
SlurmctldLogFile=$LAB/log/slurmctld.log
SlurmdLogFile=$LAB/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=0,batch_sched_delay=0
JobRequeue=1
EnforcePartLimits=ALL
KillWait=5
MinJobAge=300
ReturnToService=2
${nodes}PartitionName=lab Nodes=vn[0-$(($1 - 1))] Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
CONF
  printf 'CgroupAutomount=no\nConstrainCores=no\nConstrainRAMSpace=no\n' >"$LAB/cgroup.conf"
}

up() {
  local i n=${1:-2}
  if alive slurmctld; then
    echo "already up" >&2
    echo "export SLURM_CONF=$SLURM_CONF"
    return
  fi
  if ! has slurmctld slurmd munged sbatch; then
    echo "lab.sh up: SLURM is not installed; lab.sh install" >&2
    exit 1
  fi
  PORT=${SLURM_LAB_PORT:-$(free_port)}
  rm -rf "$LAB"
  mkdir -p "$LAB"/{run,log,state,spool}
  configure "$n"
  dd if=/dev/urandom of="$LAB/munge.key" bs=128 count=1 status=none
  chmod 600 "$LAB/munge.key"
  spawn munged munged -F --force --key-file="$LAB/munge.key" \
    --socket="$LAB/run/munge.sock" --pid-file="$LAB/run/munged.realpid" --log-file="$LAB/log/munged.log" \
    --seed-file="$LAB/munge.seed"
  for i in $(seq 0 $((n - 1))); do
    mkdir -p "$LAB/spool/vn$i"
    echo "127.0.0.1 vn$i $MARK" >>/etc/hosts # rank 0 is found by its node's name
  done
  for _ in $(seq 100); do [ -S "$LAB/run/munge.sock" ] && break || sleep 0.05; done
  spawn slurmctld slurmctld -D -i -f "$SLURM_CONF"
  for i in $(seq 0 $((n - 1))); do spawn "slurmd-vn$i" slurmd -D -N "vn$i" -f "$SLURM_CONF"; done
  for _ in $(seq 200); do
    [ "$(sinfo -h -N -o '%t' 2>/dev/null | grep -c '^idle$')" = "$n" ] && break || sleep 0.1
  done
  sinfo -N >&2
  if [ "$(sinfo -h -N -o '%t' | grep -c '^idle$')" != "$n" ]; then
    echo "lab.sh up: not all nodes are idle; see $LAB/log" >&2
    exit 1
  fi
  echo "export SLURM_CONF=$SLURM_CONF"
}

down() {
  local file name others
  [ -d "$LAB/run" ] || return 0
  if alive slurmctld; then
    scancel --full --user="$(id -un)" 2>/dev/null || true
    for _ in $(seq 100); do [ -z "$(squeue -h 2>/dev/null)" ] && break || sleep 0.1; done
  fi
  for file in "$LAB"/run/slurmd-*.pid "$LAB"/run/slurmctld.pid "$LAB"/run/munged.pid; do
    name=$(basename "$file" .pid)
    if alive "$name"; then kill "$(cat "$file")"; fi
    for _ in $(seq 100); do alive "$name" && sleep 0.1 || break; done
  done
  if grep -q "$MARK\$" /etc/hosts 2>/dev/null; then
    others=$(grep -v "$MARK\$" /etc/hosts)
    printf '%s\n' "$others" >/etc/hosts # in place: in a container the file cannot be replaced
  fi
  rm -f "$LAB"/run/*.pid
}

export PATH=$PATH:/usr/sbin:/sbin
case ${1:-} in
  install) install ;;
  up) up "${2:-2}" ;;
  down) down ;;
  status) sinfo -N && squeue ;;
  *) sed -n '2,7s/^# //p' "$0" && exit 2 ;;
esac
