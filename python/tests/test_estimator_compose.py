"""`ebbflow.estimator` and `ebb run --on compose` with real containers.

Ids are those of ``docs/behaviours.md``. Docker and its Compose must be there.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import ebbflow
import pytest
from ebbflow import errors
from ebbflow.launchers.compose import engine_cpus

from .conftest import needs_there
from .docker import docker, environment, image_for_this_python, needs_compose
from .test_estimator_cluster import HOLDS, estimator, sha256
from .test_estimator_cluster import data as data
from .test_estimator_cluster import source as source
from .test_estimator_cluster import temporary as temporary
from .test_launcher import WAITS

needs_there("torch")

WRITES = """try:
    (Path(args.train) / "written").touch()
except OSError as error:
    print("refused:", error.strerror, flush=True)
data = np.load"""

#: The Python of the tests, for containers.
PYTHON = [f"{path}:ro" for path in environment().values()]

LABEL = "com.docker.compose.project"


@pytest.fixture(scope="module")
def image() -> Iterator[str]:
    """Give an image for the interpreter of the tests."""
    needs_compose()
    with image_for_this_python() as name:
        yield name


def left(kind: str, project: str) -> list[str]:
    """Return what the engine has of a project."""
    every = ["--all"] if kind == "container" else []
    return docker(kind, "ls", *every, "--quiet", "--filter", f"label={LABEL}={project}").split()


def project_of(run: Path) -> str:
    """Return the name of a launch, which the containers in its file have."""
    services = json.loads((run / "compose.yaml").read_text())["services"]
    name: str = services["master-0"]["container_name"]
    return name.removesuffix("-master-0")


# S1-12, S2-20
def test_a_killed_container_is_started_again_and_the_model_has_the_same_bytes(
    tmp_path: Path, temporary: Path, source: Path, data: Path, image: str
) -> None:
    (source / "train.py").write_text(HOLDS.replace("data = np.load", WRITES))
    alone = estimator(source, tmp_path / "alone")
    alone.fit({"train": data}, logs=False)
    (data / "written").unlink()
    marker = data / "marker"
    disturbed = estimator(
        source, tmp_path / "disturbed", 2, kind="compose", image=image, marker=str(marker)
    )
    # Containers see channels at their own paths, so their Python may come this way.
    disturbed.fit({"train": data, **environment()}, wait=False, job_name="first")
    job = disturbed.latest_training_job
    assert job is not None
    lines = []
    for line in job.logs():
        lines.append(line)
        held = re.fullmatch(r"train-1-1 \| holds a batch in (\w+) of \d+", line)
        if held is not None:
            marker.touch()
            docker("kill", held[1])
        if re.fullmatch(r"agent-\d ended with exit code 137; it is started again", line):
            (data / "lost").touch()
    job.wait(logs=False)
    assert (data / "lost").exists(), lines
    assert sha256(disturbed.model_data) == sha256(alone.model_data)
    with tarfile.open(disturbed.model_data) as tar:
        assert tar.getnames() == ["model.pth"]
    # The channel is a folder of this host that no container may write.
    assert "train-1-0 | refused: Read-only file system" in lines
    assert not (data / "written").exists()
    assert any(line.startswith("train-1-0 | trained on its own code ") for line in lines), lines
    numbers = sum("| validation accuracy: " in line for line in lines)
    assert len(disturbed.metrics) == numbers >= 3
    assert {metric.worker for metric in disturbed.metrics} <= {"worker-0", "worker-1"}
    assert job.final_metrics["accuracy"] > 0.9
    run = tmp_path / "disturbed/first/run"
    assert "trained on" in (run / "logs/train-1-0.log").read_text()
    assert list(temporary.iterdir()) == [], "the cluster leaves nothing but its output"
    for kind in ("container", "network", "volume"):
        assert left(kind, project_of(run)) == []


# S2-10
def test_more_containers_than_processors_are_refused_and_nothing_is_started(
    tmp_path: Path,
    temporary: Path,
    source: Path,
    data: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needs_compose()
    cpus = engine_cpus()
    assert docker("info", "--format", "{{.NCPU}}").strip() == str(cpus)
    large = estimator(source, tmp_path / "out", cpus + 1, kind="compose", image="of nobody")
    monkeypatch.delenv("EBBFLOW_WORKERS_MAX")
    with pytest.raises(errors.ResourceLimitError, match=f"the Docker engine has {cpus} processors"):
        large.fit({"train": data})
    monkeypatch.setenv("EBBFLOW_WORKERS_MAX", "1")
    with pytest.raises(
        errors.ResourceLimitError, match=rf"of compose: {cpus + 1} processes, where 1 may be"
    ):
        large.fit({"train": data})
    assert not (tmp_path / "out").exists() and list(temporary.iterdir()) == []


def test_an_image_without_ebbflow_is_told_with_what_to_do(
    tmp_path: Path, temporary: Path, source: Path, data: Path
) -> None:
    needs_compose()
    empty = f"ebbflow-test-empty:{os.getpid()}"
    subprocess.run(["docker", "import", "-", empty], input=bytes(10240), check=True)
    try:
        trained = estimator(source, tmp_path / "out", kind="compose", image=empty)
        with pytest.raises(
            errors.InvalidJobError, match=rf"image '{empty}'.*cannot import ebbflow.*pip install"
        ):
            trained.fit({"train": data})
    finally:
        docker("image", "rm", empty)
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("force", [False, True])
def test_containers_are_removed_with_their_launch(tmp_path: Path, image: str, force: bool) -> None:
    script = tmp_path / "code/train.py"
    script.parent.mkdir()
    script.write_text(WAITS)
    out = tmp_path / "out"
    launch = ebbflow.launch(script, out=out, on="compose", image=image, mounts=PYTHON)
    next(line for line in launch.logs() if "| process" in line)
    project = project_of(out)
    assert len(left("container", project)) == 3, "a master, a ps and an agent"
    launch.cancel(force=force)
    with pytest.raises(errors.JobCancelledError):
        launch.wait()
    while force and left("network", project):
        # Nobody waits for the guard of a launcher that was killed. The network is removed last.
        time.sleep(0.1)
    assert left("container", project) == [] == left("network", project)


def test_what_compose_refuses_is_told(
    tmp_path: Path, image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(WAITS)
    out = tmp_path / "out"
    with pytest.raises(errors.InvalidJobError, match="--image: missing; Compose needs an image"):
        ebbflow.launch(script, out=out, on="compose").wait()
    with pytest.raises(errors.ScriptError, match="--gpu: not with --on compose"):
        ebbflow.launch(script, out=out, on="compose", image=image, gpu=True).wait()
    missing = tmp_path / "missing"
    with pytest.raises(errors.InvalidJobError, match=f"--mount {missing}: .*no such file"):
        ebbflow.launch(script, out=out, on="compose", image=image, mounts=[missing]).wait()
    many = engine_cpus() + 1
    with pytest.raises(errors.ScriptError, match="Compose refuses agent-0: "):
        ebbflow.launch(script, out=out, on="compose", image=image, mounts=PYTHON, cpus=many).wait()
    assert left("container", project_of(out)) == []
    with monkeypatch.context() as without:
        without.setenv("PATH", str(tmp_path))
        with pytest.raises(errors.ScriptError, match="no docker on PATH"):
            ebbflow.launch(script, out=out, on="compose", image=image).wait()
