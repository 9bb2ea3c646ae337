"""`ebb run SCRIPT.py --on ray`, on a real Ray cluster of two nodes of this machine."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import ebbflow
import pytest
from ebbflow import errors

from .conftest import needs_there
from .test_launcher import WAITS, ended
from .test_launchers import losing, wait_for
from .test_scripts import TRAIN, code, trained_alone

needs_there("torch")

pytestmark = pytest.mark.usefixtures("launches")

#: Names the node for its processes.
NODE = "NODE_OF_TEST"


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


class Node:
    """A node of Ray: a group of processes, which has a number of places."""

    def __init__(self, folder: Path, name: str, places: int, *arguments: str) -> None:
        self.log = folder / f"{name}.log"
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        command += ["--disable-usage-stats", f"--num-cpus={places}", "--num-gpus=0"]
        # Less than Ray takes by itself. The roles do not use it.
        command += ["--object-store-memory=80000000", *arguments]
        # Ray's workers would compute only when nothing else does.
        environment = {**os.environ, NODE: name, "RAY_worker_niceness": "0"}
        environment.pop("RAY_ADDRESS", None)
        with self.log.open("wb") as log:
            self.child = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def address(self) -> str:
        """Return the address by which further nodes join, once it runs."""
        while True:
            said = self.log.read_text()
            if found := re.search(r"--address='([^']+)'", said):
                return found[1]
            assert self.child.poll() is None, said
            time.sleep(0.05)

    def stop(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, number)
        self.child.wait()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    """Give a Ray cluster whose first node has three places, and whose second one has one."""
    needs_there("ray")
    folder = tmp_path_factory.mktemp("ray")
    # Names of sockets have a limit.
    temporary = Path("/tmp") / f"ray-{os.getpid()}"
    started: list[Node] = []
    try:
        head = ["--head", "--port=0", "--include-dashboard=false"]
        # Otherwise it is the same one in all clusters. Nobody uses it.
        head.append(f"--ray-client-server-port={free_port()}")
        started.append(Node(folder, "first", 3, *head, f"--temp-dir={temporary}"))
        address = started[0].address()
        started.append(Node(folder, "second", 1, f"--address={address}"))
        with pytest.MonkeyPatch.context() as variables:
            variables.setenv("RAY_ADDRESS", address)
            yield started
    finally:
        for node in reversed(started):
            node.stop(signal.SIGKILL)
        subprocess.run(["rm", "-rf", temporary], check=True)


# The others need the places of the first node alone.
def test_a_lost_node_changes_no_bit(tmp_path: Path, nodes: list[Node]) -> None:
    alone = trained_alone(code(tmp_path, TRAIN))
    script = tmp_path / "code/train.py"
    script.write_text(losing(f'os.environ["{NODE}"] == "second"'))
    # Master, ps and one agent are on the first node, because the second has one place.
    out = tmp_path / "out"
    launch = ebbflow.launch(script, [str(tmp_path)], workers=2, out=out, on="ray")
    process, agent = map(int, wait_for(tmp_path / "held", launch).split())
    nodes[1].stop(signal.SIGKILL)
    ended(process)
    ended(agent)
    again = next(line for line in launch.logs() if "it is started again" in line)
    assert re.match(r"agent-. was lost with its actor", again), again
    (tmp_path / "lost").touch()
    result = launch.wait()
    assert result.status.state == "succeeded" and result.model_sha256 == alone
    assert any("trained" in log.read_text() for log in (out / "logs").iterdir())


@pytest.mark.parametrize("force", [False, True])
def test_processes_end_with_their_launch(tmp_path: Path, nodes: list[Node], force: bool) -> None:
    script = tmp_path / "code/train.py"
    script.parent.mkdir()
    script.write_text(WAITS)
    launch = ebbflow.launch(script, out=tmp_path / "out", on="ray")
    said = next(line for line in launch.logs() if "| process" in line)
    process, agent = map(int, said.split()[-2:])
    launch.cancel(force=force)
    with pytest.raises(errors.JobCancelledError):
        launch.wait()
    ended(agent)
    ended(process)


def test_a_cluster_that_is_not_there_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_there("ray")
    script = tmp_path / "train.py"
    script.write_text(WAITS)
    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    with pytest.raises(errors.ScriptError, match="--on ray: no Ray cluster at nonsense"):
        ebbflow.launch(script, out=tmp_path / "out", on="ray").wait()
