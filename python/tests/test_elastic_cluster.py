"""Loops of ElasticDL in several processes. Ids at tests are as in `test_elastic.py`."""

from __future__ import annotations

import json
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

#: A script of TorchElastic. Its arguments are the job, the master, and a folder with its own name
#: in it. It notes the batches that it got, and that it saved the model.
TORCHELASTIC = """
import json, os, sys
from pathlib import Path
import torch, ebbflow
from ebbflow.elastic import ElasticDistributedSampler, rendezvous
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

rdzv_id, endpoint, folder, name = sys.argv[1:]
assert "EBBFLOW_MASTER" not in os.environ
generator = torch.Generator().manual_seed(3)
x = torch.randn(96, 6, generator=generator)
source = TensorDataset(x, (x.sum(1) > 0).long())
loader = DataLoader(source, batch_size=8, sampler=ElasticDistributedSampler(source))
torch.manual_seed(7)
model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loss_of = nn.CrossEntropyLoss()
got = []
names = rendezvous(rdzv_id=rdzv_id, rdzv_endpoint=endpoint or None)
with ebbflow.join(model, optimizer, loader, effective=32, epochs=3, **names) as job:
    for epoch in job.epochs():
        loader.sampler.set_epoch(epoch.number)
        for batch in epoch:
            job.step(loss_of(model(batch.x), batch.y))
            got.append([batch.epoch, batch.microbatch, batch.records])
if job.elected:
    with (Path(folder) / "saves").open("a") as saves:
        saves.write(f"{rdzv_id} {job.model_sha256}\\n")
(Path(folder) / name).write_text(json.dumps(got))
"""

#: A loop of TensorFlow 2 with batches enough for three processes.
TAPE = """
import numpy as np
import tensorflow as tf
from ebbflow.elastic import ElasticBroadcastObject, elastic_allreduce, run
import keras

x = np.random.default_rng(3).normal(size=(400, 6)).astype(np.float32)
y = (x.sum(1) > 0).astype(np.int64)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

@elastic_allreduce
def train_step(model, optimizer, features, labels):
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(features, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))

def elastic_train(dataset):
    keras.utils.set_random_seed(7)
    layers = [
        keras.Input((6,)),
        keras.layers.Dense(8, activation="tanh", name="hidden"),
        keras.layers.BatchNormalization(name="normal"),
        keras.layers.Dropout(0.3, name="drop"),
        keras.layers.Dense(2, name="out"),
    ]
    model = keras.Sequential(layers, name="network")
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    ElasticBroadcastObject.set_model(model)
    ElasticBroadcastObject.set_optimizer(optimizer)
    for features, labels in dataset:
        train_step(model, optimizer, features, labels)

run(elastic_train, (x, y), epochs=3, micro=8, effective=32, seed=5, name="tape")
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


# S1-01, S2-25, S3-03, S3-06, S3-11
def test_one_and_three_processes_with_one_killed_give_the_same_bits(
    shared: Place,
) -> None:
    alone = Script(None, TRAIN, *ARGUMENTS, fresh=True).result()
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


# S0-06, S1-02, S1-11, S3-10
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


# S1-08, S1-10
def test_a_checkpoint_gives_the_first_weights(shared: Place, folder: Path, drawn: str) -> None:
    path, weights = folder / "script.py", str(folder / FIRST)
    assert shared.script(path, "8", "loaded", weights, "").result()["sha"] == drawn


def records_of(path: Path) -> dict[tuple[int, int], list[int]]:
    """Return the records of each batch that a process got, by epoch and microbatch."""
    return {(epoch, number): records for epoch, number, records in json.loads(path.read_text())}


# S1-03, S1-04, S1-05, S1-13, S1-15
def test_processes_with_one_id_share_the_records_of_each_epoch_out(
    shared: Place, tmp_path: Path
) -> None:
    path = tmp_path / "script.py"
    path.write_text(TORCHELASTIC)
    address = shared.cluster.url.removeprefix("http://")

    def begun(rdzv_id: str, endpoint: str, name: str, gate: str = "none") -> Script:
        # Without the variable that names a master.
        script = Script(None, path, rdzv_id, endpoint, str(tmp_path), name, gate=gate)
        shared.scripts.append(script)
        return script

    alone = begun("alone", "", "of alone").result()
    first = begun("lab", address, "of first", gate="4")
    # It has the fifth batch in its hands.
    first.arrive()
    second = begun("lab", address, "of second", gate="join")
    second.arrive()
    shared.wait_for_workers("lab", 2)
    second.go()
    # The first one waits, so the second one gave some of them.
    shared.wait_for_more("lab", 4)
    # Another id is another job, for which the two others do nothing.
    other = begun("other", address, "of other").result()
    first.go()
    two = [first.result(), second.result()]
    assert {process["sha"] for process in (*two, other)} == {alone["sha"]}

    numbers = {(number // 12, number) for number in range(3 * 12)}
    for name in ("of alone", "of other"):
        assert records_of(tmp_path / name).keys() == numbers
    mine, theirs = records_of(tmp_path / "of first"), records_of(tmp_path / "of second")
    assert mine and theirs and mine.keys() | theirs.keys() == numbers
    # A batch that both computed, since one of them was slow, has the same records in both.
    assert {**mine, **theirs} == {**theirs, **mine} == records_of(tmp_path / "of alone")
    for epoch in range(3):
        batches = [records for of, records in {**mine, **theirs}.items() if of[0] == epoch]
        assert sorted(record for batch in batches for record in batch) == list(range(96))
    saves = (tmp_path / "saves").read_text().split()
    assert sorted(saves[::2]) == ["alone", "lab", "other"] and set(saves[1::2]) == {alone["sha"]}


# S3-04
def test_a_tape_in_several_processes_of_which_one_is_killed_gives_the_same_bits(
    shared: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_there("keras", "tensorflow")
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    path = tmp_path / "tape.py"
    path.write_text(TAPE)
    alone = Script(None, path, fresh=True).result()
    two = shared.one_killed_and_two_that_stay("tape", path)
    assert [process["sha"] for process in two] == [alone["sha"]] * 2
    assert [process["numerics"] for process in two] == [alone["numerics"]] * 2
    assert sorted(process["elected"] for process in two) == [False, True]
    # 50 batches of 8 records in an epoch.
    assert alone["steps"] == 150 and all(process["steps"] > 0 for process in two)


def test_the_example_reaches_its_number() -> None:
    assert Script(None, TRAIN).result()["metrics"]["accuracy"] >= 0.9
