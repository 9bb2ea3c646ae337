"""Loops of ElasticDL in several processes. Ids at tests are as in `test_elastic.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Place, Script

pytest.importorskip("torch")

TRAIN = Path(__file__).parents[2] / "examples/python/elastic/train.py"

#: A short training.
ARGUMENTS = ("--epochs", "3")

#: A loop whose processes begin with weights of their own, and stop mid-way if told so.
OTHER_WEIGHTS = """
import sys
import torch
from ebbflow.elastic import ElasticBroadcastObject, elastic_allreduce, rendezvous, run
from torch import nn

generator = torch.Generator().manual_seed(3)
x = torch.randn(160, 6, generator=generator)
source = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())

@elastic_allreduce
def train_step(optimizer):
    optimizer.step()

def elastic_train(dataset):
    torch.manual_seed(int(sys.argv[1]))
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    ElasticBroadcastObject.set_model(model)
    ElasticBroadcastObject.set_optimizer(optimizer)
    for features, labels in dataset:
        nn.functional.cross_entropy(model(features), labels).backward()
        train_step(optimizer)

def load(model):
    if sys.argv[3:]:
        model.load_state_dict(torch.load(sys.argv[3]))

names = rendezvous(rdzv_id=sys.argv[2])
run(elastic_train, source, load_checkpoint=load, epochs=2, micro=8, effective=32, **names)
"""


# S3-03, S3-11
def test_one_and_three_processes_with_one_killed_give_the_same_bits(
    place: Place,
) -> None:
    one = place.script(TRAIN, *ARGUMENTS).result()
    killed = place.script(TRAIN, *ARGUMENTS, gate="30")
    # In the second epoch, with a batch in its hands and momentum on the ps.
    killed.arrive()
    stay = [place.script(TRAIN, *ARGUMENTS, gate="join") for _ in range(2)]
    for script in stay:
        script.arrive()
    place.wait_for_workers("elastic", 3)
    killed.kill()
    place.wait_for_workers("elastic", 2)
    for script in stay:
        script.go()
    found = [script.result() for script in stay]
    assert {process["sha"] for process in found} == {one["sha"]}
    assert all(process["history"] == one["history"] for process in found)
    assert [process["elected"] for process in found].count(True) == 1


# S3-06
def test_the_number_of_processes_changes_no_update(place: Place) -> None:
    alone = Script(None, TRAIN, *ARGUMENTS).result()
    three = [place.script(TRAIN, *ARGUMENTS, gate="join") for _ in range(3)]
    for script in three:
        script.arrive()
    place.wait_for_workers("elastic", 3)
    for script in three:
        script.go()
    found = [script.result() for script in three]
    assert {process["sha"] for process in found} == {alone["sha"]}
    # 90 batches of 16 records in an epoch. Each counted once, whoever computed it.
    assert sum(process["steps"] for process in found) >= alone["steps"] == 3 * 90


# S0-06, S1-11, S3-10
def test_a_process_that_joins_gets_the_weights_of_the_job(place: Place, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(OTHER_WEIGHTS)
    one = place.script(path, "7", "one").result()
    other = place.script(path, "8", "other").result()
    assert one["sha"] != other["sha"]
    first = place.script(path, "7", "both", gate="5")
    first.arrive()
    joins = place.script(path, "8", "both", gate="join")
    joins.arrive()
    place.wait_for_workers("both", 2)
    first.go()
    joins.go()
    assert {first.result()["sha"], joins.result()["sha"]} == {one["sha"]}


# S1-08
def test_a_checkpoint_gives_the_first_weights(place: Place, tmp_path: Path) -> None:
    import torch

    path, weights = tmp_path / "script.py", tmp_path / "weights.pt"
    path.write_text(OTHER_WEIGHTS)
    torch.manual_seed(7)
    nn = torch.nn
    torch.save(nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2)).state_dict(), weights)
    expected = place.script(path, "7", "drawn").result()
    loaded = place.script(path, "8", "loaded", str(weights)).result()
    assert loaded["sha"] == expected["sha"]


def test_the_example_reaches_its_number() -> None:
    assert Script(None, TRAIN).result()["metrics"]["accuracy"] >= 0.9
