#!/usr/bin/env bash
# Makes the secrets of a cluster on Kubernetes from a folder of `ebb certs init`. Each role gets its own
# secret; no secret has ca.key. Run the script again after a file in the folder was replaced: pods see
# the new files within about a minute, and read them without a restart.
#
#     ebb certs init --dir certs --host=master --host=master-{0,1}.masters --host=ps-{0..7}.ps
#     deploy/kubernetes/secrets.sh certs
#
# The hosts are the service of one master, the two masters of overlays/ha, and the largest number of ps
# that the cluster will have. Environment: EBB_NAMESPACE, the namespace (default ebbflow).
set -euo pipefail

if [ $# -ne 1 ] || ! [ -r "$1/ca.pem" ]; then
    sed -n '2,10s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
certs=$1
namespace=${EBB_NAMESPACE:-ebbflow}

kubectl create namespace "$namespace" --dry-run=client --output yaml | kubectl apply --filename -
for role in master ps worker; do
    kubectl --namespace "$namespace" create secret generic "ebb-$role-keys" --dry-run=client --output yaml \
        --from-file=ca.pem="$certs/ca.pem" --from-file=cert.pem="$certs/$role.pem" --from-file=key.pem="$certs/$role.key" \
        --from-file=token="$certs/$role.token" --from-file=tokens.toml="$certs/tokens.toml" |
        kubectl apply --filename -
done
