#!/usr/bin/env bash
# Builds one image from binaries of this machine: nothing is compiled, nothing is downloaded.
#
#     deploy/docker/build.sh TARGET BINARY [LIBTORCH]
#
# TARGET is control, worker or worker-cuda, BINARY an `ebb` that runs on the base (control: built with --no-default-features),
# LIBTORCH the one that it was linked with (`.libtorch`, with the CUDA half for worker-cuda). Environment: BASE (image to start from, default
# ebbflow-base:bookworm, which base.sh makes), TAG (default ebbflow-TARGET:latest).
set -euo pipefail

if [ $# -lt 2 ]; then
    sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
target=$1 binary=$2 libtorch=${3:-}
base=${BASE:-ebbflow-base:bookworm}
tag=${TAG:-ebbflow-$target:latest}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

context=$(mktemp -d)
trap 'rm -rf "$context"' EXIT
mkdir "$context/host"
# The names of functions stay for backtraces, their line numbers do not.
strip --strip-debug -o "$context/host/ebb" "$binary" 2>/dev/null || cp "$binary" "$context/host/ebb"
chmod 0755 "$context/host/ebb"
if [ -e /etc/ssl/certs/ca-certificates.crt ]; then cp /etc/ssl/certs/ca-certificates.crt "$context/host/"; fi
if [ -n "$libtorch" ]; then
    torch=$(realpath "$libtorch")
    mkdir -p "$context/host/libtorch/torch"
    cp -a "$torch/lib" "$context/host/libtorch/torch/"
    if [ -e "$torch/cuda" ]; then
        cp -a "$torch/cuda" "$context/host/libtorch/torch/"
        cp -a "$torch/../cuda" "$torch/../nvidia" "$context/host/libtorch/"
    fi
fi
docker build --quiet --file "$here/Dockerfile" --target "$target" --tag "$tag" \
    --build-arg "BASE=$base" --build-arg "BUILDER=$base" "$context" >/dev/null
# The stage that held the binary, which nothing needs any more.
docker image prune --force --filter label=ebbflow.stage=build >/dev/null
docker image inspect --format '{{.Size}}' "$tag" | awk -v tag="$tag" '{ printf "%s: %.0f MB\n", tag, $1 / 1e6 }'
