"""`ebbflow.estimator` with jobs of a real Slurm. Ids are those of ``docs/behaviours.md``."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from ebbflow import errors

from .conftest import needs_there
from .test_estimator_cluster import HOLDS, estimator, sha256
from .test_estimator_cluster import data as data
from .test_estimator_cluster import source as source
from .test_estimator_cluster import temporary as temporary
from .test_launchers_slurm import jobs
from .test_launchers_slurm import slurm as slurm

needs_there("torch")


# S2-20
def test_a_lost_job_of_slurm_is_replaced_and_the_model_has_the_same_bytes(
    tmp_path: Path, temporary: Path, source: Path, data: Path, slurm: Path
) -> None:
    (source / "train.py").write_text(HOLDS)
    alone = estimator(source, tmp_path / "alone")
    alone.fit({"train": data}, logs=False)
    marker = data / "marker"
    output = tmp_path / "disturbed"
    disturbed = estimator(source, output, 2, kind="slurm", marker=str(marker))
    disturbed.fit({"train": data}, wait=False, job_name="first")
    job = disturbed.latest_training_job
    assert job is not None
    lines = []
    for line in job.logs():
        lines.append(line)
        held = re.fullmatch(r"train-1-1 \| holds a batch in \S+ of (\d+)", line)
        if held is not None:
            marker.touch()
            os.kill(int(held[1]), signal.SIGKILL)
        if re.fullmatch(r"agent-\d has ended, and Slurm says .*; it is started again", line):
            (data / "lost").touch()
    job.wait(logs=False)
    assert (data / "lost").exists(), lines
    assert sha256(disturbed.model_data) == sha256(alone.model_data)
    assert any(line.startswith("train-1-0 | trained on its own code ") for line in lines), lines
    assert job.final_metrics["accuracy"] > 0.9
    assert {metric.worker for metric in disturbed.metrics} <= {"worker-0", "worker-1"}
    assert "trained on" in (output / "first/run/logs/train-1-0.log").read_text()
    assert jobs("%i") == []
    assert [path.name for path in output.iterdir()] == ["first"], "the folder of the job is gone"
    assert list(temporary.iterdir()) == []


# S2-10
def test_more_jobs_than_the_operator_allows_are_refused(
    tmp_path: Path, source: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EBBFLOW_WORKERS_MAX", "1")
    large = estimator(source, tmp_path / "out", 2, kind="slurm")
    with pytest.raises(errors.ResourceLimitError, match="of slurm: 2 processes, where 1 may be"):
        large.fit({"train": data})
    assert not (tmp_path / "out").exists()
