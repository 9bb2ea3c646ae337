"""`data_patience`: how long a failed request for data by URL is repeated."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ebbflow
import pytest
from ebbflow import errors

from .conftest import EBB, needs

#: What a worker says that has no patience: it makes the least number of attempts.
LEAST = r"the server stays away: .*\(attempt 4, after .* set a longer data_patience"

JOB = """
name = "away"
epochs = 1
model = {{ builtin = "softmax" }}
data = {{ format = "csv", train = {{ features = ["{url}"] }}, validation_fraction = 0.5 }}
batch = {{ micro = 4 }}
optimizer = {{ kind = "sgd", learning_rate = 0.1 }}
limits = {{ attempts_max = 1 }}
"""


@pytest.fixture
def url() -> Iterator[str]:
    """Give the URL of a file on a web server that is away."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{silent.getsockname()[1]}/x.csv"


@pytest.fixture
def job(url: str, tmp_path: Path) -> Path:
    """Give a job file with that data file."""
    path = tmp_path / "job.toml"
    path.write_text(JOB.format(url=url))
    return path


def test_workers_of_run_have_it(job: Path) -> None:
    with pytest.raises(errors.JobFailedError, match=LEAST):
        ebbflow.run(job, data_patience="0s", progress=False)
    with pytest.raises(errors.InvalidJobError, match="data_patience: `11m`: at most 600s"):
        ebbflow.run(job, data_patience="11m")


@pytest.mark.parametrize("verb", ["run", "evaluate", "predict"])
def test_workers_of_the_program_have_it(verb: str, job: Path, tmp_path: Path) -> None:
    weights = tmp_path / "weights.safetensors"
    # No tensor.
    weights.write_bytes((2).to_bytes(8, "little") + b"{}")
    more = {
        "run": ["--out", str(tmp_path / "out")],
        "evaluate": ["--model", str(weights)],
        "predict": ["--model", str(weights), "--out", str(tmp_path / "p.jsonl")],
    }
    command = [str(EBB), verb, str(job), "--json", "--data-patience", "0s", *more[verb]]
    done = subprocess.run(command, timeout=300, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "(attempt 4, after " in done.stdout, done.stdout + done.stderr


def test_the_worker_of_a_loop_has_it(url: str) -> None:
    torch = needs("torch")
    model = torch.nn.Linear(1, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    source = ebbflow.data.source(url, format="csv")
    given: dict[str, Any] = {"micro": 4, "epochs": 1, "limits": {"attempts_max": 1}}
    with (
        ebbflow.join(model, optimizer, source, data_patience="0s", **given) as loop,
        pytest.raises(errors.SessionFailedError, match=LEAST),
    ):
        next(loop.epochs())
    with pytest.raises(ValueError, match="data_patience: `soon` is no duration"):
        ebbflow.join(model, optimizer, source, data_patience="soon", **given)
