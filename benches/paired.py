"""Two builds of `ebb` train in turn: is the second one as fast as the first?

    python benches/paired.py BEFORE AFTER MNIST_FOLDER FOLDER [--rounds N] [--only TEXT] [--micro N]

It needs PyTorch, for the modules alone. Every way of `end_to_end.py` is a pair of fleets that stay
up. A round is four windows of about 3 s: before, after, after, before. Each ratio compares the
windows of one round, so a change of the machine's speed cancels. The rows are in
FOLDER/paired.rows. With `--only` there are only ways whose name contains the text, such as `mlp: sync
over TCP`. In a network namespace of its own, whose loopback is limited, that one has a network. With
`--micro` a step has more records, and so takes as long as its exchange:

    unshare -n sh -c 'ip link set lo up && tc qdisc add dev lo root tbf rate 5gbit burst 1m latency 50ms &&
    python benches/paired.py BEFORE AFTER MNIST_FOLDER FOLDER --only "over TCP" --micro 256'
"""

import argparse
import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

from end_to_end import BATCH, NETWORKS, PEERS, WARMUP, WORKERS, Ours, job_of
from report import row


def measure(network, way, builds, data, folder, rounds, micro):
    """The rows of one way: the ratio of the rates in steady state, and from submission to end."""
    name = f"{network}: {way.name}"
    with contextlib.ExitStack() as stack:
        fleets = [Ours(stack, ebb, folder / f"{name}-{which}", way) for which, ebb in enumerate(builds)]
        job = lambda which, steps: fleets[which].rates(job_of(network, way.mode, steps, data, folder, micro))
        # The first job of a fleet finds memory that it has never touched.
        rate = min(job(which, 4 * WARMUP)[0] for which in (0, 1))
        steps = WARMUP + math.ceil(3 * rate / (WORKERS * micro))
        steady, whole = [], []
        for number in range(1, rounds + 1):
            seen = [job(which, steps) for which in (0, 1, 1, 0)]
            for ratios, at in ((steady, 0), (whole, 1)):
                rates = [window[at] for window in seen]
                ratios.append((rates[1] + rates[2]) / (rates[0] + rates[3]))
            rates = ", ".join(f"{window[0]:.0f}" for window in seen)
            print(f"{name}, round {number} of {rounds}: {rates} samples/s: {steady[-1]:.3f}", file=sys.stderr)
    yield row(f"{name}, after over before", "ratio", steady, 1.0)
    yield row(f"{name}, after over before, submission to end", "ratio", whole, 1.0)


def main():
    parser = argparse.ArgumentParser()
    for name in ("before", "after", "mnist", "folder"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="")
    parser.add_argument("--micro", type=int, default=BATCH)
    args = parser.parse_args()
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    folder = args.folder.resolve() / "paired"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    subprocess.run([sys.executable, PEERS / "torch_common.py", folder], check=True)
    builds, data = [args.before.resolve(), args.after.resolve()], args.mnist.resolve()
    with open(args.folder / "paired.rows", "w") as rows:
        for network, ways in NETWORKS.items():
            for way in ways:
                # A build before the classes of numerics has no such flag.
                if not way.arguments and args.only in f"{network}: {way.name}":
                    for figure in measure(network, way, builds, data, folder, args.rounds, args.micro):
                        print(json.dumps(figure), file=rows, flush=True)
                        low, high = min(figure["samples"]), max(figure["samples"])
                        print(f"{figure['name']}: {figure['value']:.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
