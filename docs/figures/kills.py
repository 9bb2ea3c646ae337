"""Trains one job twice, undisturbed and with kills, and draws both.

    pip install matplotlib
    python docs/figures/kills.py target/release/ebb        # a minute; writes docs/figures/kills.svg

Each run has a master, two ps and three workers on this machine. In the second run two workers and a ps are killed (SIGKILL); a
worker is added, and the ps is started again with its name. The script fails if a loss or the two models differ.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "ebbflow"
from matplotlib import pyplot

HERE = Path(__file__).resolve().parent
JOB = HERE.parents[1] / "examples/digits/job.toml"
SETTINGS = ["epochs=200", "optimizer.learning_rate=0.0005", "checkpoint.every_steps=500"]
# What is done to the fleet when so many of all steps are applied.
FAULTS = [
    (0.15, "kill", "worker-0", "worker killed"),
    (0.30, "kill", "ps-b", "ps killed, and started again"),
    (0.30, "start", "ps-b", None),
    (0.55, "start", "worker-3", "worker joins"),
    (0.75, "kill", "worker-1", "worker killed"),
]


class Fleet:
    def __init__(self, ebb, folder):
        self.ebb, self.folder, self.processes = ebb, folder, {}
        self.spawn("master", ["master", "--listen", "127.0.0.1:0", "--data-dir", str(folder / "master")])
        self.url = self.find_url()
        for name in ["ps-a", "ps-b", "worker-0", "worker-1", "worker-2"]:
            self.start(name)

    def spawn(self, name, arguments):
        log = open(self.folder / f"{name}.log", "a")
        self.processes[name] = subprocess.Popen([self.ebb, *arguments], stdout=log, stderr=log)

    def find_url(self):
        for _ in range(600):
            for word in (self.folder / "master.log").read_text().replace('"', " ").split():
                if word.startswith("http://127.0.0.1:"):
                    return word.rstrip(".,;")
            time.sleep(0.1)
        sys.exit("the master does not start: " + (self.folder / "master.log").read_text())

    def start(self, name):
        role = name.split("-")[0]
        self.spawn(name, [role, "--master", self.url, *(["--name", name] if role == "ps" else [])])

    def kill(self, name):
        self.processes[name].kill()
        self.processes[name].wait()

    def stop(self):
        for process in self.processes.values():
            process.kill()
            process.wait()

    def call(self, *arguments):
        done = subprocess.run([self.ebb, *arguments, "--master", self.url], capture_output=True, text=True)
        return done.stdout if done.returncode == 0 else sys.exit(f"{arguments}: {done.stderr}")


def train(ebb, faults):
    """Steps over time, the losses by step, when faults came, and the model's digest."""
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(ebb, Path(folder))
        try:
            settings = [*SETTINGS, f"checkpoint.url={folder}/checkpoints"]
            fleet.call("submit", str(JOB), *(f"--set={setting}" for setting in settings))
            begin, progress, marks, waiting = time.monotonic(), [], [], list(faults)
            while True:
                status = json.loads(fleet.call("status", "digits-1", "--json"))
                at, steps, total = time.monotonic() - begin, status["steps_done"], status["steps"]
                progress.append((at, steps))
                while waiting and total and steps >= waiting[0][0] * total:
                    _, action, name, text = waiting.pop(0)
                    getattr(fleet, action)(name)
                    marks.append((at, steps, text))
                if status["status"] in ("succeeded", "failed", "cancelled"):
                    break
                time.sleep(0.05)
            out = Path(folder) / "out"
            fleet.call("fetch", "digits-1", "--out", str(out))
            events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
            # After a rewind the steps from its version on come again; the later events count.
            losses = {event["step"]: event["loss"] for event in events if event["event"] == "train"}
            digest = json.loads((out / "summary.json").read_text())["model_sha256"]
            return progress, losses, marks, digest
        finally:
            fleet.stop()


def smooth(losses):
    """The mean of each 23 reported losses, at the last of their steps."""
    steps, each = sorted(losses), 23
    groups = [steps[begin : begin + each] for begin in range(0, len(steps), each)]
    return [group[-1] for group in groups], [sum(losses[step] for step in group) / len(group) for group in groups]


def main():
    ebb = str(Path(sys.argv[1]).resolve())
    calm, disturbed = train(ebb, []), train(ebb, FAULTS)
    if calm[1] != disturbed[1] or calm[3] != disturbed[3]:
        sys.exit(f"the losses or the models differ: {calm[3]} and {disturbed[3]}")
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for (progress, *_), color, label in [(calm, "0.6", "undisturbed"), (disturbed, "tab:red", "with kills")]:
        left.plot(*zip(*progress), color=color, label=label)
    for at, steps, text in disturbed[2]:
        if text:
            left.annotate(text, (at, steps), (7, -12), textcoords="offset points", fontsize=8)
            left.plot([at], [steps], "k.", zorder=3)
    left.set(xlabel="seconds", ylabel="steps applied", title="The fleet changes, the job goes on")
    left.legend(loc="upper left")
    right.plot(*smooth(calm[1]), color="0.7", linewidth=5, label="undisturbed")
    right.plot(*smooth(disturbed[1]), color="tab:red", linewidth=1, label="with kills")
    right.set(xlabel="step", ylabel="training loss", yscale="log", title="The losses are the same, bit for bit")
    right.legend()
    figure.savefig(HERE / "kills.svg", metadata={"Date": None})
    print(f"both models: {calm[3]}")


main()
