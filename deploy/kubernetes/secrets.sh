#!/usr/bin/env bash
# The secrets of a cluster on Kubernetes from a folder of `ebb certs init`: each role its own, and ca.key in none. Say it again after files
# there were replaced; pods see the new ones within about a minute, and read them by themselves.
#
#     ebb certs init --dir certs --host=master --host=master-{0,1}.masters --host=ps-{0..7}.ps
#     deploy/kubernetes/secrets.sh certs
#
# The names are those of the service of one master, of the two of overlays/ha, and of as many ps as there may ever be. Environment:
# EBB_NAMESPACE (default ebbflow).
set -euo pipefail

if [ $# -ne 1 ] || ! [ -r "$1/ca.pem" ]; then
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
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
