"""`ebb run SCRIPT.py --on kubernetes`: manifests that fit their schemas, and the calls of kubectl.

`kubectl.py` stands in for kubectl and for a cluster. No cluster has been asked.
"""

from __future__ import annotations

import functools
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

from .conftest import EBB, needs_programs, needs_there
from .test_launcher import WAITS, ended
from .test_launchers import losing, wait_for
from .test_scripts import code, trained_alone

needs_there("torch")

pytestmark = pytest.mark.usefixtures("launches")

IMAGE = "registry.example/train:1"


@pytest.fixture(scope="module")
def manifests(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Give the content of the file that a launch without kubectl leaves."""
    folder = tmp_path_factory.mktemp("manifests")
    script = folder / "train.py"
    script.write_text(WAITS)
    settings: dict[str, Any] = {"workers": 2, "ps": 2, "gpu": True, "cpus": 4}
    with pytest.MonkeyPatch.context() as without:
        without.setenv("PATH", str(folder))
        launch = ebbflow.launch(
            script, out=folder / "out", on="kubernetes", image=IMAGE, **settings
        )
        with pytest.raises(errors.ScriptError, match="no kubectl on PATH, so nothing was started"):
            launch.wait()
    return (folder / "out/kubernetes.yaml").read_text()


@functools.cache
def words_of_help(verb: str) -> frozenset[str]:
    command = [str(EBB), verb, "--help"]
    said = subprocess.run(command, check=True, capture_output=True, text=True)
    return frozenset(said.stdout.split())


def test_manifests_fit_the_schemas_of_kubernetes(tmp_path: Path, manifests: str) -> None:
    validator = os.environ.get("EBB_KUBERNETES_VALIDATE", "kubernetes-validate")
    needs_programs(validator, packages="kubernetes-validate of PyPI")

    def validate(text: str) -> int:
        (tmp_path / "given.yaml").write_text(text)
        command = [validator, "--strict", "--quiet", "-k", "1.30.0", str(tmp_path / "given.yaml")]
        return subprocess.run(command, check=False, capture_output=True).returncode

    assert validate(manifests) == 0
    # A validator that accepts everything would be no check.
    for right, wrong in (("backoffLimit", "backOffLimit"), ('"port": 4700', '"port": [4700]')):
        assert right in manifests and validate(manifests.replace(right, wrong)) != 0


# S1-16
def test_manifests_have_every_role_and_flags_that_ebb_has(manifests: str) -> None:
    objects = [json.loads(part) for part in manifests.split("---\n") if part]
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
        flags = [argument for argument in arguments if argument.startswith("--")]
        assert flags and all(flag in words_of_help(verb) for flag in flags), flags
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
    script.write_text(WAITS)
    launch = ebbflow.launch(script, out=tmp_path / "out", on="kubernetes", image=IMAGE)
    process = int(next(line for line in launch.logs() if "| process" in line).split()[-2])
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
    script.write_text(WAITS)
    with pytest.raises(errors.InvalidJobError, match="--image: missing"):
        ebbflow.launch(script, out=tmp_path / "out", on="kubernetes").wait()
    monkeypatch.setenv("KUBECTL_REFUSES", "ps-0")
    launch = ebbflow.launch(script, out=tmp_path / "out", on="kubernetes", image=IMAGE)
    with pytest.raises(errors.ScriptError, match=r"kubectl refuses ps-0: .*ps-0 is forbidden"):
        launch.wait()
    assert (cluster / "deleted").exists()
