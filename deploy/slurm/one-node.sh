#!/usr/bin/env bash
# A Slurm of this machine alone, to try the scripts: munge, slurmctld and slurmd from Debian's slurm-wlm, all in one folder, on ports
# that are free, without touching a Slurm that is installed here. Needs root, as slurmd does.
#
#     deploy/slurm/one-node.sh up DIR         then: export SLURM_CONF=DIR/slurm.conf
#     deploy/slurm/one-node.sh up DIR 2       with two nodes of this machine, node0 and node1
#     deploy/slurm/one-node.sh down DIR
set -euo pipefail

[ $# = 2 ] || [ $# = 3 ] || { sed -n '2,7s/^# \{0,1\}//p' "$0" >&2; exit 2; }
verb=$1 nodes=${3:-1}
mkdir -p "$2"
dir=$(cd "$2" && pwd)
export SLURM_CONF=$dir/slurm.conf PATH=$PATH:/usr/sbin:/sbin

# Sends what runs away, newest first, by the ids that it wrote itself.
down() {
    for file in "$dir"/slurmd.*.pid "$dir/slurmctld.pid" "$dir/munged.pid"; do
        pid=$(cat "$file" 2>/dev/null || true)
        if [ -z "$pid" ] || ! kill "$pid" 2>/dev/null; then continue; fi
        for _ in $(seq 100); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
        kill -9 "$pid" 2>/dev/null || true
    done
}

# A port that the system gives to nobody who asks for any port: a daemon takes it some seconds later.
free_port() {
    python3 - <<'PYTHON'
import random, socket
low, high = map(int, open("/proc/sys/net/ipv4/ip_local_port_range").read().split())
ports = [port for port in range(10000, 1 << 16) if not low <= port <= high] or range(low, high + 1)
while True:
    port = random.choice(ports)
    try:
        socket.socket().bind(("", port))
    except OSError:
        continue
    print(port)
    break
PYTHON
}

up() {
    for tool in munged slurmctld slurmd python3; do
        command -v "$tool" >/dev/null || { echo "one-node.sh: no $tool; on Debian: apt-get install slurm-wlm python3" >&2; exit 1; }
    done
    local host ctld_port node list=node0
    host=$(hostname -s) ctld_port=$(free_port)
    [ "$nodes" = 1 ] || list="node[0-$((nodes - 1))]"
    mkdir -p "$dir/state" "$dir/spool" "$dir/munge"
    chmod 0700 "$dir/munge"
    head -c 1024 /dev/urandom > "$dir/munge/key"
    chmod 0600 "$dir/munge/key"
    cat > "$SLURM_CONF" <<CONF
ClusterName=one
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$ctld_port
SlurmUser=root
MessageTimeout=100
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket,cred_expire=30
CryptoType=crypto/munge
StateSaveLocation=$dir/state
SlurmdSpoolDir=$dir/spool/%n
SlurmctldPidFile=$dir/slurmctld.pid
SlurmdPidFile=$dir/slurmd.%n.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdLogFile=$dir/slurmd.%n.log
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
PartitionName=all Nodes=$list Default=YES MaxTime=INFINITE State=UP
CONF
    for node in $(seq 0 $((nodes - 1))); do
        # More processors than there are, so that all of a small cluster fits on a laptop.
        echo "NodeName=node$node NodeHostname=$host NodeAddr=127.0.0.1 Port=$(free_port) CPUs=16 State=UNKNOWN" >> "$SLURM_CONF"
        mkdir -p "$dir/spool/node$node"
    done
    munged --force --socket="$dir/munge.socket" --key-file="$dir/munge/key" --pid-file="$dir/munged.pid" \
        --log-file="$dir/munge/log" --seed-file="$dir/munge/seed"
    slurmctld -f "$SLURM_CONF"
    for node in $(seq 0 $((nodes - 1))); do slurmd -f "$SLURM_CONF" -N "node$node"; done
    for _ in $(seq 3000); do
        if [ "$(sinfo -h -N -o %T 2>/dev/null | grep -c '^idle')" = "$nodes" ]; then
            echo "$SLURM_CONF"
            return
        fi
        sleep 0.1
    done
    echo "one-node.sh: the nodes are not idle within 300 s:" >&2
    tail -n 20 "$dir"/slurmctld.log "$dir"/slurmd.*.log >&2
    down
    exit 1
}

case $verb in
    up) up ;;
    down) down ;;
    *) echo "one-node.sh: $verb; expected up or down" >&2; exit 2 ;;
esac
