"""`ebbflow.fabric.FabricModel` in several processes of one cluster.

Ids at tests are those of ``docs/behaviours.md``.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from .conftest import Cluster, Place, Script, needs_there
from .test_fabric_pulls import resume, stop

needs_there("torch")

SCRIPT = """
import glob, json, os, sys, time
import torch
from torch import nn
from ebbflow.fabric import FabricModel, LoggerCallback

folder, name, holds = sys.argv[1], sys.argv[2], int(sys.argv[3])

class Logger(LoggerCallback):
    def __init__(self, role):
        self.path = f"{folder}/{name}-{role}-{os.getpid()}.jsonl"
        self.calls = 0
    def note(self, *values):
        with open(self.path, "a") as file:
            file.write(json.dumps(values) + "\\n")
        self.calls += 1
        if "-driver-" in self.path and self.calls == holds:
            print("at the gate", flush=True)
            sys.stdin.readline()
    def log_train_metrics(self, metrics, iteration, epoch, workers):
        self.note("train", metrics, iteration, epoch, workers)
    def log_test_metrics(self, metrics, iteration, epoch):
        self.note("test", metrics, iteration, epoch)
    def on_train_begin(self):
        self.note("begin")
    def on_train_end(self):
        self.note("end")

def get_dataset():
    def part(records, seed):
        x = torch.randn(records, 6, generator=torch.Generator().manual_seed(seed))
        return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    return part(400, 1), part(2100, 2)

def accuracy(outputs, labels):
    return (outputs.argmax(1) == labels).float().mean()

def confidence(outputs, labels):
    return outputs.softmax(1).amax(1).mean()

torch.manual_seed(7)
model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 2))
edt_model = FabricModel(
    model, get_dataset, nn.CrossEntropyLoss(), torch.optim.Adam(model.parameters(), lr=0.01),
    metrics=[accuracy, confidence],
    worker_logger_callback=Logger("worker"), driver_logger_callback=Logger("driver"),
)
edt_model.name = name
edt_model.train(3, 8, engines_number=4, num_dataloader_threads=0)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the script's file."""
    path = tmp_path_factory.mktemp("fabric") / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def alone(script: Path) -> tuple[str, list[Any]]:
    """Give the hash of the model of one process, and what the driver heard there."""
    sha = Script(None, script, str(script.parent), "alone", "0", fresh=True).result()["sha"]
    (driver,) = heard(script.parent, "alone", "driver")
    return sha, driver


def heard(folder: Path, name: str, role: str) -> list[list[Any]]:
    """Return what each logger of a role heard, of those that heard anything."""
    files = sorted(folder.glob(f"{name}-{role}-*.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def without_workers(calls: list[Any]) -> list[Any]:
    return [call[:4] for call in calls]


# S0-25, S0-46, S0-47, S0-48, S0-49
def test_the_driver_hears_the_same_averages_for_any_fleet(
    shared: Place, script: Path, tmp_path: Path, alone: tuple[str, list[Any]]
) -> None:
    folder = str(tmp_path)
    three = [shared.script(script, folder, "three", "0", gate="join") for _ in range(3)]
    for process in three:
        process.arrive()
    shared.wait_for_workers("three", 3)
    for process in three:
        process.go()
    sha, driver = alone
    assert {process.result()["sha"] for process in three} == {sha}
    # 50 batches of an epoch are 13 updates.
    assert [call[0] for call in driver] == ["begin", *([*["train"] * 13, "test"] * 3), "end"]
    assert [call[2] for call in driver if call[0] == "train"][12::13] == [50, 100, 150]
    (of_three,) = heard(tmp_path, "three", "driver")
    assert without_workers(of_three) == without_workers(driver)
    # The workers that there are.
    assert {call[4] for call in of_three if call[0] == "train"} == {3}
    # Each worker hears of its own batches, and counts them.
    workers = heard(tmp_path, "three", "worker")
    assert len(workers) == 3
    trained = [[call for call in worker if call[0] == "train"] for worker in workers]
    for calls in trained:
        assert [call[2] for call in calls] == list(range(1, len(calls) + 1))
    assert sum(map(len, trained)) >= 150
    tested = [call for worker in workers for call in worker if call[0] == "test"]
    assert len(tested) >= 9 and {tuple(call[1]) for call in tested} == {
        ("loss", "accuracy", "confidence")
    }


# S0-32
def test_no_more_processes_train_than_engines_number(shared: Place, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("engines_number=4", "engines_number=2"))
    arguments = (str(tmp_path), "limited", "0")
    three = [shared.script(script, *arguments, gate="join") for _ in range(3)]
    for process in three:
        process.arrive()
    shared.wait_for_workers("limited", 2)
    for process in three:
        process.go()
    alone = Script(None, script, str(tmp_path), "alone", "0").result()["sha"]
    assert {process.result()["sha"] for process in three} == {alone}
    drivers = heard(tmp_path, "limited", "driver")
    workers = {call[4] for calls in drivers for call in calls if call[0] == "train"}
    assert workers and max(workers) == 2


# S0-01, S0-26
def test_another_process_is_elected_when_the_driver_dies(
    shared: Place, script: Path, tmp_path: Path, alone: tuple[str, list[Any]]
) -> None:
    folder = str(tmp_path)
    # It stops in the 20th call of its logger, or in its 140th batch if it is not elected before.
    dies = shared.script(script, folder, "dies", "20", gate="140")
    dies.arrive()
    before = heard(tmp_path, "dies", "driver")
    stays = shared.script(script, folder, "dies", "0", gate="join")
    stays.arrive()
    shared.wait_for_workers("dies", 2)
    dies.kill()
    stays.go()
    sha, driver = alone
    assert stays.result()["sha"] == sha
    calls = [without_workers(calls) for calls in heard(tmp_path, "dies", "driver")]
    # The last one that was elected heard all, and the one before it a part. Nobody heard one twice.
    assert without_workers(driver) in calls and len(calls) == len(before) + 1
    for part in before:
        assert without_workers(part) == without_workers(driver)[: len(part)]
        assert without_workers(part) in calls


#: The same script, whose first process waits with a batch in its hands once it has heard of two.
#: Both compute slowly, so that they do not end the job before the first one hears. The second one
#: would take 20 s for the rest of it while the first one waits.
HEARS_OF_TWO = SCRIPT.replace(
    "def accuracy(",
    """is_second = not holds

class Waits(nn.CrossEntropyLoss):
    def forward(self, outputs, labels):
        global holds
        if model.training:
            time.sleep(0.2 if is_second else 0.05 if holds else 0)
        if holds and model.training and edt_model.job.workers == 2:
            holds = 0
            print("at the gate", flush=True)
            sys.stdin.readline()
        return super().forward(outputs, labels)

def accuracy(""",
).replace("get_dataset, nn.CrossEntropyLoss()", "get_dataset, Waits()")


# S0-01, S0-48
def test_loggers_hear_how_many_processes_train_when_one_joins_and_leaves(
    shared: Place, tmp_path: Path, alone: tuple[str, list[Any]]
) -> None:
    assert HEARS_OF_TWO.count("Waits") == 2
    script = tmp_path / "script.py"
    script.write_text(HEARS_OF_TWO)
    # It has the first batch of the 11th update in its hands, and was told of some before alone.
    stays = shared.script(script, str(tmp_path), "counts", "1000", gate="40")
    stays.arrive()
    told = (event["step"] for event in shared.client.watch("counts") if event.kind == "train")
    assert next(told) == 0
    leaves = shared.script(script, str(tmp_path), "counts", "0")
    shared.wait_for_workers("counts", 2)
    stays.go()
    # It has heard of an update of both, and has a batch that the other one waits for.
    stays.arrive()
    leaves.kill()
    shared.wait_for_workers("counts", 1)
    stays.go()
    sha, driver = alone
    assert stays.result()["sha"] == sha

    def workers(calls: list[Any]) -> list[int]:
        found = [call[4] for call in calls if call[0] == "train"]
        return [number for number, _ in itertools.groupby(found)]

    # The process that stays is elected at the end, and its logger has heard all then.
    drivers = heard(tmp_path, "counts", "driver")
    (whole,) = [calls for calls in drivers if calls[-1] == ["end"]]
    assert without_workers(whole) == without_workers(driver)
    assert workers(whole) == [1, 2, 1]
    (worker,) = [calls for calls in heard(tmp_path, "counts", "worker") if calls[-1] == ["end"]]
    assert workers(worker) == [1, 2, 1]


#: The same script, which waits in the second epoch for the checkpoint of the first one, if it saves
#: some. A checkpoint that is due while another one is written is left out.
SAVES = SCRIPT.replace(
    "class Logger(",
    """checkpoints = os.environ.get("EBBFLOW_CHECKPOINTS")

def is_saved():
    # 13 updates are an epoch.
    manifests = glob.glob(f"{checkpoints}/{name}/v*/manifest.json")
    return checkpoints is None or any(int(path.split("/")[-2][1:]) == 13 for path in manifests)

class Logger(""",
).replace(
    '        self.note("train",',
    """        while epoch == 1 and not is_saved():
            time.sleep(0.01)
        self.note("train",""",
)


# S0-46
@pytest.mark.parametrize("with_checkpoints", [True, False])
def test_the_driver_hears_the_same_averages_after_the_loss_of_the_ps(
    with_checkpoints: bool,
    tmp_path: Path,
    alone: tuple[str, list[Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert SAVES.count("is_saved()") == 2
    script = tmp_path / "script.py"
    script.write_text(SAVES)
    # The master hardly waits for ps that are gone.
    monkeypatch.setenv("EBB_MASTER_PS_GRACE", "1s")
    if with_checkpoints:
        monkeypatch.setenv("EBBFLOW_CHECKPOINTS", str(tmp_path / "checkpoints"))
    with Cluster(tmp_path, workers=0) as cluster, Place(cluster) as place:
        # It has a batch of the third epoch in its hands. An epoch has 50.
        process = place.script(script, str(tmp_path), "lost", "0", gate="120")
        process.arrive()
        # 13 updates are an epoch. The first one of the third epoch is told.
        place.wait_for_more("lost", 104)
        if with_checkpoints:
            saved = (event for event in place.client.watch("lost") if event.kind == "checkpoint")
            while next(saved)["version"] != 26:
                pass
        # The master misses both at once. One that is left would take the part of the other one.
        masters = cluster.processes[:1]
        stop(masters)
        for ps in cluster.ps:
            ps.stop()
        resume(masters)
        for name in ("ps-2", "ps-3"):
            address = ("--listen", "127.0.0.1:0")
            cluster.start(name, "ps", "--master", cluster.url, *address).url()
        process.go()
        sha, driver = alone
        assert process.result()["sha"] == sha
        events = list(place.client.watch("lost"))
    (rewind,) = [event for event in events if event.kind == "rewind"]
    assert rewind["version"] == (26 if with_checkpoints else 0)
    (calls,) = heard(tmp_path, "lost", "driver")
    trained = [call for call in calls if call[0] == "train"]
    expected = [call for call in driver if call[0] == "train"]
    # It hears of the steps again that are trained again. The last call of an iteration counts.
    assert len(trained) > len(expected)
    last = {call[2]: call for call in trained}
    assert without_workers(list(last.values())) == without_workers(expected)
    tests = [call for call in calls if call[0] == "test"]
    assert list({call[3]: call for call in tests}.values()) == [
        call for call in driver if call[0] == "test"
    ]
