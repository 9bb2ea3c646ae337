"""TorchScript jobs on workers of a cluster that the wheel started."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import ebbflow
import pytest
from ebbflow import errors

from .conftest import DIGITS, EBB, Cluster, Place, Process, needs_there

STEPS = Path(__file__).parents[2] / "tests/golden/torch_steps.toml"

#: A job of many microbatches, which rests while fewer than two workers are there.
LONG = {"epochs": 200, "batch.micro": 16, "fleet.workers.min": 2}


def worker(cluster: Cluster, name: str, masters: str) -> Process:
    arguments = ["--master", masters, "--device", "cpu", "--torchscript"]
    return cluster.start(name, "worker", *arguments)


def test_workers_train_the_bits_of_run_after_one_of_them_was_killed(tmp_path: Path) -> None:
    needs_there("torch")
    here, there = tmp_path / "here", tmp_path / "there"
    changes = [part for key, value in LONG.items() for part in ("--set", f"{key}={value}")]
    command = [str(EBB), "run", str(STEPS), *changes, "--out", str(here)]
    subprocess.run(command, check=True, timeout=300, capture_output=True)
    with (
        socket.socket() as silent,
        Cluster(tmp_path, workers=0) as cluster,
        Place(cluster) as place,
    ):
        # Nobody listens at the first of two masters.
        silent.bind(("127.0.0.1", 0))
        masters = f"http://127.0.0.1:{silent.getsockname()[1]},{cluster.url}"
        killed = worker(cluster, "killed", masters)
        worker(cluster, "stays", masters)
        job = place.client.submit(STEPS, changes=LONG, out=there)
        place.wait_for_workers(job.name, 2)
        place.wait_for_more(job.name, 32)
        killed.stop()
        assert not job.status().is_end
        worker(cluster, "comes", masters)
        result = job.wait(progress=False)
        # Ebbflow's own networks have the bits of workers without the flag.
        own = place.client.submit(DIGITS, changes={"epochs": 1}).wait(progress=False)
    expected = ebbflow.Result.read(here)
    assert result.model_sha256 == expected.model_sha256
    assert result.final == expected.final
    assert (there / "model.pt").is_file()
    classes = [json.loads((out / "summary.json").read_text())["numerics"] for out in (here, there)]
    assert classes[0] == classes[1]
    assert classes[0][0]["facts"].startswith("TorchScript, torch ")
    alone = ebbflow.run(DIGITS, changes={"epochs": 1}, progress=False)
    assert own.model_sha256 == alone.model_sha256


def test_a_worker_without_the_flag_says_how_to_start_it(client: ebbflow.Client) -> None:
    job = client.submit(STEPS, changes={"limits.attempts_max": 1})
    with pytest.raises(errors.JobFailedError, match="start it with `ebb worker --torchscript`"):
        job.wait(progress=False)


def test_without_torch_a_worker_with_the_flag_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\")\n")
    # It ends before it calls a master.
    command = [str(EBB), "worker", "--torchscript", "--device", "cpu", "--master", "127.0.0.1:9"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        command, env=environment, timeout=300, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "No module named 'torch'; pip install torch==2.11.0" in done.stderr
