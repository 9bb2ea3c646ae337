#!/usr/bin/env bash
# Makes a Debian base image from the distribution's packages alone, where no registry can be reached: debootstrap + docker import.
# Needs root and Debian's debootstrap. Takes minutes; does nothing when the image is there already.
#
#     deploy/docker/base.sh [IMAGE]        default: ebbflow-base:bookworm
set -euo pipefail

image=${1:-ebbflow-base:bookworm}
suite=bookworm

if docker image inspect "$image" >/dev/null 2>&1; then
    echo "$image is there"
    exit 0
fi
for tool in debootstrap docker; do
    command -v "$tool" >/dev/null || { echo "base.sh: no $tool; on Debian: apt-get install $tool" >&2; exit 1; }
done
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
debootstrap --variant=minbase "$suite" "$folder/root" >&2
# What only apt needs is a quarter of it.
rm -rf "$folder"/root/var/cache/apt/* "$folder"/root/var/lib/apt/lists/* "$folder"/root/usr/share/{doc,man,locale}/*
tar -C "$folder/root" -c . | docker import - "$image" >/dev/null
docker image inspect --format '{{.Size}}' "$image" | awk -v image="$image" '{ printf "%s: %.0f MB\n", image, $1 / 1e6 }'
