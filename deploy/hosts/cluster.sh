#!/usr/bin/env bash
# A cluster on plain hosts over ssh, up and down, without root and without anything installed there: the program is copied, each role is
# a process of the user who logs in. For hosts that stay a cluster use the units in deploy/systemd.
#
#     deploy/hosts/cluster.sh up HOSTS        copies, starts what does not run yet, prints the master's URL
#     deploy/hosts/cluster.sh down HOSTS      drains: workers first, then the ps, then the master
#     deploy/hosts/cluster.sh status HOSTS    one line a process
#
# HOSTS is a file: one process a line, `ROLE SSH-HOST ADDRESS`, where ADDRESS is what the others reach. The first line is the master:
#
#     master  head.lab   10.0.0.1:4700
#     ps      ps1.lab    10.0.0.2:4701
#     worker  gpu1.lab   cuda:0
#     worker  gpu1.lab   cuda:1
#
# A worker listens on nothing; it has its device there. Environment: EBB (program to copy, default: ebb on PATH), EBB_DIR (folder on the
# hosts, default ebbflow in the home), EBB_CERTS (folder of `ebb certs init --host ADDRESS ..`, whose files are copied to where each belongs;
# without it EBB_INSECURE=1 says that everybody in this network may do everything, docs/security.md), EBB_DATA (folder with the data on the
# workers' hosts), EBB_SSH (default: ssh, with its options).
set -euo pipefail

if [ $# -ne 2 ] || ! [ -r "$2" ]; then
    sed -n '2,19s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
verb=$1
hosts=$2
ebb=${EBB:-$(command -v ebb || true)}
dir=${EBB_DIR:-ebbflow}
data=${EBB_DATA:-}
certs=${EBB_CERTS:-}
insecure=${EBB_INSECURE:-}
read -r -a ssh <<< "${EBB_SSH:-ssh}"

# NAME ROLE HOST ADDRESS of each process, in the file's order.
processes() {
    awk '!/^[ \t]*(#|$)/ { count[$1]++; print $1 "-" count[$1], $1, $2, $3 }' "$hosts"
}

# Runs a script there; its arguments arrive as they are.
on() {
    local host=$1
    shift
    "${ssh[@]}" "$host" "bash -s -- $(printf '%q ' "$@")"
}

# What a role needs of EBB_CERTS, for its owner alone; never ca.key.
copy_keys() {
    local host=$1 role=$2 files
    files=(ca.pem "$role.pem" "$role.key" "$role.token")
    [ "$role" = worker ] || files+=(tokens.toml)
    tar -C "$certs" -c "${files[@]}" | "${ssh[@]}" "$host" "umask 077 && mkdir -p $dir/keys && tar -C $dir/keys -x"
}

up() {
    [ -x "$ebb" ] || { echo "cluster.sh: no program; say with EBB which \`ebb\` to copy" >&2; exit 1; }
    local master host name role address args scheme=http keys=()
    if [ -n "$certs" ]; then
        scheme=https
    elif [ "$insecure" != 1 ]; then
        echo "cluster.sh: no EBB_CERTS; make them with \`ebb certs init\`, or say EBB_INSECURE=1 where you trust the network" >&2
        exit 1
    fi
    master=$scheme://$(processes | awk '$2 == "master" { print $4; exit }')
    for host in $(processes | awk '{ print $3 }' | sort -u); do
        # A program that runs cannot be written to, but it can be replaced.
        "${ssh[@]}" "$host" "mkdir -p $dir && cat > $dir/ebb.new && chmod +x $dir/ebb.new && mv $dir/ebb.new $dir/ebb" < "$ebb"
    done
    while read -r -u 3 name role host address; do
        keys=()
        if [ -n "$certs" ]; then
            copy_keys "$host" "$role"
            keys=(--tls-ca keys/ca.pem --tls-cert "keys/$role.pem" --tls-key "keys/$role.key" --token-file "keys/$role.token")
            case $role in master | ps) keys+=(--tokens keys/tokens.toml) ;; esac
        elif [ "$role" != worker ]; then
            keys=(--insecure)
        fi
        case $role in
            master) args=(master --listen "$address" --data-dir data "${keys[@]}") ;;
            ps) args=(ps --master "$master" --name "$name" --listen "$address" --advertise "$scheme://$address" "${keys[@]}") ;;
            worker)
                args=(worker --master "$master" --name "$name" --device "$address" ${data:+--data-root "$data"} "${keys[@]}")
                ;;
            *) echo "cluster.sh: $hosts: role $role; expected master, ps or worker" >&2; exit 1 ;;
        esac
        on "$host" "$dir" "$name" "${args[@]}" <<'THERE'
cd "$1"; name=$2; shift 2
if [ -e "$name.pid" ] && kill -0 "$(cat "$name.pid")" 2>/dev/null; then echo "$name runs already"; exit; fi
setsid ./ebb "$@" >> "$name.log" 2>&1 < /dev/null &
echo $! > "$name.pid"
echo "$name started"
THERE
    done 3< <(processes)
    echo "EBB_MASTER=$master"
}

down() {
    local name role host address
    while read -r -u 3 name role host address; do
        on "$host" "$dir" "$name" <<'THERE'
cd "$1" 2>/dev/null || exit 0
pid=$(cat "$2.pid" 2>/dev/null) || exit 0
rm -f "$2.pid"
kill "$pid" 2>/dev/null || { echo "$2 had ended"; exit 0; }
for _ in $(seq 350); do kill -0 "$pid" 2>/dev/null || { echo "$2 stopped"; exit 0; }; sleep 0.1; done
kill -9 "$pid"
echo "$2 killed, it did not stop within 35 s"
THERE
    done 3< <(for role in worker ps master; do processes | awk -v role="$role" '$2 == role'; done)
}

status() {
    local name role host address
    while read -r -u 3 name role host address; do
        on "$host" "$dir" "$name" <<'THERE'
cd "$1" 2>/dev/null && kill -0 "$(cat "$2.pid" 2>/dev/null)" 2>/dev/null && echo "$2 runs" || echo "$2 does not run"
THERE
    done 3< <(processes)
}

case $verb in
    up) up ;;
    down) down ;;
    status) status ;;
    *) echo "cluster.sh: $verb; expected up, down or status" >&2; exit 2 ;;
esac
