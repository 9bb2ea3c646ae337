"""PyTorch's MNIST example has one result: alone, on one host, and on a cluster under chaos.

Agents and processes of the script are killed, stopped, told to end and added, in an order that a
seed draws. Nothing depends on speed. The processes begin no batch of a step that the test has not
allowed, so each fault comes after a number of applied steps, while a process holds a batch.

``EBB_CHAOS_SEEDS=1,2,3`` names other seeds, one run for each.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from ebbflow.errors import NotFoundError

from .conftest import DIGITS, EBB, Place, Process, Script, needs_there
from .test_scripts import agent as start_agent
from .test_scripts import submit

needs_there("torch")

TRAIN = Path(__file__).parents[2] / "examples/python/mnist/train.py"

SEEDS = [int(seed) for seed in os.environ.get("EBB_CHAOS_SEEDS", "3").split(",")]

#: A short training, and its steps. A step has one batch of 64 records.
EPOCHS = 3
RECORDS = 1437 * EPOCHS
STEPS = 23 * EPOCHS

#: Agents have other files beside the script than this checkout.
ARGUMENTS = ("--epochs", str(EPOCHS), "--data", str(DIGITS.parent))

#: Processes of the script. The cluster begins with fewer agents, each of which takes one.
PROCESSES = 4
AGENTS = 3

JOB = "mnist"

# Runs the example beside it, unchanged. It tells `joined-WORKER` when it has joined, `held` when it
# waits with a batch for the number in `allowed` to grow, and `final-WORKER` which model it has in
# the end.
GATED = """
import os, runpy, sys, time
from pathlib import Path
import ebbflow
from gated import held as hash_of

folder, *arguments = sys.argv[1:]
join, batches = ebbflow.join, ebbflow.Epoch.__iter__

def tell(name, *facts):
    new = Path(folder, f".{name}.{os.getpid()}")
    new.write_text(" ".join(map(str, facts)))
    new.rename(Path(folder, name))

def agent():
    # The parent of a process is the guard of its agent.
    return int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])

def is_allowed(batch):
    return batch.step < int(Path(folder, "allowed").read_text())

def joined(*values, **options):
    global final
    job = join(*values, **options)
    final = lambda: hash_of(values[0], job)
    tell("joined-" + os.environ["EBBFLOW_WORKER"], os.getpid(), agent())
    return job

def held(epoch):
    for batch in batches(epoch):
        if not is_allowed(batch):
            tell("held", batch.step, os.getpid())
        while not is_allowed(batch):
            time.sleep(0.02)
        yield batch

ebbflow.join, ebbflow.Epoch.__iter__ = joined, held
sys.argv[1:] = arguments
runpy.run_path(str(Path(__file__).with_name("train.py")), run_name="__main__")
tell("final-" + os.environ["EBBFLOW_WORKER"], final())
"""


class Fault(Enum):
    KILL_PROCESS = "kill a process"
    STOP_PROCESS = "stop a process for a while"
    END_PROCESS = "tell a process to end"
    KILL_AGENT = "kill an agent"
    STOP_AGENT = "stop an agent for a while"
    END_AGENT = "tell an agent to end"
    ADD_AGENT = "add an agent"


class Strike(NamedTuple):
    fault: Fault
    #: Whether it meets the process that holds a batch, or that process's agent.
    meets_batch: bool
    #: Chooses among the others.
    other: int
    #: Steps that are applied before the next strike, and during a stop.
    steps: int


def plan(chance: random.Random) -> list[Strike]:
    """Draw the order of all faults. Agents are added in time to replace those that are lost.

    Three agents are there at each other fault, so two go on. No agent has three restarts.
    """
    order = [fault for fault in Fault if fault is not Fault.ADD_AGENT]
    chance.shuffle(order)
    faults: list[Fault] = []
    agents = AGENTS
    for fault in order:
        if agents < AGENTS or (agents < PROCESSES and chance.random() < 0.25):
            faults.append(Fault.ADD_AGENT)
            agents += 1
        faults.append(fault)
        agents -= fault in (Fault.KILL_AGENT, Fault.END_AGENT)
    return [
        Strike(fault, chance.random() < 0.5, chance.randrange(1000), chance.randint(1, 4))
        for fault in faults
    ]


def gated(folder: Path) -> tuple[Path, Path]:
    """Write the files of the script. Returns the script, and the folder where it tells things."""
    code, told = folder / "code", folder / "told"
    code.mkdir()
    told.mkdir()
    shutil.copy(TRAIN, code)
    shutil.copy(Path(__file__).with_name("gated.py"), code)
    script = code / f"{JOB}.py"
    script.write_text(GATED)
    allow(told, 0)
    (told / "held").write_text("-1 0")
    return script, told


def allow(folder: Path, steps: int) -> None:
    """Let the processes begin all batches of so many steps."""
    new = folder / ".allowed"
    new.write_text(str(steps))
    new.rename(folder / "allowed")


def tell(process: int, number: signal.Signals) -> None:
    # It may have ended just now, since its agent was told that it need not run it.
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


def check(summary: dict[str, Any], alone: dict[str, Any]) -> None:
    """Check that the bits are those of one process alone, and that no record counted twice."""
    assert summary["status"] == "succeeded", summary
    assert summary["model_sha256"] == alone["sha"], summary
    assert summary["samples_applied"] == RECORDS, summary
    assert summary["steps"] == summary["microbatches_applied"] == STEPS, summary


def finals(folder: Path) -> list[str]:
    """Return the hashes of the models that processes have at the end of the script."""
    return [path.read_text() for path in folder.glob("final-*")]


class Chaos:
    """A submitted script, and the agents that run its processes."""

    def __init__(self, place: Place, folder: Path, submitted: subprocess.Popen[str]) -> None:
        self.place = place
        self.folder = folder
        self.submitted = submitted
        self.agents: list[Process] = []
        self.started = 0
        #: Processes that are dead or stopped.
        self.away: set[int] = set()
        self.allowed = 0

    def run(self, strikes: list[Strike]) -> None:
        for _ in range(AGENTS):
            self.add()
        self.settle()
        self.advance(1)
        for strike in strikes:
            print(f"step {self.allowed}: {strike}")
            self.settle()
            self.strike(strike)
        # The processes that ended last have begun again.
        self.settle()

    def add(self) -> None:
        self.agents.append(start_agent(self.place.cluster, self.started, 1))
        self.started += 1

    def strike(self, strike: Strike) -> None:
        fault = strike.fault
        if fault is Fault.ADD_AGENT:
            self.add()
            self.settle()
            self.advance(strike.steps)
            return
        victim, process = self.victim(strike)
        self.away.add(process)
        if fault in (Fault.KILL_AGENT, Fault.END_AGENT):
            self.agents.remove(victim)
        if fault is Fault.KILL_PROCESS:
            tell(process, signal.SIGKILL)
        elif fault is Fault.END_PROCESS:
            tell(process, signal.SIGTERM)
        elif fault is Fault.KILL_AGENT:
            victim.child.kill()
            victim.child.wait()
        elif fault is Fault.END_AGENT:
            victim.child.terminate()
            assert victim.child.wait() == 0, victim.log.read_text()
        else:
            stopped = process if fault is Fault.STOP_PROCESS else victim.child.pid
            tell(stopped, signal.SIGSTOP)
            # The master hears nothing of its process, and gives the batch to another one.
            self.until(lambda: self.workers() < len(self.agents))
            self.advance(strike.steps)
            tell(stopped, signal.SIGCONT)
            self.away.remove(process)
            return
        self.advance(strike.steps)

    def victim(self, strike: Strike) -> tuple[Process, int]:
        """Choose an agent and its process."""
        holder = self.holder()
        found = [(agent, self.process(agent)) for agent in self.agents]
        pairs = [(agent, process) for agent, process in found if process is not None]
        holds = [pair for pair in pairs if pair[1] == holder]
        others = [pair for pair in pairs if pair[1] != holder]
        chosen = holds if strike.meets_batch and holds else others
        return chosen[strike.other % len(chosen)]

    def advance(self, steps: int) -> None:
        """Let further steps be applied, until a process holds a batch of the next one."""
        self.allowed += steps
        allow(self.folder, self.allowed)
        self.until(lambda: self.holder() is not None)

    def settle(self) -> None:
        """Wait until each agent has a process that trains."""
        self.until(lambda: None not in map(self.process, self.agents))
        self.until(lambda: self.workers() == len(self.agents))

    def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            assert self.submitted.poll() is None, self.submitted.communicate()
            time.sleep(0.05)

    def holder(self) -> int | None:
        """Return the process that waits with a batch of the first step that is not allowed."""
        step, process = map(int, (self.folder / "held").read_text().split())
        return process if step == self.allowed and process not in self.away else None

    def process(self, agent: Process) -> int | None:
        """Return the process of an agent, if it has joined."""
        for path in self.folder.glob("joined-*"):
            process, parent = map(int, path.read_text().split())
            if parent == agent.child.pid and process not in self.away:
                return process
        return None

    def workers(self) -> int:
        try:
            return int(self.place.client.status(JOB)["workers"])
        except NotFoundError:
            # The master does not have the script yet.
            return 0


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """Give what one process finds without a cluster."""
    found = Script(None, TRAIN, "--epochs", str(EPOCHS)).result()
    assert found["steps"] == STEPS
    return found


def test_each_order_has_every_fault_within_the_steps_of_the_job() -> None:
    for seed in range(200):
        strikes, agents = plan(random.Random(seed)), AGENTS
        faults = [strike.fault for strike in strikes]
        assert set(faults) == set(Fault)
        for fault in faults:
            assert agents >= AGENTS or fault is Fault.ADD_AGENT, (seed, faults)
            agents += fault is Fault.ADD_AGENT
            agents -= fault in (Fault.KILL_AGENT, Fault.END_AGENT)
            assert agents <= PROCESSES, (seed, faults)
        assert 1 + sum(strike.steps for strike in strikes) < STEPS
    assert plan(random.Random(1)) == plan(random.Random(1)) != plan(random.Random(2))


def test_four_processes_of_one_host_find_the_bits_of_one_alone(
    alone: dict[str, Any], tmp_path: Path
) -> None:
    script, folder = gated(tmp_path)
    out = tmp_path / "out"
    command = [str(EBB), "run", str(script), "--workers", str(PROCESSES), "--out", str(out)]
    run = subprocess.Popen(
        [*command, "--json", "--", str(folder), *ARGUMENTS],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        # None of them has trained the whole job before another one comes.
        while len(list(folder.glob("joined-*"))) < PROCESSES:
            assert run.poll() is None, run.communicate()
            time.sleep(0.02)
        allow(folder, STEPS)
        said, errors = run.communicate()
    finally:
        run.kill()
    assert run.returncode == 0, errors
    check(json.loads(said), alone)
    check(json.loads((out / "summary.json").read_text()), alone)
    assert finals(folder) == [alone["sha"]] * PROCESSES


@pytest.mark.parametrize("seed", SEEDS)
def test_agents_and_processes_that_are_killed_stopped_and_added_change_no_bit(
    place: Place, alone: dict[str, Any], tmp_path: Path, seed: int
) -> None:
    print(f"EBB_CHAOS_SEEDS={seed}")
    script, folder = gated(tmp_path)
    arguments = ["--name", JOB, "--workers", str(PROCESSES), "--", str(folder), *ARGUMENTS]
    submitted = submit(place.cluster.url, script, *arguments)
    try:
        chaos = Chaos(place, folder, submitted)
        chaos.run(plan(random.Random(seed)))
        allow(folder, STEPS)
        said, errors = submitted.communicate()
    finally:
        submitted.kill()
    assert submitted.returncode == 0, errors
    summary = json.loads(said)
    assert summary["job"] == f"{JOB}-1"
    check(summary, alone)
    # The processes end after their job.
    while len(finals(folder)) < len(chaos.agents):
        time.sleep(0.05)
    assert finals(folder) == [alone["sha"]] * len(chaos.agents)
    logs = "".join(process.log.read_text() for process in place.cluster.processes)
    for end in ("was ended by signal 9", r"(ended with exit code 143|was ended by signal 15)"):
        assert re.search(f"{JOB}-1-\\d {end}; it is started again in", logs), logs
