#!/usr/bin/env bash
# Makes the files beside this script with an older program: make.sh EBB, as a user who may write to /data.
#
# journal.redb.gz, jobs/   the data folder of a master that was killed while job 2 trained; job 1 had ended
# checkpoints/             what an earlier run of the job `kept` had saved
# model.sha256             of job 1
# kept.sha256              of the model that the run of `kept` ended with
#
# They were made by commit 779673a (0.1.0, before its first release). The jobs' data is that of examples/digits, at /data, so that no
# path of a developer is in the journal; the test gives its workers another --data-root.
set -euo pipefail
ebb=$1
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
export EBB_MASTER=http://127.0.0.1:4790
mkdir -p /data
cp "$here"/../../../examples/digits/*.gz /data/
sed 's/"mlp"/"softmax"/; /^options/d; s/^epochs.*/epochs = 2/' "$here/../../../examples/digits/job.toml" > /data/job.toml

"$ebb" run --workers 1 --ps 2 --out "$work/out" --set name=kept --set epochs=40 --set checkpoint.url="$work/checkpoints" --set checkpoint.every_steps=100 --set checkpoint.keep=1 /data/job.toml

start() { "$ebb" "$@" >> "$work/log" 2>&1 & started+=($!); }
started=()
start master --listen 127.0.0.1:4790 --data-dir "$work/data"
until "$ebb" health "$EBB_MASTER" > /dev/null 2>&1; do sleep 0.1; done
start ps --listen 127.0.0.1:0 --name ps-0
start ps --listen 127.0.0.1:0 --name ps-1
start worker --name worker-0 --device cpu
"$ebb" submit --follow --out "$work/first" --set name=first /data/job.toml
"$ebb" submit --set name=second --set epochs=100000 /data/job.toml
until "$ebb" status --json second | grep -qE '"steps_done":[0-9]{3}'; do sleep 0.1; done
"$ebb" pause second
kill -9 "${started[@]}"

rm -rf "$here"/{jobs,checkpoints} "$here"/*.gz
gzip -9nc "$work/data/journal.redb" > "$here/journal.redb.gz"
cp "$work/data/starts" "$here/"
cp -r "$work/data/jobs" "$work/checkpoints" "$here/"
sha256sum "$work/first/model.safetensors" | cut -d' ' -f1 > "$here/model.sha256"
sha256sum "$work/out/model.safetensors" | cut -d' ' -f1 > "$here/kept.sha256"
rm -rf "$work" /data/{job.toml,*.gz}
