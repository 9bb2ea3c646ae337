#!/usr/bin/env bash
# A Slurm of this machine alone, to try the scripts: munge, slurmctld and slurmd from Debian's slurm-wlm, all in one folder, on ports
# that are free, without touching a Slurm that is installed here. Needs root, as slurmd does.
#
#     deploy/slurm/one-node.sh up DIR         then: export SLURM_CONF=DIR/slurm.conf
#     deploy/slurm/one-node.sh down DIR
set -euo pipefail

[ $# = 2 ] || { sed -n '2,6s/^# \{0,1\}//p' "$0" >&2; exit 2; }
verb=$1
mkdir -p "$2"
dir=$(cd "$2" && pwd)
export SLURM_CONF=$dir/slurm.conf PATH=$PATH:/usr/sbin:/sbin

# Sends what runs away, newest first, by the ids that it wrote itself.
down() {
    for name in slurmd slurmctld munged; do
        pid=$(cat "$dir/$name.pid" 2>/dev/null || true)
        if [ -z "$pid" ] || ! kill "$pid" 2>/dev/null; then continue; fi
        for _ in $(seq 100); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
        kill -9 "$pid" 2>/dev/null || true
    done
}

free_port() {
    python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'
}

up() {
    for tool in munged slurmctld slurmd python3; do
        command -v "$tool" >/dev/null || { echo "one-node.sh: no $tool; on Debian: apt-get install slurm-wlm python3" >&2; exit 1; }
    done
    local host ctld_port slurmd_port
    host=$(hostname -s) ctld_port=$(free_port) slurmd_port=$(free_port)
    mkdir -p "$dir/state" "$dir/spool" "$dir/munge"
    chmod 0700 "$dir/munge"
    head -c 1024 /dev/urandom > "$dir/munge/key"
    chmod 0600 "$dir/munge/key"
    cat > "$SLURM_CONF" <<CONF
ClusterName=one
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$ctld_port
SlurmdPort=$slurmd_port
SlurmUser=root
MessageTimeout=100
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket,cred_expire=30
CryptoType=crypto/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
KillWait=30
MinJobAge=300
# More than there are, so that all of a small cluster fits on a laptop.
NodeName=$host NodeAddr=127.0.0.1 CPUs=16 State=UNKNOWN
PartitionName=all Nodes=$host Default=YES MaxTime=INFINITE State=UP
CONF
    munged --force --socket="$dir/munge.socket" --key-file="$dir/munge/key" --pid-file="$dir/munged.pid" \
        --log-file="$dir/munge/log" --seed-file="$dir/munge/seed"
    slurmctld -f "$SLURM_CONF"
    slurmd -f "$SLURM_CONF"
    for _ in $(seq 3000); do
        if sinfo -h -o %T 2>/dev/null | grep -q '^idle'; then
            echo "$SLURM_CONF"
            return
        fi
        sleep 0.1
    done
    echo "one-node.sh: the node is not idle within 30 s:" >&2
    tail -n 20 "$dir"/slurmctld.log "$dir"/slurmd.log >&2
    down
    exit 1
}

case $verb in
    up) up ;;
    down) down ;;
    *) echo "one-node.sh: $verb; expected up or down" >&2; exit 2 ;;
esac
