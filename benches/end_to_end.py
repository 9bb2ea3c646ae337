"""Whole trainings of two networks on MNIST by two workers of one thread, beside peers that do so too.

    python benches/end_to_end.py EBB MNIST_FOLDER FOLDER [--quick] [--tensorflow PYTHON]

It appends its rows to FOLDER/end_to_end.rows. The Python that runs it has PyTorch, and runs the
peers. Without `--tensorflow` there are no rows of TensorFlow.

The limit is the *silent pair*: two PyTorch processes that train a network each and never talk.
Ebbflow adds the exchange to that, and makes one update where they make two. Systems take turns in
windows of about 3 s, with one window of the silent pair before and after each two others. Each
ratio compares adjacent windows, so a change of the machine's speed cancels. Start-up time is
excluded: peers stay up, and the first steps of a job do not count. Beside each rate of ours stands
the rate from the submission to the end of the job.
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

from report import row

PEERS = Path(__file__).resolve().parent / "peers"
BATCH, WORKERS, ROUNDS = 64, 2, 5
PER_STEP = WORKERS * BATCH
# Steps of a job that do not count.
WARMUP = 15
# A whole number of steps; MNIST's test set has 10,000.
RECORDS = 9984

# How Ebbflow trains: the name of the row, the mode, whether in one process, variables of ps and
# workers, arguments of workers, and the targets: the rate over that of the silent pair, and of DDP.
Way = collections.namedtuple("Way", "name mode embedded environment arguments of_silent of_ddp")


def way(name, of_silent, of_ddp=None, mode="sync", embedded=False, environment={}, arguments=()):
    return Way(name, mode, embedded, environment, arguments, of_silent, of_ddp)


# Its workers agree with those of other processors. The price of that has a row, and no target.
PORTABLE = way("sync, portable", None, arguments=["--numerics", "portable"])
NETWORKS = {
    "convnet": [
        way("sync", 0.95, 1.1),
        way("pipelined", 0.98, mode="pipelined"),
        way("embedded", 0.98, embedded=True),
        PORTABLE,
    ],
    "mlp": [
        way("sync", 0.85, 1.25),
        way("sync over TCP", 0.75, 1.1, environment={"EBB_SOCKETS": "tcp"}),
        way("embedded", 0.9, embedded=True),
        way("pipelined", 0.95, mode="pipelined"),
        PORTABLE,
    ],
}

JOB = """
name = "{network}"
epochs = {epochs}
seed = 7
[model]
script = "{script}"
[data]
format = "idx"
shape = [1, 28, 28]
normalize = {{ scale = 255, mean = 0.1307, std = 0.3081 }}
[data.train]
features = ["{data}/t10k-images-idx3-ubyte.gz"]
labels = ["{data}/t10k-labels-idx1-ubyte.gz"]
records = [0, {records}]
[batch]
micro = {micro}
effective = {effective}
[optimizer]
kind = "momentum"
learning_rate = 0.01
[consistency]
mode = "{mode}"
[fleet]
workers = {{ min = 2, max = 2 }}
"""


def job_of(network, mode, steps, data, scripts, micro=BATCH):
    """A job of at least so many steps.

    >>> job = lambda steps: job_of("mlp", "sync", steps, "/data", Path("/scripts")).splitlines()
    >>> [line for steps in (40, 100) for line in job(steps) if line.startswith(("epochs", "records"))]
    ['epochs = 1', 'records = [0, 5120]', 'epochs = 2', 'records = [0, 9984]']
    """
    per_step = WORKERS * micro
    per_epoch = min(steps, RECORDS // per_step)
    return JOB.format(
        network=network,
        mode=mode,
        epochs=math.ceil(steps / per_epoch),
        records=per_epoch * per_step,
        script=scripts / f"{network}.pt",
        data=data,
        micro=micro,
        effective=per_step,
    )


def rate_of(events, warmup):
    """Samples a second of all steps from number `warmup` on.

    An event has the records of its step and the rate since the event before: their quotient is the
    time of the step.

    >>> train = lambda rate: {"event": "train", "samples": 128, "samples_per_second": rate}
    >>> rate_of([{"event": "fleet"}, train(1.0), train(64.0), train(32.0)], 1) == 256 / 6
    True
    """
    train = [event for event in events if event["event"] == "train"][warmup:]
    seconds = sum(event["samples"] / event["samples_per_second"] for event in train)
    return sum(event["samples"] for event in train) / seconds


def start(command, log, **settings):
    with open(log, "w") as stderr:
        return subprocess.Popen(list(map(str, command)), stderr=stderr, **settings)


class Peer:
    """A process that measures a window for each line that it reads (`benches/peers/common.py`)."""

    def __init__(self, stack, log, *command):
        self.log, pipes = log, dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.process = start(command, log, **pipes)
        stack.callback(self.end)

    def rate(self):
        self.ask()
        return self.answer()

    def ask(self):
        with contextlib.suppress(OSError):
            print(file=self.process.stdin, flush=True)

    def answer(self):
        try:
            return json.loads(self.process.stdout.readline())["samples_per_second"]
        except (OSError, ValueError, KeyError) as error:
            raise RuntimeError(f"it says no rate; see {self.log}") from error

    def end(self):
        # It ends, with its own children, when its input does.
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        self.process.wait()


class Ours:
    """Ebbflow in one of its ways: a fleet that stays up, or one process for each job."""

    def __init__(self, stack, ebb, folder, way, workers=WORKERS, device="cpu"):
        self.ebb, self.way, self.stack, self.folder = ebb, way, stack, folder
        self.workers, self.device = workers, device
        self.environment = {name: value for name, value in os.environ.items() if name != "EBB_MASTER"} | {"EBB_LOG": "warn"}
        folder.mkdir()
        if not way.embedded:
            self.url = self.role("master", "--data-dir", folder / "data")
            self.role("ps", "--master", self.url)
            for number in range(workers):
                arguments = ["--master", self.url, "--device", device, *way.arguments]
                self.spawn(f"worker-{number}", ["worker", *arguments], stdout=subprocess.DEVNULL)

    def spawn(self, name, arguments, **settings):
        environment = self.environment | (self.way.environment if name != "master" else {})
        process = start([self.ebb, *arguments], self.folder / f"{name}.log", env=environment, **settings)
        self.stack.callback(process.wait)
        self.stack.callback(process.kill)
        return process

    def role(self, name, *arguments):
        """Starts a role; the URL that it listens on."""
        arguments = [name, "--listen", "127.0.0.1:0", *arguments]
        process = self.spawn(name, arguments, stdout=subprocess.PIPE, text=True)
        for line in process.stdout:
            if "listening on " in line:
                return line.partition("listening on ")[2].strip()
        raise RuntimeError(f"the {name} does not say where it listens; see {self.folder}/{name}.log")

    def rates(self, job):
        """The steady rate of a job, and that from its submission to its end."""
        events, summary = self.train(job)
        return rate_of(events, WARMUP), summary["samples_applied"] / summary["wall_seconds"]

    def train(self, job):
        """The events of a job, and its summary."""
        file, out, log = (self.folder / name for name in ("job.toml", "out", "job.log"))
        file.write_text(job)
        one = ["run", "--workers", self.workers, "--ps", 1, "--device", self.device]
        # In one process the model stays where it is trained.
        one += [] if self.device == "cpu" else ["--ps-device", self.device]
        many = [] if self.way.embedded else ["submit", "--master", self.url, "--follow"]
        command = [self.ebb, *(many or one), file, "--out", out]
        code = start(command, log, env=self.environment, stdout=subprocess.DEVNULL).wait()
        if code != 0:
            raise RuntimeError(f"{self.way.name}: exit code {code}; see {log}")
        events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        summary = json.loads((out / "summary.json").read_text())
        # A file that is gone before it was written to the disk cannot disturb the next window.
        shutil.rmtree(out)
        shutil.rmtree(self.folder / "data/jobs", ignore_errors=True)
        return events, summary


def measure(stack, network, args, folder):
    """The rows of a network. All systems that train it stay up, and one works at a time."""
    data, ways = args.mnist.resolve(), NETWORKS[network]
    pair = lambda who: Peer(stack, folder / f"{network}-{who}.log", sys.executable, PEERS / "pair.py", who, network, data)
    silent, windows = pair("silent"), {"PyTorch DDP": pair("ddp").rate}
    if args.tensorflow:
        log = folder / f"{network}-tensorflow.log"
        windows["TensorFlow ps"] = Peer(stack, log, args.tensorflow, PEERS / "tf_ps.py", network, data).rate
    fleets = {way.name: Ours(stack, args.ebb, folder / f"{network}-{way.name}", way) for way in ways}
    # The first window of a system waits until it is up, and is not counted.
    steps = WARMUP + math.ceil(3 * silent.rate() / PER_STEP)
    for name, window in list(windows.items()):
        try:
            window()
        except RuntimeError as error:
            if name == "PyTorch DDP":
                raise
            print(f"\n== {name}: {error}\n   its rows are SKIPPED", file=sys.stderr)
            del windows[name]
    # The first job of a fleet finds memory that it has never touched.
    job = lambda name, steps: fleets[name].rates(job_of(network, fleets[name].way.mode, steps, data, folder))
    for name in fleets:
        job(name, WARMUP + 1)

    # DDP between ours.
    order = list(fleets)
    order[1:1] = ["PyTorch DDP"]
    order += [name for name in windows if name not in order]
    rates, whole, ratios = (collections.defaultdict(list) for _ in range(3))
    silents = [silent.rate()]
    rounds = 1 if args.quick else ROUNDS
    for number in range(1, rounds + 1):
        for two in (order[at : at + 2] for at in range(0, len(order), 2)):
            # A window of a peer, which stays up, has no start and no end.
            seen = {name: job(name, steps) if name in fleets else (windows[name](), None) for name in two}
            silents.append(silent.rate())
            for name, (steady, to_end) in seen.items():
                rates[name].append(steady)
                whole[name].append(to_end)
                ratios[name].append(steady / ((silents[-2] + silents[-1]) / 2))
                beside = f"silent pair {silents[-2]:.0f} and {silents[-1]:.0f} samples/s"
                print(f"{network}, round {number} of {rounds}: {name} {steady:.0f}, {beside}", file=sys.stderr)

    unit, figures = "samples/s", [row(f"{network}: silent pair", "samples/s", silents)]
    limit = figures[0]["value"]
    over = lambda ours, theirs: [one / other for one, other in zip(ours, theirs)]
    ratio = lambda name, samples, target=None: figures.append(row(f"{network}: {name}", "ratio", samples, 1.0, target))
    for name in windows:
        figures.append(row(f"{network}: {name}", unit, rates[name], limit))
        ratio(f"{name}, of the silent pair", ratios[name])
    for way in ways:
        name = way.name
        figures.append(row(f"{network}: {name}", unit, rates[name], limit))
        figures.append(row(f"{network}: {name}, submission to end", unit, whole[name], limit))
        ratio(f"{name}, of the silent pair", ratios[name], way.of_silent)
        if way.of_ddp:
            # Both over their neighbours.
            ratio(f"{name}, of DDP", over(ratios[name], ratios["PyTorch DDP"]), way.of_ddp)
        if way is PORTABLE:
            ratio(f"{name}, of native", over(ratios[name], ratios["sync"]))
    return figures


def main():
    parser = argparse.ArgumentParser()
    for name in ("ebb", "mnist", "folder"):
        parser.add_argument(name, type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tensorflow")
    args = parser.parse_args()
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    folder = args.folder.resolve() / "end_to_end"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    subprocess.run([sys.executable, PEERS / "torch_common.py", folder], check=True)
    with open(args.folder / "end_to_end.rows", "a") as rows:
        for network in NETWORKS:
            with contextlib.ExitStack() as stack:
                for figure in measure(stack, network, args, folder):
                    print(json.dumps(figure), file=rows)


if __name__ == "__main__":
    main()
