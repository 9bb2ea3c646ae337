"""Training of two networks on one device, beside plain PyTorch loops there.

    python benches/gpu.py EBB FOLDER [--device cpu] [--small] [--quick] [--only WORD]

It appends its rows to FOLDER/gpu.rows, and prints the name, the value and the unit of each with tabs between them, for
`cargo xtask gpu`. The Python that runs it has PyTorch and Pillow. EBB has libtorch with CUDA.

The limit is a plain loop with the model, the batch, the precision and the deterministic algorithms of ours
(`benches/peers/device.py`), whose records lie on the device already. `ebb run` trains with one worker and one ps, both
on the device. Systems take turns in windows of about 3 s, with a window of the plain loop before and after each other
one. Each ratio compares adjacent windows. Start-up time is excluded.

`--small` has networks for processors. `--quick` has one round. `--only` chooses networks, `sharing` and `files`.
"""

import argparse
import collections
import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

from end_to_end import PEERS, WARMUP, Ours, Peer, rate_of, way
from report import number, row

sys.path.insert(0, str(PEERS))
from device import CLASSES_OF_FILES, MEAN, STD, NETWORKS

PROGRAM = PEERS / "device.py"
ROUNDS = 3

# The modes, with their targets: the rate over that of the plain loop.
WAYS = [way("sync", 0.93, embedded=True), way("pipelined", 0.98, mode="pipelined", embedded=True)]

JOB = """
name = "{name}"
epochs = {epochs}
seed = 7
[model]
script = "{folder}/{network}.pt"
{autocast}
[data]
{data}
[batch]
micro = {batch}
effective = {effective}
[optimizer]
{optimizer}
[consistency]
mode = "{mode}"
[fleet]
workers = {{ min = {workers}, max = {workers} }}
"""

# By the name of the records: where they are, and what is done with them.
DATA = {
    "resnet50": """format = "npy"
train = {{ features = ["{folder}/images.npy"], labels = ["{folder}/labels.npy"] }}
normalize = {{ scale = 255, mean = {mean}, std = {std} }}""",
    "gpt2": """format = "tokens"
tokens = {{ dtype = "u16", block = {length} }}
dtypes = {{ tokens = "i64" }}
train = {{ files = ["{folder}/tokens.bin"] }}""",
    "files": """format = "images"
train = {{ files = ["{folder}/files"] }}
inputs = ["image"]
label = "class"
[data.transforms]
image = [
    {{ op = "decode" }},
    {{ op = "random_resized_crop", size = {side} }},
    {{ op = "horizontal_flip" }},
    {{ op = "normalize", mean = {mean}, std = {std} }},
]""",
}
OPTIMIZERS = {
    "resnet50": 'kind = "momentum"\nmomentum = 0.9\nlearning_rate = 0.01',
    "gpt2": 'kind = "adamw"\nweight_decay = 0.1\nlearning_rate = 3e-4',
}


def job_of(name, steps, folder, small=False, mode="pipelined", workers=1, data=None):
    """A job of at least so many steps."""
    network = NETWORKS[name](small)
    per_step = workers * network.batch
    files = DATA[data or name].format(
        folder=folder,
        mean=MEAN,
        std=STD,
        side=getattr(network, "side", None),
        length=network.shape[1] if name == "gpt2" else None,
    )
    return JOB.format(
        name=name,
        epochs=math.ceil(steps / (network.records // per_step)),
        folder=folder,
        network=name,
        # Processors take long to convert, and the networks are small.
        autocast="" if small else 'autocast = "bf16"',
        data=files,
        batch=network.batch,
        effective=per_step,
        optimizer=OPTIMIZERS[name],
        mode=mode,
        workers=workers,
    )


class Bench:
    """What all measurements share."""

    def __init__(self, args, folder):
        self.args, self.folder, self.figures = args, folder, []
        self.rounds = 1 if args.quick else ROUNDS

    def peer(self, stack, what, network, number=0):
        more = ["--device", self.args.device, "--seconds", self.args.seconds]
        command = [sys.executable, PROGRAM, what, network, self.folder, *more]
        return Peer(stack, self.folder / f"{network}-{what}-{number}.log", *command, *self.small())

    def small(self):
        return ["--small"] if self.args.small else []

    def ours(self, stack, name, way, workers=1):
        return Ours(stack, self.args.ebb, self.folder / name, way, workers, self.args.device)

    def steps(self, name, rate, workers=1):
        """Steps of a window, whose first ones do not count."""
        return WARMUP + max(4, math.ceil(self.args.seconds * rate / NETWORKS[name](self.args.small).batch / workers))

    def row(self, name, unit, samples, peer=None, target=None):
        figure = row(name, unit, samples, peer, target)
        self.figures.append(figure)
        print(f"{name}\t{number(figure['value'], unit)}\t{unit}", flush=True)
        if target is not None:
            print(f"{name}, target\t{number(target, unit)}\t{unit}", flush=True)

    def network(self, name):
        """A loop that is free, and our modes, each between two windows of the plain loop."""
        with contextlib.ExitStack() as stack:
            plain, free = (self.peer(stack, what, name) for what in ("plain", "free"))
            rate, _ = plain.rate(), free.rate()
            windows = {"free loop": free.rate}
            for way in WAYS:
                ours = self.ours(stack, f"{name}-{way.name}", way)
                job = job_of(name, self.steps(name, rate), self.folder, self.args.small, way.mode)
                windows[way.name] = lambda ours=ours, job=job: ours.rates(job)[0]
            rates, ratios, plains = collections.defaultdict(list), collections.defaultdict(list), [plain.rate()]
            for number in range(1, self.rounds + 1):
                for which, window in windows.items():
                    rates[which].append(window())
                    plains.append(plain.rate())
                    ratios[which].append(rates[which][-1] / ((plains[-2] + plains[-1]) / 2))
                    beside = f"plain loop {plains[-2]:.1f} and {plains[-1]:.1f} samples/s"
                    told = f"{name}, round {number} of {self.rounds}: {which} {rates[which][-1]:.1f}, {beside}"
                    print(told, file=sys.stderr)
        self.row(f"{name}: plain loop", "samples/s", plains)
        targets = {way.name: way.of_silent for way in WAYS}
        for which in windows:
            self.row(f"{name}: {which}", "samples/s", rates[which], self.figures[-1]["value"])
            self.row(f"{name}: {which}, of the plain loop", "ratio", ratios[which], 1.0, targets.get(which))

    def sharing(self, name):
        """Two workers of a job share the device, beside two plain loops that share it."""
        pipelined = WAYS[1]
        with contextlib.ExitStack() as stack:
            pair = [self.peer(stack, "plain", name, number) for number in (1, 2)]

            def together():
                for peer in pair:
                    peer.ask()
                return sum(peer.answer() for peer in pair)

            together()
            ours, rate = self.ours(stack, f"{name}-sharing", pipelined, workers=2), together()
            steps = self.steps(name, rate, workers=2)
            job = job_of(name, steps, self.folder, self.args.small, pipelined.mode, workers=2)
            rates, ratios, pairs = [], [], [rate]
            for _ in range(self.rounds):
                rates.append(ours.rates(job)[0])
                pairs.append(together())
                ratios.append(rates[-1] / ((pairs[-2] + pairs[-1]) / 2))
        self.row(f"{name}: two plain loops on the device", "samples/s", pairs)
        self.row(f"{name}: two workers on the device", "samples/s", rates)
        self.row(f"{name}: two workers, of two plain loops", "ratio", ratios, 1.0, pipelined.of_silent)

    def files(self):
        """Records in memory, and the same number of JPEG files."""
        name, pipelined = "resnet50", WAYS[1]
        with contextlib.ExitStack() as stack:
            ours = self.ours(stack, "files", pipelined)

            def window(data, steps):
                job = job_of(name, steps, self.folder, self.args.small, pipelined.mode, data=data)
                events, summary = ours.train(job)
                return rate_of(events, WARMUP), summary["data_wait"]

            steps = self.steps(name, window(name, 2 * WARMUP)[0])
            seen = [(window(name, steps), window("files", steps)) for _ in range(self.rounds)]
        in_memory, of_files = ([pair[at] for pair in seen] for at in (0, 1))
        self.row("resnet50: records in memory", "samples/s", [rate for rate, _ in in_memory])
        self.row("resnet50: JPEG files", "samples/s", [rate for rate, _ in of_files])
        ratios = [files[0] / memory[0] for memory, files in seen]
        self.row("resnet50: JPEG files, of records in memory", "ratio", ratios, 1.0)
        self.row("resnet50: share of time that waits for records in memory", "ratio", [wait for _, wait in in_memory])
        self.row("resnet50: share of time that waits for JPEG files", "ratio", [wait for _, wait in of_files])


def main():
    parser = argparse.ArgumentParser()
    for name in ("ebb", "folder"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seconds", type=float, default=3)
    for flag in ("--small", "--quick"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--only", action="append", choices=[*NETWORKS, "sharing", "files"])
    args = parser.parse_args()
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    args.ebb = args.ebb.resolve()
    folder = args.folder.resolve() / "gpu"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    bench = Bench(args, folder)
    subprocess.run([sys.executable, PROGRAM, "write", "all", folder, *bench.small()], check=True)
    chosen = args.only or [*NETWORKS, "sharing", "files"]
    for name in NETWORKS:
        if name in chosen:
            bench.network(name)
    if "sharing" in chosen:
        bench.sharing("resnet50")
    if "files" in chosen:
        bench.files()
    with open(args.folder / "gpu.rows", "a") as rows:
        rows.writelines(json.dumps(figure) + "\n" for figure in bench.figures)


if __name__ == "__main__":
    main()
