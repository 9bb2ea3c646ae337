"""`ebbflow.estimator` with real processes. Ids are those of ``docs/behaviours.md``."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ebbflow import errors
from ebbflow.estimator import PyTorch, TrainingInput

from .conftest import needs, needs_there
from .test_launcher import WAITS

needs_there("torch")

# The process algo-2 trains alone until it kills itself with a batch in its hands, once, if it is
# given the path of a marker. The others begin when there is a file `lost` beside the marker.
SCRIPT = """
import argparse, json, os, signal, time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
parser.add_argument("--lr", type=float)
parser.add_argument("--marker", type=Path)
parser.add_argument("--model-dir", default=os.environ["SM_MODEL_DIR"])
parser.add_argument("--train", default=os.environ["SM_CHANNEL_TRAIN"])
args = parser.parse_args()
host = os.environ["SM_CURRENT_HOST"]
while args.marker and host != "algo-2" and not args.marker.with_name("lost").exists():
    time.sleep(0.02)

import numpy as np
import torch, ebbflow
from torch import nn
from network import Net

data = np.load(Path(args.train) / "train.npz")
x, y = torch.from_numpy(data["x"]), torch.from_numpy(data["y"])
source = torch.utils.data.TensorDataset(x, y)
torch.manual_seed(7)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
loss_of = nn.CrossEntropyLoss()
def measure(batch):
    output = model(batch.x)
    right = (output.argmax(1) == batch.y).float()
    return {"loss": loss_of(output, batch.y).item(), "accuracy": right.mean().item()}
with ebbflow.join(
    model, optimizer, source, source, micro=8, effective=32, epochs=args.epochs
) as job:
    for epoch in job.epochs():
        for batch in epoch:
            if args.marker and host == "algo-2" and not args.marker.exists():
                args.marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            job.step(loss_of(model(batch.x), batch.y))
        print(f"validation accuracy: {job.evaluate(measure)['accuracy']:.4f};", flush=True)
print("trained on", os.environ["OWN"], Path.cwd().name, job.model_sha256, flush=True)
if job.elected:
    torch.save(model.state_dict(), Path(args.model_dir) / "model.pth")
    (Path(os.environ["SM_OUTPUT_DATA_DIR"]) / "host").write_text(os.environ["SM_HOSTS"])
"""

#: The process algo-2 holds a batch while there is no marker.
HOLDS = SCRIPT.replace(
    "args.marker.touch()",
    # The parent of a process is the guard of its agent.
    'agent = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]; '
    'print("holds a batch in", os.uname().nodename, "of", agent, flush=True)',
).replace("os.kill(os.getpid(), signal.SIGKILL)", "time.sleep(600)")

NETWORK = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Linear(32, 2))
"""

METRICS = [{"Name": "accuracy", "Regex": r"accuracy: ([0-9.]+);"}]

#: Trains for a moment, and saves nothing.
QUICK = """
import torch, ebbflow

model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
source = torch.utils.data.TensorDataset(torch.zeros(8, 2), torch.zeros(8, 1))
with ebbflow.join(model, optimizer, source, micro=4, epochs=1) as job:
    for epoch in job.epochs():
        for batch in epoch:
            job.step(model(batch.x).mean())
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the jobs a folder for temporary files, and as many processes as a test likes."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("EBBFLOW_WORKERS_MAX", "4")
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "network.py").write_text(NETWORK)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "of the job"
    folder.mkdir()
    x = np.random.default_rng(3).normal(size=(200, 6)).astype(np.float32)
    np.savez(folder / "train.npz", x=x, y=(x.sum(axis=1) > 0).astype(np.int64))
    return folder


def estimator(
    source: Path,
    output: str | Path,
    count: int = 1,
    kind: str = "local",
    image: str | None = None,
    **more: Any,
) -> PyTorch:
    hyperparameters = {"epochs": 3, "lr": 0.01, **more}
    return PyTorch(
        "train.py",
        source,
        instance_count=count,
        instance_type=kind,
        image_uri=image,
        hyperparameters=hyperparameters,
        distribution={"smdistributed": {"dataparallel": {"enabled": True}}},
        metric_definitions=METRICS,
        output_path=output,
        environment={"OWN": "its own"},
    )


def script_of(tmp_path: Path, text: str, **options: Any) -> PyTorch:
    path = tmp_path / "mine.py"
    path.write_text(text)
    return PyTorch(str(path), output_path=tmp_path / "out", **options)


def sha256(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


# S2-01, S2-02, S2-03, S2-04, S2-05, S2-07, S2-08, S2-09, S2-11, S2-12, S2-38
def test_fit_trains_on_channels_streams_logs_and_leaves_one_model(
    tmp_path: Path,
    temporary: Path,
    source: Path,
    data: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import torch

    trained = estimator(source, tmp_path / "out", 2)
    train = TrainingInput(data.as_uri(), content_type="application/x-npz", input_mode="File")
    trained.fit({"train": train, "val": str(data / "train.npz")}, job_name="first")
    said = capsys.readouterr().out
    for worker in ("worker-0", "worker-1"):
        assert f"{worker} | trained on its own code " in said
    # A process that came late printed fewer lines than the one that came first.
    counts = {f"worker-{index}": said.count(f"worker-{index} | validation acc") for index in (0, 1)}
    first = max(counts, key=lambda worker: counts[worker])
    assert counts[first] == 3
    job = trained.latest_training_job
    assert job is not None and job.status == "Completed" and job.result is not None
    accuracies = [metric.value for metric in trained.metrics if metric.worker == first]
    assert len(trained.metrics) == sum(counts.values()) and len(accuracies) == 3
    assert {metric.metric_name for metric in trained.metrics} == {"accuracy"}
    assert accuracies[-1] == pytest.approx(job.result.final["accuracy"], abs=1e-4)
    assert job.final_metrics == {"accuracy": accuracies[-1]} and accuracies[-1] > 0.9
    assert trained.model_data == f"{tmp_path / 'out'}/first/output/model.tar.gz"
    with tarfile.open(trained.model_data) as tar:
        assert tar.getnames() == ["model.pth"]
        packed = tar.extractfile("model.pth")
        assert packed is not None
        weights = torch.load(io.BytesIO(packed.read()))
    kept = job.result.state_dict("torch")
    assert weights.keys() == kept.keys()
    assert all(torch.equal(weights[name], kept[name]) for name in kept)
    assert job.output_data is not None
    with tarfile.open(job.output_data) as tar:
        host = tar.extractfile("host")
        assert host is not None and json.loads(host.read()) == ["algo-1", "algo-2"]
    run = tmp_path / "out/first/run"
    assert json.loads((run / "summary.json").read_text())["status"] == "succeeded"
    assert "trained on" in (run / "logs/worker-1.log").read_text()
    assert list(temporary.iterdir()) == [], "the cluster leaves nothing but its output"
    with pytest.raises(errors.InvalidJobError, match="choose another job_name"):
        trained.fit({"train": train}, job_name="first")


# S2-20, S2-25
def test_a_killed_process_is_started_again_and_the_model_has_the_same_bytes(
    tmp_path: Path, source: Path, data: Path
) -> None:
    alone = estimator(source, (tmp_path / "alone").as_uri())
    alone.fit({"train": data}, logs=False)
    assert alone.model_data.startswith("file:///")
    disturbed = estimator(source, tmp_path / "disturbed", 2, marker=str(tmp_path / "marker"))
    disturbed.fit({"train": data}, wait=False)
    job = disturbed.latest_training_job
    assert job is not None
    lines = []
    for line in job.logs():
        lines.append(line)
        if line.startswith("worker-1 was ended by signal 9; it is started again"):
            (tmp_path / "lost").touch()
    job.wait(logs=False)
    assert (tmp_path / "marker").exists()
    assert (tmp_path / "lost").exists(), lines
    assert sha256(disturbed.model_data) == sha256(alone.model_data.removeprefix("file://"))


# S2-08
def test_a_script_that_fails_is_told_with_its_last_lines(tmp_path: Path, temporary: Path) -> None:
    failing = script_of(tmp_path, "print('begun')\nraise RuntimeError('no such column: price')\n")
    with pytest.raises(errors.ScriptError, match="no such column: price") as caught:
        failing.fit(logs=None, job_name="wrong")
    assert str(caught.value).startswith("mine.py: worker-0 ended with exit code 1")
    assert caught.value.lines[-1] == "RuntimeError: no such column: price"
    assert any("mine.py" in line and "line 2" in line for line in caught.value.lines)
    assert "price" in (tmp_path / "out/wrong/run/logs/worker-0.log").read_text()
    assert caught.value.logs == tmp_path / "out/wrong/run/logs"
    job = failing.latest_training_job
    assert job is not None and job.status == "Failed"
    assert not (tmp_path / "out/wrong/output").exists()
    with pytest.raises(errors.Error, match="no training is complete"):
        _ = failing.model_data
    assert list(temporary.iterdir()) == []


# S2-22
def test_a_script_without_join_is_told_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(errors.ScriptError, match=r"no process has joined.*ebbflow\.join"):
        script_of(tmp_path, "print('trained alone')").fit(logs=False)


# S2-09
def test_a_script_that_saves_nothing_leaves_the_model_of_its_job(tmp_path: Path) -> None:
    trained = script_of(tmp_path, QUICK)
    trained.fit(logs=False)
    job = trained.latest_training_job
    assert job is not None and job.result is not None and job.output_data is None
    with tarfile.open(trained.model_data) as tar:
        assert tar.getnames() == ["model.safetensors"]
        packed = tar.extractfile("model.safetensors")
        assert packed is not None
        assert hashlib.sha256(packed.read()).hexdigest() == job.result.model_sha256


# S2-01, S2-06, S4-05
def test_data_and_output_may_be_remote(
    tmp_path: Path, temporary: Path, source: Path, data: Path
) -> None:
    fsspec = needs("fsspec")
    store = fsspec.filesystem("memory")
    place = f"/bucket-{tmp_path.name}"
    store.put_file(str(data / "train.npz"), f"{place}/data/train.npz")
    trained = estimator(source, f"memory:/{place}/out")
    trained.fit({"train": f"memory:/{place}/data"}, logs=False, job_name="far")
    assert trained.model_data == f"memory:/{place}/out/far/output/model.tar.gz"
    with tarfile.open(fileobj=store.open(f"{place}/out/far/output/model.tar.gz")) as tar:
        assert tar.getnames() == ["model.pth"]
    assert b"trained on" in store.cat_file(f"{place}/out/far/run/logs/worker-0.log")
    assert list(temporary.iterdir()) == []
    failing = PyTorch("train.py", source, output_path=f"memory:/{place}/out")
    with pytest.raises(errors.ScriptError, match="KeyError: 'SM_CHANNEL_TRAIN'"):
        failing.fit(logs=False, job_name="wrong")
    assert b"KeyError" in store.cat_file(f"{place}/out/wrong/run/logs/worker-0.log")


# S2-10
def test_a_cluster_that_is_too_large_is_refused_and_nothing_is_written(
    tmp_path: Path,
    temporary: Path,
    source: Path,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large = estimator(source, tmp_path / "out", 2)
    monkeypatch.setenv("EBBFLOW_WORKERS_MAX", "1")
    with pytest.raises(errors.ResourceLimitError, match="2 processes, where 1 may be"):
        large.fit({"train": data})
    monkeypatch.delenv("EBBFLOW_WORKERS_MAX")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    with pytest.raises(errors.ResourceLimitError, match="the host has 1 processors"):
        large.fit({"train": data})
    assert not (tmp_path / "out").exists() and list(temporary.iterdir()) == []
    assert large.latest_training_job is None


def test_a_training_ends_after_max_run(tmp_path: Path, temporary: Path) -> None:
    # Shorter than any start, so it does not depend on speed.
    slow = script_of(tmp_path, WAITS, max_run=0.001)
    with pytest.raises(errors.RunTimeoutError, match=r"max_run = 0\.001 s"):
        slow.fit(logs=False)
    job = slow.latest_training_job
    assert job is not None and job.status == "Stopped"
    assert list(temporary.iterdir()) == []


# S2-07
def test_a_training_that_is_stopped_ends_its_cluster(tmp_path: Path) -> None:
    waiting = script_of(tmp_path, WAITS)
    waiting.fit(wait=False)
    job = waiting.latest_training_job
    assert job is not None and job.status == "InProgress"
    logs = job.logs()
    assert any(line.startswith("worker-0 | process") for line in logs)
    job.stop()
    with pytest.raises(errors.JobCancelledError):
        job.wait(logs=False)
    assert job.status == "Stopped"
    list(logs)


# S2-07
def test_ctrl_c_ends_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = script_of(tmp_path, WAITS)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    # The first line that is printed.
    monkeypatch.setattr("builtins.print", interrupted)
    with pytest.raises(KeyboardInterrupt):
        waiting.fit()
    job = waiting.latest_training_job
    assert job is not None
    with pytest.raises(errors.JobCancelledError):
        job.wait(logs=False)
    names = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith("launch ") for name in names), names
