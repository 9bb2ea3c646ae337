"""Training loops in Python: a loop as a part of a job, beside the plain PyTorch loop that it was.

    python benches/python_rate.py FOLDER [--rounds N] [--network NAME ..] [--smoke] [--alone]

The Python that runs it has PyTorch, and Ebbflow as a release build. `ebb` is the program beside it.

- Alone: `ebbflow.join` with its ps in its own process, beside a plain loop with a fused optimizer. Both have
  one thread of PyTorch and the same cores (`benches/peers/loop.py`). `loader` is the convnet whose records
  take 2 ms each, in four processes of the `DataLoader`.
- Two processes: `ebb run SCRIPT --workers 2`, beside DistributedDataParallel over gloo with two, which has the
  same `DataLoader`. Each window starts its processes anew.

A round is four windows of about 3 s: plain, ours, ours, plain. Each ratio compares the windows of one round,
so a change of the machine's speed cancels. The rows are in FOLDER/python_rate.rows. With `--smoke` there is
one round of one network, with windows of a few steps, whose numbers mean nothing.
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

from end_to_end import PEERS, Peer, rate_of
from report import row

LOOP = PEERS / "loop.py"
WARMUP, SECONDS, PROCESSES = 15, 3, 2

# The target of a loop alone, and of two processes.
TARGETS = {"convnet": (0.97, 1.03), "resnet18": (0.97, None), "mlp": (0.95, 1.5), "loader": (0.97, None)}


class Loop(Peer):
    """A process whose window has as many steps as it is told."""

    def rates(self, steps):
        try:
            print(steps, file=self.process.stdin, flush=True)
            found = json.loads(self.process.stdout.readline())
            return found["samples_per_second"], found["first"]
        except (OSError, ValueError, KeyError) as error:
            raise RuntimeError(f"it says no rate; see {self.log}") from error


class Launched:
    """`ebb run` with two processes of a script: each window is a run of its own."""

    def __init__(self, network, folder):
        self.network, self.folder = network, folder
        self.ebb = Path(sys.executable).with_name("ebb")

    def rates(self, steps):
        out = self.folder / "out"
        script = ["run", LOOP, "--workers", PROCESSES, "--out", out, "--python", sys.executable]
        # A step of the job has a batch of each process.
        command = [self.ebb, *script, "--", "join", self.network, PROCESSES * steps]
        with open(self.folder / "run.log", "w") as log:
            ended = subprocess.run(list(map(str, command)), stdout=log, stderr=log)
        if ended.returncode != 0:
            raise RuntimeError(f"exit code {ended.returncode}; see {self.folder}/run.log")
        events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        shutil.rmtree(out)
        # The first event says nothing of a step: its rate counts from the start of the job.
        return rate_of(events, min(WARMUP, steps // 2)), rate_of(events, 1)


class Ddp:
    """Two processes of PyTorch: each window is a run of its own."""

    def __init__(self, network, folder):
        self.network, self.folder = network, folder

    def rates(self, steps):
        with open(self.folder / f"{self.network}-ddp.log", "w") as log:
            command = [sys.executable, LOOP, "ddp", self.network, str(steps)]
            ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, check=True)
        stamps = json.loads(ended.stdout)
        rate = lambda since: 64 * PROCESSES * (len(stamps) - 1 - since) / (stamps[-1] - stamps[since])
        return rate(min(WARMUP, steps // 2)), rate(1)


def ratios(name, ours, theirs, steps, rounds):
    """Ratios of the rates in steady state, and from the first step on: one for each round."""
    steady, whole = [], []
    for number in range(1, rounds + 1):
        seen = [each.rates(steps) for each in (theirs, ours, ours, theirs)]
        for found, at in ((steady, 0), (whole, 1)):
            rates = [window[at] for window in seen]
            found.append((rates[1] + rates[2]) / (rates[0] + rates[3]))
        shown = ", ".join(f"{window[0]:.0f}" for window in seen)
        print(f"{name}, round {number} of {rounds}: {shown} samples/s: {steady[-1]:.3f}", file=sys.stderr)
    return steady, whole


def alone(stack, network, folder, rounds, smoke):
    """Rows of one process."""
    who = lambda name: Loop(stack, folder / f"{network}-{name}.log", sys.executable, LOOP, name, network)
    theirs, ours = who("plain"), who("join")
    # The first windows find memory that nobody has touched.
    rate = min(each.rates(2 * WARMUP if not smoke else 6)[0] for each in (theirs, ours))
    batch = 32 if network == "resnet18" else 64
    steps = 6 if smoke else WARMUP + math.ceil(SECONDS * rate / batch)
    steady, whole = ratios(network, ours, theirs, steps, rounds)
    target = TARGETS.get(network, (None, None))[0]
    yield row(f"{network}: a loop of a job, over the plain loop", "ratio", steady, 1.0, target)
    name = f"{network}: a loop of a job, over the plain loop, from the first step"
    yield row(name, "ratio", whole, 1.0, target)


def together(stack, network, folder, rounds, smoke):
    """Rows of two processes."""
    theirs, ours = Ddp(network, folder), Launched(network, folder)
    rate = 64 if smoke else theirs.rates(2 * WARMUP)[0]
    steps = 8 if smoke else WARMUP + math.ceil(SECONDS * rate / 64 / PROCESSES)
    steady, whole = ratios(f"{network}, two processes", ours, theirs, steps, rounds)
    target = TARGETS.get(network, (None, None))[1]
    yield row(f"{network}: two processes of `ebb run`, over DDP", "ratio", steady, 1.0, target)
    name = f"{network}: two processes of `ebb run`, over DDP, from the second step"
    yield row(name, "ratio", whole, 1.0, target)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--network", action="append", choices=TARGETS)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--alone", action="store_true", help="leave out what has two processes")
    args = parser.parse_args()
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    os.environ.pop("EBBFLOW_MASTER", None)
    folder = args.folder.resolve() / "python_rate"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rounds = 1 if args.smoke else args.rounds
    with open(args.folder / "python_rate.rows", "w") as rows:
        for network in ["convnet"] if args.smoke else args.network or TARGETS:
            for way in (alone, together):
                if way is together and (args.alone or TARGETS[network][1] is None):
                    continue
                # Processes of one way end before the next one begins.
                with contextlib.ExitStack() as stack:
                    for figure in way(stack, network, folder, rounds, args.smoke):
                        print(json.dumps(figure), file=rows, flush=True)
                        low, high = min(figure["samples"]), max(figure["samples"])
                        print(f"{figure['name']}: {figure['value']:.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
