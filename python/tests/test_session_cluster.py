"""`ebbflow.join` in several processes of one cluster, and in one process alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .conftest import Place, Script, needs_there

needs_there("torch")

SCRIPT = """
import sys
import torch, ebbflow
from torch import nn

records, name, leaves_at = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
generator = torch.Generator().manual_seed(3)
x = torch.randn(records, 6, generator=generator)
y = (x.sum(1) > 0).long()
torch.manual_seed(7)
model = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Dropout(0.2), nn.Linear(64, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
source = torch.utils.data.TensorDataset(x, y)
loss = nn.CrossEntropyLoss()
trained = 0

def measure(batch):
    outputs = model(batch.x)
    right = (outputs.argmax(1) == batch.y).float().mean()
    return {"loss": loss(outputs, batch.y), "accuracy": right}

with ebbflow.join(
    model, optimizer, source, source, micro=8, effective=64, epochs=3, seed=5, name=name
) as job:
    for epoch in job.epochs():
        for batch in epoch:
            job.step(loss(model(batch.x), batch.y))
            trained += 1
            if trained == leaves_at:
                sys.exit(3)
        job.evaluate(measure)
"""

#: The same loop, whose products are of bfloat16.
AUTOCAST = SCRIPT.replace(
    "            job.step(loss(model(batch.x), batch.y))\n",
    "            with torch.autocast('cpu', dtype=torch.bfloat16):\n"
    "                outputs = model(batch.x)\n"
    "            assert outputs.dtype == torch.bfloat16\n"
    "            job.step(loss(outputs.float(), batch.y))\n",
)

#: The same loop, which keeps the GIL for longer than a process may be silent. `PyDLL` calls C
#: without giving it up, unlike `CDLL`.
KEEPS_GIL = "import ctypes\n" + SCRIPT.replace(
    "            job.step(",
    "            if trained == 3:\n"
    "                ctypes.PyDLL(None).sleep(8)\n"
    "            job.step(",
)

#: The same loop, as if the model were on a CUDA device of that number.
ON_DEVICE = "import ebbflow.engine as e; e.Torch.device = lambda _: ('cuda:3', 1 << 33)" + SCRIPT

#: A job that takes processes on CUDA devices alone.
FOR_DEVICES = ("name=name\n)", "name=name, fleet_device='cuda'\n)")


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the script's file."""
    path = tmp_path_factory.mktemp("session") / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture(scope="module")
def alone(script: Path) -> dict[str, Any]:
    """Give what one process finds without a cluster."""
    return Script(None, script, "400", "alone", "0", fresh=True).result()


def test_one_and_three_processes_and_one_alone_give_the_same_bits(
    shared: Place, script: Path, alone: dict[str, Any]
) -> None:
    one = shared.script(script, "400", "one", "0").result()
    three = [shared.script(script, "400", "three", "0", gate="join") for _ in range(3)]
    for process in three:
        process.arrive()
    shared.wait_for_workers("three", 3)
    for process in three:
        process.go()
    found = [process.result() for process in three]
    assert {one["sha"], alone["sha"], *(process["sha"] for process in found)} == {alone["sha"]}
    assert [process["elected"] for process in found].count(True) == 1
    assert sum(process["steps"] for process in found) >= one["steps"] == 150
    assert all(process["metrics"] == alone["metrics"] for process in found)
    assert one["numerics"] == alone["numerics"]


def test_a_loop_with_autocast_trains_and_two_processes_give_its_bits(
    shared: Place, alone: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "autocast.py"
    path.write_text(AUTOCAST)
    expected = Script(None, path, "400", "alone", "0").result()
    assert expected["sha"] != alone["sha"]
    losses = [entry["loss"] for entry in expected["history"]]
    assert losses[0] > losses[1] > losses[2]
    two = [shared.script(path, "400", "autocast", "0", gate="join") for _ in range(2)]
    for process in two:
        process.arrive()
    shared.wait_for_workers("autocast", 2)
    for process in two:
        process.go()
    assert [process.result()["sha"] for process in two] == [expected["sha"]] * 2


def test_a_script_alone_has_the_same_bits_in_a_debugger(
    alone: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "debugged.py"
    path.write_text(SCRIPT + "print('trained', job.model_sha256)\n")
    (line,) = [number for number, text in enumerate(SCRIPT.splitlines(), 1) if "job.step(" in text]
    # It stops in the fourth batch. At its end pdb would begin again.
    orders = [f"tbreak {line}, trained == 3", "continue", "p ('at', trained, len(batch))"]
    orders += ["continue", "quit"]
    flags = [word for order in orders for word in ("-c", order)]
    command = [sys.executable, "-m", "pdb", *flags, str(path), "400", "alone", "0"]
    variables = {name: value for name, value in os.environ.items() if name != "EBBFLOW_MASTER"}
    ended = subprocess.run(
        command,
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    said = ended.stdout + ended.stderr
    assert "('at', 3, 8)" in said, said
    assert f"trained {alone['sha']}" in said, said


def test_a_loop_that_keeps_the_interpreter_is_not_taken_for_dead(
    shared: Place, alone: dict[str, Any], tmp_path: Path
) -> None:
    assert KEEPS_GIL.count("sleep(8)") == 1
    path = tmp_path / "keeps_gil.py"
    path.write_text(KEEPS_GIL)
    found = shared.script(path, "400", "keeps", "0").result()
    # The master gives the batches of a process once more that it takes for dead.
    assert found["sha"] == alone["sha"] and found["steps"] == alone["steps"] == 150
    events = list(shared.client.job("keeps").watch())
    reasons = [event["reason"] for event in events if event.kind == "fleet"]
    assert not [reason for reason in reasons if "heartbeat" in reason], reasons


# S0-09, S4-15
def test_a_process_that_leaves_changes_no_bit(
    shared: Place, script: Path, alone: dict[str, Any]
) -> None:
    leaves = shared.script(script, "400", "leaves", "5", gate="4")
    leaves.arrive()
    stays = shared.script(script, "400", "leaves", "0", gate="join")
    stays.arrive()
    shared.wait_for_workers("leaves", 2)
    leaves.go()
    assert leaves.end()[0] == 3
    stays.go()
    assert stays.result()["sha"] == alone["sha"]


def test_a_process_with_other_data_is_refused_and_the_first_one_loses_nothing(
    shared: Place, script: Path, alone: dict[str, Any]
) -> None:
    first = shared.script(script, "400", "mixed", "0", gate="1")
    first.arrive()
    code, said = shared.script(script, "399", "mixed", "0").end()
    assert code != 0
    assert "describes another job" in said and "data.train.files" in said and "399" in said
    first.go()
    found = first.result()
    assert found["sha"] == alone["sha"] and found["steps"] == alone["steps"] == 150


# S4-21
def test_a_job_takes_the_processes_whose_models_are_on_the_device_it_asks_for(
    shared: Place, alone: dict[str, Any], tmp_path: Path
) -> None:
    on_device = tmp_path / "on_device.py"
    on_device.write_text(ON_DEVICE.replace(*FOR_DEVICES))
    on_cpu = tmp_path / "on_cpu.py"
    on_cpu.write_text(SCRIPT.replace(*FOR_DEVICES))
    waits = shared.script(on_cpu, "400", "device", "0", gate="join")
    waits.arrive()
    first = shared.script(on_device, "400", "device", "0", gate="1")
    first.arrive()
    status = shared.client.status("device")
    assert status["workers"] == 1
    shown = [(group["device"], group["memory_bytes"]) for group in status["devices"]]
    assert shown == [("cuda:3", 1 << 33)]
    waits.go()
    first.go()
    assert first.result()["sha"] == alone["sha"]
    assert waits.result()["sha"] == alone["sha"], "it gets the weights at the end"
