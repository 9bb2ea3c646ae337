"""`ebb run SCRIPT.py --on kubernetes`: manifests that fit their schemas, and the calls of kubectl.

`kubectl.py` stands in for kubectl and for a cluster. No cluster has been asked.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import ebbflow
import pytest
from ebbflow import errors

from .conftest import EBB, needs_programs
from .test_launcher import SCRIPT, ended
from .test_launchers import losing, wait_for
from .test_scripts import code, trained_alone

pytest.importorskip("torch")

IMAGE = "registry.example/train:1"


def manifests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> Path:
    """Return the file that a launch without kubectl leaves."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with monkeypatch.context() as without:
        without.setenv("PATH", str(tmp_path))
        launch = ebbflow.launch(
            script, out=tmp_path / "out", on="kubernetes", image=IMAGE, workers=2, ps=2, **more
        )
        with pytest.raises(errors.ScriptError, match="no kubectl on PATH, so nothing was started"):
            launch.wait()
    return tmp_path / "out/kubernetes.yaml"


def test_manifests_fit_the_schemas_of_kubernetes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validator = os.environ.get("EBB_KUBERNETES_VALIDATE", "kubernetes-validate")
    needs_programs(validator, packages="kubernetes-validate of PyPI")
    path = manifests(tmp_path, monkeypatch, gpu=True, cpus=4)

    def validate(text: str) -> int:
        (tmp_path / "given.yaml").write_text(text)
        command = [validator, "--strict", "--quiet", "-k", "1.30.0", str(tmp_path / "given.yaml")]
        return subprocess.run(command, check=False, capture_output=True).returncode

    text = path.read_text()
    assert validate(text) == 0
    # A validator that accepts everything would be no check.
    for right, wrong in (("backoffLimit", "backOffLimit"), ('"port": 4700', '"port": [4700]')):
        assert right in text and validate(text.replace(right, wrong)) != 0


def test_manifests_have_every_role_and_flags_that_ebb_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = manifests(tmp_path, monkeypatch, gpu=True, cpus=4)
    objects = [json.loads(part) for part in path.read_text().split("---\n") if part]
    kinds = [found["kind"] for found in objects]
    assert sorted(kinds) == ["Job"] * 5 + ["NetworkPolicy", "Service"]
    launch = {found["metadata"]["labels"]["ebbflow/launch"] for found in objects}
    assert len(launch) == 1 and len({found["metadata"]["name"] for found in objects}) == 7
    pods = {
        found["metadata"]["labels"]["ebbflow/role"]: found["spec"]["template"]["spec"]
        for found in objects
        if found["kind"] == "Job"
    }
    assert sorted(pods) == ["agent-0", "agent-1", "master", "ps-0", "ps-1"]
    for name, pod in pods.items():
        (container,) = pod["containers"]
        verb, *arguments = container["args"]
        assert container["image"] == IMAGE
        help_of_verb = subprocess.run(
            [EBB, verb, "--help"], check=True, capture_output=True, text=True
        ).stdout.split()
        flags = [argument for argument in arguments if argument.startswith("--")]
        assert flags and all(flag in help_of_verb for flag in flags), flags
        is_agent = name.startswith("agent")
        assert container["resources"]["requests"] == {"cpu": "4" if is_agent else "1"}
        assert ("limits" in container["resources"]) == is_agent


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the stand-in for kubectl on the path, and return its folder."""
    programs, folder = tmp_path / "programs", tmp_path / "cluster"
    programs.mkdir()
    folder.mkdir()
    kubectl = programs / "kubectl"
    place = Path(__file__).parent / "kubectl.py"
    kubectl.write_text(f'#!/bin/sh\nexec {sys.executable} {place} "$@"\n')
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("KUBECTL_FOLDER", str(folder))
    return folder


def test_a_lost_pod_changes_no_bit(tmp_path: Path, cluster: Path) -> None:
    script = code(tmp_path, losing('worker == "1" and not (place / "held").exists()'))
    alone = trained_alone(script)
    launch = ebbflow.launch(
        script, [str(tmp_path)], workers=2, out=tmp_path / "out", on="kubernetes", image=IMAGE
    )
    process, agent = map(int, wait_for(tmp_path / "held", launch).split())
    os.kill(agent, signal.SIGKILL)
    again = next(line for line in launch.logs() if "it is started again" in line)
    assert "has ended (Failed: BackoffLimitExceeded)" in again
    (tmp_path / "lost").touch()
    result = launch.wait()
    assert result.status.state == "succeeded" and result.model_sha256 == alone
    ended(process)
    assert (cluster / "deleted").exists()


@pytest.mark.parametrize("force", [False, True])
def test_pods_are_deleted_with_their_launch(tmp_path: Path, cluster: Path, force: bool) -> None:
    script = tmp_path / "code/train.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    launch = ebbflow.launch(script, ["wait"], out=tmp_path / "out", on="kubernetes", image=IMAGE)
    process = int(next(line for line in launch.logs() if "| process" in line).split()[-1])
    launch.cancel(force=force)
    with pytest.raises(errors.JobCancelledError):
        launch.wait()
    while force and not (cluster / "deleted").exists():
        # Nobody waits for the guard of a launcher that was killed.
        time.sleep(0.05)
    assert (cluster / "deleted").exists()
    ended(process)


def test_what_kubernetes_refuses_is_told_and_the_rest_is_deleted(
    tmp_path: Path, cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    with pytest.raises(errors.InvalidJobError, match="--image: missing"):
        ebbflow.launch(script, out=tmp_path / "out", on="kubernetes").wait()
    monkeypatch.setenv("KUBECTL_REFUSES", "ps-0")
    launch = ebbflow.launch(script, out=tmp_path / "out", on="kubernetes", image=IMAGE)
    with pytest.raises(errors.ScriptError, match=r"kubectl refuses ps-0: .*ps-0 is forbidden"):
        launch.wait()
    assert (cluster / "deleted").exists()
