"""`ebbflow.data`: data files that Ebbflow reads, as the records of a loop."""

from __future__ import annotations

import pickle
import subprocess
from pathlib import Path
from typing import Any

import pytest

from .conftest import EBB, Place, Script, needs, needs_there

torch = needs("torch")

import ebbflow  # noqa: E402
import numpy as np  # noqa: E402
from ebbflow import errors  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import (  # noqa: E402
    ConcatDataset,
    DataLoader,
    StackDataset,
    Subset,
    TensorDataset,
)

LOSS = nn.CrossEntropyLoss()

#: The loop of `train`, as a script.
SCRIPT = """
import sys
import torch, ebbflow
from torch import nn

folder, name = sys.argv[1:]

def records(what):
    files = {"x": f"{folder}/{what}-x.npy", "y": f"{folder}/{what}-y.npy"}
    return ebbflow.data.source(files, format="npy", inputs=["x"], label="y")

torch.manual_seed(7)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
loss = nn.CrossEntropyLoss()
with ebbflow.join(
    model, optimizer, records("train"), records("eval"), micro=8, effective=16, epochs=3, seed=5,
    name=name,
) as job:
    for epoch in job.epochs():
        for batch in epoch:
            job.step(loss(model(batch.x), batch.y))
        job.evaluate(lambda batch: {"loss": loss(model(batch.x), batch.y)})
"""


#: A loop in JAX, on the files or on arrays.
IN_JAX = """
import functools, sys
import ebbflow, ebbflow.jax
import jax, optax
import numpy as np

folder, kind = sys.argv[1:]
files = {"x": f"{folder}/train-x.npy", "y": f"{folder}/train-y.npy"}
data = tuple(np.load(file) for file in files.values())
if kind == "files":
    data = ebbflow.data.source(files, format="npy", inputs=["x"], label="y")
params = {"w": np.zeros((6, 3), np.float32), "b": np.zeros(3, np.float32)}
optimizer = functools.partial(optax.adam, 1e-2)

def loss(params, x, y):
    outputs = x @ params["w"] + params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(outputs, y).mean()

gradients = jax.jit(jax.value_and_grad(loss))
with ebbflow.jax.join(params, optimizer, data, epochs=2, micro=10) as job:
    for epoch in job.epochs():
        for x, y in epoch:
            assert isinstance(x, np.ndarray)
            job.step(*gradients(job.params, x, y))
"""


def arrays(records: int, seed: int) -> dict[str, Any]:
    x = np.random.default_rng(seed).normal(size=(records, 6)).astype(np.float32)
    return {"x": x, "y": (x.sum(1) > 0).astype(np.int64) + (x[:, 0] > 1)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with records: those of `train` and `eval` as npy, and of `train` as parquet."""
    folder = tmp_path_factory.mktemp("data")
    for what, records, seed in [("train", 100, 3), ("eval", 20, 4)]:
        for name, column in arrays(records, seed).items():
            np.save(folder / f"{what}-{name}.npy", column)
    np.savez(folder / "train.npz", **arrays(100, 3))
    shards = ["--to", "parquet", "--records-per-shard", "30", "--out", str(folder / "parquet")]
    convert = [str(EBB), "data", "convert", str(folder / "train.npz"), *shards]
    subprocess.run(convert, check=True, stdout=subprocess.PIPE)
    return folder


def npy(folder: Path, what: str = "train", **settings: Any) -> ebbflow.data.Source:
    files = {name: folder / f"{what}-{name}.npy" for name in "xy"}
    return ebbflow.data.source(files, **{"format": "npy", "inputs": ["x"], "label": "y"} | settings)


def tensors(what: str) -> TensorDataset:
    columns = arrays(100, 3) if what == "train" else arrays(20, 4)
    return TensorDataset(torch.from_numpy(columns["x"]), torch.from_numpy(columns["y"]))


def train(data: Any, evaluation: Any = None, **options: Any) -> tuple[ebbflow.Session, list[Any]]:
    """Train to the end; returns the job and (epoch, records) of each batch, sorted."""
    torch.manual_seed(7)
    features = options.pop("features", 6)
    model = nn.Sequential(nn.Linear(features, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if "scheduler" in options:
        options["scheduler"] = options["scheduler"](optimizer)
    seen: list[Any] = []

    def loss_of(batch: ebbflow.Batch) -> Any:
        return LOSS(model(batch.x), batch.y.long())

    given: dict[str, Any] = {"micro": 8, "effective": 16, "epochs": 3, "seed": 5} | options
    with ebbflow.join(model, optimizer, data, evaluation, **given) as job:
        for epoch in job.epochs():
            for batch in epoch:
                assert len(batch) == len(batch.records) == len(batch.x) == len(batch.y)
                seen.append((epoch.number, batch.records))
                job.step(loss_of(batch))
            if job._evaluation is not None:
                job.evaluate(lambda batch: {"loss": loss_of(batch)})
    return job, sorted(seen)


def table(folder: Path, *broken: int) -> Path:
    """Write a CSV file with columns `a`, `b`, `y` whose records `broken` have no `a`."""
    rows = [f"{'NA' if at in broken else at / 10},{-at},{at % 3}\n" for at in range(40)]
    path = folder / "table.csv"
    path.write_text("a,b,y\n" + "".join(rows))
    return path


@pytest.fixture(scope="module")
def from_files(folder: Path) -> tuple[ebbflow.Session, list[Any]]:
    """Give what one process finds in the files of npy."""
    return train(npy(folder), npy(folder, "eval"))


def test_files_give_the_bits_of_the_same_records_as_tensors(
    from_files: tuple[ebbflow.Session, list[Any]],
) -> None:
    (job, seen), (other, seen_there) = from_files, train(tensors("train"), tensors("eval"))
    assert seen == seen_there
    for epoch in range(3):
        records = [record for number, batch in seen for record in batch if number == epoch]
        assert sorted(records) == list(range(100))
    assert job.model_sha256 == other.model_sha256
    assert job.metrics == other.metrics and len(job.history) == 3


def test_shards_of_parquet_give_the_bits_of_arrays(
    folder: Path, from_files: tuple[ebbflow.Session, list[Any]]
) -> None:
    settings: dict[str, Any] = {"format": "parquet", "inputs": ["x"], "label": "y"}
    source = ebbflow.data.source(folder / "parquet" / "*.parquet", **settings)
    assert len(source) == 100
    job, seen = train(source)
    assert seen == from_files[1]
    assert job.model_sha256 == from_files[0].model_sha256
    lanes = ebbflow.data.source(
        folder / "parquet" / "*.parquet", shuffle="window", window=8, interleave=2, **settings
    )
    _, seen = train(lanes, epochs=1)
    assert sorted(record for _, batch in seen for record in batch) == list(range(100))
    assert seen != [batch for batch in from_files[1] if batch[0] == 0]


def test_one_process_and_two_of_a_cluster_give_the_bits_of_one_alone(
    shared: Place, folder: Path, from_files: tuple[ebbflow.Session, list[Any]], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    one = shared.script(script, str(folder), "one").result()
    two: list[Script] = [shared.script(script, str(folder), "two", gate="join") for _ in range(2)]
    for process in two:
        process.arrive()
    shared.wait_for_workers("two", 2)
    for process in two:
        process.go()
    found = [one, *(process.result() for process in two)]
    alone, _ = from_files
    assert {process["sha"] for process in found} == {alone.model_sha256}
    assert all(process["metrics"] == alone.metrics for process in found)


def test_a_loop_in_jax_gets_arrays(folder: Path, tmp_path: Path) -> None:
    needs_there("jax", "optax")
    script = tmp_path / "script.py"
    script.write_text(IN_JAX)
    found = [Script(None, script, str(folder), kind).result() for kind in ("files", "arrays")]
    assert found[0]["sha"] == found[1]["sha"] and found[0]["steps"] == 20


def test_a_batch_has_columns_by_name_and_number_in_their_own_types(folder: Path) -> None:
    np.save(folder / "flag.npy", np.arange(100) % 2 == 0)
    np.save(folder / "half.npy", np.linspace(0, 1, 100).astype(np.float16))
    np.save(folder / "double.npy", np.linspace(0, 1, 200).reshape(100, 2))
    names = {"flag": "flag", "half": "half", "double": "double", "y": "train-y"}
    source = ebbflow.data.source(
        {name: folder / f"{file}.npy" for name, file in names.items()},
        format="npy",
        inputs=["flag", "half", "double"],
        label="y",
        dtypes={"half": "bf16"},
        shuffle="none",
    )
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ebbflow.join(model, optimizer, source, micro=50, epochs=1) as job:
        for epoch in job.epochs():
            for batch in epoch:
                flag, half, double, y = batch
                assert batch.data.names == ["flag", "half", "double", "labels"]
                assert batch["double"] is double and batch["labels"] is y
                with pytest.raises(KeyError, match="there are flag, half, double, labels"):
                    batch["labls"]
                kinds = [torch.bool, torch.float32, torch.float32, torch.int64]
                assert [column.dtype for column in batch] == kinds
                assert double.shape == (50, 2) and y.shape == flag.shape == (50,)
                expected = np.linspace(0, 1, 100).astype(np.float16)[batch.records]
                rounded = torch.from_numpy(expected.astype(np.float32)).bfloat16().float()
                assert torch.equal(half, rounded)
                assert torch.equal(y, torch.from_numpy(arrays(100, 3)["y"])[batch.records])
                job.step(LOSS(model(double), y))


def test_without_inputs_the_columns_are_features_and_record_by_record_there_for_a_look(
    tmp_path: Path,
) -> None:
    source = ebbflow.data.source(table(tmp_path), format="csv")
    assert len(source) == 40
    assert source[3]["features"].tolist() == pytest.approx([0.3, -3.0])
    assert float(source[-1]["labels"]) == 0.0
    label = source[np.int64(4)]["labels"]
    assert isinstance(label, np.ndarray) and label.shape == () and label == 1
    for wrong, kind in [(slice(2), "slice"), ("a", "str"), (1.0, "float")]:
        with pytest.raises(TypeError, match=f"needs the number of a record, found {kind}"):
            source[wrong]  # type: ignore[index]
    assert [float(record["labels"]) for record in source] == [at % 3 for at in range(40)]
    with pytest.raises(IndexError, match="record 40: there are 40"):
        source[40]
    job, seen = train(source, features=2)
    assert job.summary is not None and len(seen) == 15


def test_bad_records_are_skipped_or_end_the_job_as_in_a_job_file(tmp_path: Path) -> None:
    path = table(tmp_path, 7, 30)
    skipping: dict[str, Any] = {"missing": {"a": "skip"}, "max_bad": 0.1}
    job, seen = train(ebbflow.data.source(path, format="csv", **skipping), features=2)
    good = [record for record in range(40) if record not in (7, 30)]
    for epoch in range(3):
        records = [record for number, batch in seen for record in batch if number == epoch]
        assert sorted(records) == good
    assert job.summary is not None and job.summary["skipped"]["train"] == 2

    strict = ebbflow.data.source(path, format="csv")
    with pytest.raises(errors.SessionFailedError, match=r"column `a` of .* has no value"):
        train(strict, features=2)
    with pytest.raises(errors.RecordError, match=r"column `a` of .* has no value"):
        strict[7]


def test_files_that_are_missing_are_all_named_before_the_job_is_sent(
    folder: Path, tmp_path: Path, shared: Place
) -> None:
    files = {"x": tmp_path / "no-x.npy", "y": folder / "train-y.npy"}
    missing = ebbflow.data.source(files, format="npy", inputs=["x"], label="y")
    said = r"(?s)1 of 2 data files cannot be read.*no-x\.npy: No such file"
    together: dict[str, Any] = {"master": shared.cluster.url, "name": "missing"}
    for options in ({}, together):
        with pytest.raises(errors.SessionFailedError, match=said):
            train(missing, **options)
    assert not [job for job in shared.client.jobs() if job.job.startswith("missing")]


def test_measured_records_have_transforms_of_their_own(folder: Path) -> None:
    clip = {"x": [{"op": "clip", "min": -0.5, "max": 0.5}]}
    plain, _ = train(npy(folder), npy(folder, "eval"))
    clipped, _ = train(npy(folder), npy(folder, "eval", transforms=clip))
    assert plain.model_sha256 == clipped.model_sha256
    assert plain.metrics["loss"] != clipped.metrics["loss"]
    both, _ = train(npy(folder, transforms=clip), npy(folder, "eval", transforms=clip))
    trained, _ = train(npy(folder, transforms=clip), npy(folder, "eval"))
    assert both.model_sha256 == trained.model_sha256 != plain.model_sha256
    assert both.metrics["loss"] != trained.metrics["loss"]


def test_a_fraction_of_the_records_is_measured_and_does_not_train(folder: Path) -> None:
    job, seen = train(npy(folder, validation_fraction=0.2))
    assert len({record for _, batch in seen for record in batch}) == 80
    assert len(job.history) == 3 and "loss" in job.metrics


def test_a_scheduler_counts_the_steps_of_the_files(folder: Path) -> None:
    def halving(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    job, _ = train(npy(folder), scheduler=halving)
    other, _ = train(tensors("train"), scheduler=halving)
    assert job.model_sha256 == other.model_sha256


def test_settings_are_refused_with_the_words_of_a_job_file(tmp_path: Path) -> None:
    path = table(tmp_path)

    def refused(**settings: Any) -> str:
        with pytest.raises(errors.InvalidJobError) as found:
            len(ebbflow.data.source(path, **{"format": "csv"} | settings))
        return str(found.value)

    def begins(key: str, said: str) -> bool:
        return said.startswith(f"data.{key}: ") and "job specification" not in said

    said = refused(format="parket")
    assert begins("format", said) and "did you mean `parquet`?" in said
    said = refused(inptus=["a"])
    assert begins("inptus", said) and "did you mean `inputs`?" in said
    assert begins("window", refused(window="8")) and begins("label", refused(label=3))
    assert begins("transforms", refused(transforms={"a": "decode"}, shuffle="window"))
    assert begins("shuffle", said := refused(shuffle=1)) and "1 stands where a name is" in said
    assert begins("inputs", said := refused(inputs=["labels"])) and "rename the column" in said
    assert refused(inputs={"labels": "a"}) == said
    for given in (True, False):
        assert 'expected shuffle="records", "window" or "none"' in refused(shuffle=given)
    said = 'data.inputs = "wealth": no such column; there are a, b, y'
    assert said in refused(inputs=["wealth"])
    assert "data.window: only shuffle" in refused(window=5)
    assert "data.mixup: it makes probabilities" in refused(mixup={"classes": 3})
    with pytest.raises(errors.InvalidJobError, match="`records` beside the columns"):
        ebbflow.data.source({"x": {"files": "x.npy", "records": [0, 9]}}, format="npy")
    with pytest.raises(TypeError, match="has no counterpart in a job file"):
        ebbflow.data.source(path, format="csv", label=object())
    for kind in (np.float32, np.dtype("float32"), torch.float32):
        with pytest.raises(TypeError, match='name the type as a job file does, "f32"'):
            ebbflow.data.source(path, format="csv", dtypes={"a": kind})
    with pytest.raises(TypeError, match="no validation: give join eval_data"):
        ebbflow.data.source(path, format="csv", validation={"files": ["a.csv"]})
    with pytest.raises(errors.InvalidJobError, match="no file fits this pattern"):
        len(ebbflow.data.source(tmp_path / "*.tsv", format="csv"))
    # Without a look at the files the job finds it.
    wealth = ebbflow.data.source(path, format="csv", inputs=["wealth"])
    with pytest.raises(errors.SessionFailedError, match=said):
        train(wealth, features=2)


def test_a_job_reads_what_trains_and_what_is_measured_in_one_way(folder: Path) -> None:
    with pytest.raises(TypeError, match="train_data is Source and eval_data is TensorDataset"):
        train(npy(folder), tensors("eval"))
    with pytest.raises(TypeError, match=r"give both as ebbflow\.data\.source, or neither"):
        train(tensors("train"), npy(folder, "eval"))
    with pytest.raises(ValueError, match='eval_data: on_error = "skip", and train_data has none'):
        train(npy(folder), npy(folder, "eval", on_error="skip"))
    with pytest.raises(ValueError, match="validation_fraction: eval_data has"):
        train(npy(folder, validation_fraction=0.5), npy(folder, "eval"))
    with pytest.raises(ValueError, match="shuffle = False: the order is a setting of the data"):
        train(npy(folder), shuffle=False)
    with pytest.raises(ValueError, match=r"micro: missing; .* as in micro=8$"):
        train(npy(folder), micro=None)
    with pytest.raises(ValueError, match="as in micro=8, or a DataLoader"):
        train(tensors("train"), micro=None)


@pytest.mark.parametrize(
    "inside",
    [
        DataLoader,
        lambda source: Subset(source, [1]),
        lambda source: ConcatDataset([tensors("eval"), source]),
        lambda source: StackDataset(one=source),
        lambda source: DataLoader(Subset(ConcatDataset([source]), [1]), batch_size=4),
    ],
)
def test_a_source_inside_a_loader_or_a_data_set_is_refused(folder: Path, inside: Any) -> None:
    data = inside(npy(folder))
    kind = type(data).__name__
    with pytest.raises(TypeError, match=rf"train_data: {kind} would .* itself as train_data, and"):
        train(data)
    with pytest.raises(TypeError, match=rf"eval_data: {kind} would .* as in micro=8"):
        train(npy(folder), data)
    with pytest.raises(TypeError, match=rf"eval_data: {kind} would"):
        train(tensors("train"), data)


def test_relative_paths_start_from_the_working_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(folder)
    source = npy(Path())
    assert source.section["base"] == str(Path.cwd()) and "base" not in npy(folder).section
    monkeypatch.chdir(tmp_path)
    assert len(source) == 100
    elsewhere = npy(Path(), "eval")
    with pytest.raises(ValueError, match="eval_data: relative paths start from"):
        train(source, elsewhere)


def test_a_source_can_be_pickled_within_the_folder_of_its_paths(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"shuffle": "none", "dtypes": {"x": "f64"}}
    monkeypatch.chdir(folder)
    absolute, relative = npy(folder, **settings), npy(Path(), **settings)
    for source in (absolute, relative):
        again = pickle.loads(pickle.dumps(source))
        assert again.section == source.section and len(again) == 100
        assert np.array_equal(again[7]["x"], source[7]["x"])
    packed = pickle.dumps(relative)
    monkeypatch.chdir(tmp_path)
    assert len(pickle.loads(pickle.dumps(absolute))) == 100
    with pytest.raises(errors.InvalidJobError, match="of a pickled source start from"):
        pickle.loads(packed)
