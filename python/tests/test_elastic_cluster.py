"""Loops of ElasticDL in several processes. Ids at tests are as in `test_elastic.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Cluster, Place, Script, needs_there

needs_there("torch")

TRAIN = Path(__file__).parents[2] / "examples/python/elastic/train.py"

#: A short training.
ARGUMENTS = ("--epochs", "2")

#: A loop whose processes begin with weights of their own, or with those of a file. One may leave
#: its first weights in a file.
OTHER_WEIGHTS = """
import sys
import torch
from ebbflow.elastic import ElasticBroadcastObject, elastic_allreduce, rendezvous, run
from torch import nn

seed, name, loads, saves = sys.argv[1:]
generator = torch.Generator().manual_seed(3)
x = torch.randn(160, 6, generator=generator)
source = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())

@elastic_allreduce
def train_step(optimizer):
    optimizer.step()

def elastic_train(dataset):
    torch.manual_seed(int(seed))
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))
    if saves:
        torch.save(model.state_dict(), saves)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    ElasticBroadcastObject.set_model(model)
    ElasticBroadcastObject.set_optimizer(optimizer)
    for features, labels in dataset:
        nn.functional.cross_entropy(model(features), labels).backward()
        train_step(optimizer)

def load(model):
    if loads:
        model.load_state_dict(torch.load(loads))

names = rendezvous(rdzv_id=name)
run(elastic_train, source, load_checkpoint=load, epochs=2, micro=8, effective=32, **names)
"""


#: Weights that seed 7 draws.
FIRST = "first.pt"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with the script."""
    folder = tmp_path_factory.mktemp("elastic")
    (folder / "script.py").write_text(OTHER_WEIGHTS)
    return folder


@pytest.fixture(scope="module")
def drawn(folder: Path, cluster_of_file: Cluster) -> str:
    """Give the hash of the model of seed 7. Its first weights are in the folder."""
    saves = str(folder / FIRST)
    sha: str = Script(cluster_of_file.url, folder / "script.py", "7", "drawn", "", saves).result()[
        "sha"
    ]
    return sha


# S3-03, S3-06, S3-11
def test_one_and_three_processes_with_one_killed_give_the_same_bits(
    shared: Place,
) -> None:
    alone = Script(None, TRAIN, *ARGUMENTS).result()
    killed = shared.script(TRAIN, *ARGUMENTS, gate="100")
    # In the second epoch, with a batch in its hands and momentum on the ps.
    killed.arrive()
    stay = [shared.script(TRAIN, *ARGUMENTS, gate="join") for _ in range(2)]
    for script in stay:
        script.arrive()
    shared.wait_for_workers("elastic", 3)
    killed.kill()
    shared.wait_for_workers("elastic", 2)
    for script in stay:
        script.go()
    found = [script.result() for script in stay]
    assert {process["sha"] for process in found} == {alone["sha"]}
    assert all(process["history"] == alone["history"] for process in found)
    assert [process["elected"] for process in found].count(True) == 1
    # 90 batches of 16 records in an epoch. Each counted once, whoever computed it.
    assert 100 + sum(process["steps"] for process in found) >= alone["steps"] == 2 * 90


# S0-06, S1-11, S3-10
def test_a_process_that_joins_gets_the_weights_of_the_job(
    shared: Place, folder: Path, drawn: str
) -> None:
    path = folder / "script.py"
    assert shared.script(path, "8", "other", "", "").result()["sha"] != drawn
    first = shared.script(path, "7", "both", "", "", gate="5")
    first.arrive()
    joins = shared.script(path, "8", "both", "", "", gate="join")
    joins.arrive()
    shared.wait_for_workers("both", 2)
    first.go()
    joins.go()
    assert {first.result()["sha"], joins.result()["sha"]} == {drawn}


# S1-08
def test_a_checkpoint_gives_the_first_weights(shared: Place, folder: Path, drawn: str) -> None:
    path, weights = folder / "script.py", str(folder / FIRST)
    assert shared.script(path, "8", "loaded", weights, "").result()["sha"] == drawn


def test_the_example_reaches_its_number() -> None:
    assert Script(None, TRAIN).result()["metrics"]["accuracy"] >= 0.9
