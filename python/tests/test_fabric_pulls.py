"""Pulls that fail, in scripts of `ebbflow.fabric` and in workers: the ps are stopped for a while.

A stopped process keeps its connections and says nothing, as a machine that hangs. Ids at tests are
those of ``docs/behaviours.md``.
"""

from __future__ import annotations

import os
import re
import signal
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import DIGITS, Cluster, Place, Process, Script, needs_there

needs_there("torch")

SCRIPT = """
import sys
import torch
from torch import nn
from ebbflow.fabric import FabricModel

def get_dataset():
    def part(records, seed):
        x = torch.randn(records, 6, generator=torch.Generator().manual_seed(seed))
        return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    return part(160, 1), part(40, 2)

torch.manual_seed(7)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))
edt_model = FabricModel(
    model, get_dataset, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=0.01)
)
edt_model.name = sys.argv[1]
edt_model.train(2, 8, engines_number=4, num_dataloader_threads=0)
"""

#: A partition in a message. The ps that has it is named.
PARTITION = r"partition \d on ps `ps-[^`]+` at http://127\.0\.0\.1:\d+"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Give a master that never misses a stopped ps, two ps, and no worker."""
    monkeypatch.setenv("EBB_MASTER_DEATH", "1h")
    with Cluster(tmp_path, workers=0) as cluster, Place(cluster) as place:
        yield place


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Give the script's file."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def stop(servers: list[Process]) -> None:
    """Stop processes, and wait until they are."""
    for server in servers:
        server.child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, server.child.pid, os.WSTOPPED)


def resume(servers: list[Process]) -> None:
    for server in servers:
        server.child.send_signal(signal.SIGCONT)


# S0-07, S0-08
def test_a_pull_that_fails_is_logged_and_repeated_until_the_ps_answers(
    place: Place, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Script(None, script, "alone").result()
    monkeypatch.setenv("EDT_PULL_WEIGHT_TIME_OUT", "0.5")
    monkeypatch.setenv("EDT_PULL_FAILED_LIMITS", "10000")
    # It stands with a batch of the second update in its hands. The third one needs new weights.
    trains = place.script(script, "stopped", gate="5")
    trains.arrive()
    stop(place.cluster.ps)
    trains.go()
    line = trains.hear("PULL_FAILED")
    assert re.search(f"PULL_FAILED: pull from {PARTITION}: trying again for 5000s", line), line
    resume(place.cluster.ps)
    assert trains.result()["sha"] == alone["sha"] is not None


# S0-09
def test_a_process_whose_pulls_fail_for_the_whole_limit_ends_with_the_partition(
    place: Place, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDT_PULL_WEIGHT_TIME_OUT", "0.5")
    monkeypatch.setenv("EDT_PULL_FAILED_LIMITS", "20")
    trains = place.script(script, "ends", gate="5")
    trains.arrive()
    stop(place.cluster.ps)
    trains.go()
    code, said = trains.end()
    assert code == 1, said
    assert re.search(f"PULL_FAILED: pull from {PARTITION}: trying again for 10s", said), said
    # The push of the second update has the same limit, and may reach it first.
    assert re.search(f"SessionFailedError: (pull from|push to) {PARTITION}: ", said), said


# S0-08
def test_a_worker_counts_pulls_that_fail_and_goes_on_when_the_ps_answers(
    place: Place,
) -> None:
    worker = place.cluster.start(
        *("worker", "worker", "--master", place.cluster.url, "--device", "cpu"),
        *("--metrics", "127.0.0.1:0"),
    )
    metrics = worker.url("metrics at ")

    def failed() -> int:
        with urllib.request.urlopen(metrics) as answer:
            text = answer.read().decode()
        found = re.search(r"^ebb_worker_pull_failed_total(?:\{[^}]*\})? (\d+)$", text, re.MULTILINE)
        assert found is not None, text
        return int(found[1])

    limits = {"limits.pull_timeout": "500ms", "limits.pull_attempts_max": 10_000}
    job = place.client.submit(DIGITS, changes={"epochs": 1_000_000, **limits})
    while job.status().steps_done == 0:
        time.sleep(0.02)
    before = failed()
    stop(place.cluster.ps)
    while failed() == before:
        time.sleep(0.02)
    while "PULL_FAILED" not in worker.log.read_text():
        time.sleep(0.02)
    line = next(line for line in worker.log.read_text().splitlines() if "PULL_FAILED" in line)
    assert re.search(f"PULL_FAILED: pull from {PARTITION}: trying again for 5000s", line), line
    resume(place.cluster.ps)
    done = job.status().steps_done
    while job.status().steps_done <= done:
        time.sleep(0.02)
    assert not job.status().is_end
