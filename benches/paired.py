"""Two builds of `ebb` train in turn: is the second one as fast as the first?

    python benches/paired.py BEFORE AFTER MNIST_FOLDER FOLDER [--rounds N]

It needs PyTorch, for the modules alone. Every way of `end_to_end.py` is a pair of fleets that stay
up. A round is four windows of about 3 s: before, after, after, before. Each ratio compares the
windows of one round, so a change of the machine's speed cancels. The rows are in
FOLDER/paired.rows.
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

from end_to_end import NETWORKS, PEERS, PER_STEP, WARMUP, Ours, job_of
from report import row


def measure(network, way, builds, data, folder, rounds):
    """The rows of one way: the ratio of the rates in steady state, and from submission to end."""
    name = f"{network}: {way.name}"
    with contextlib.ExitStack() as stack:
        fleets = [Ours(stack, ebb, folder / f"{name}-{which}", way) for which, ebb in enumerate(builds)]
        job = lambda which, steps: fleets[which].rates(job_of(network, way.mode, steps, data, folder))
        # The first job of a fleet finds memory that it has never touched.
        steps = WARMUP + math.ceil(3 * min(job(which, 4 * WARMUP)[0] for which in (0, 1)) / PER_STEP)
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
                if not way.arguments:
                    for figure in measure(network, way, builds, data, folder, args.rounds):
                        print(json.dumps(figure), file=rows, flush=True)
                        low, high = min(figure["samples"]), max(figure["samples"])
                        print(f"{figure['name']}: {figure['value']:.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
