"""`ebb run SCRIPT.py --on ray`, on a real Ray cluster of two nodes of this machine."""

from __future__ import annotations

import contextlib
import os
import random
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

#: Ray's own limits of time are for idle machines. Its workers would compute only when nothing else
#: does, and be killed when other programs of this machine need its memory. A driver would wait for
#: workers that nobody has asked for.
PATIENT = {
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "240",
    "RAY_agent_register_timeout_ms": "240000",
    "RAY_gcs_server_port_wait_time_s": "240",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_raylet_start_wait_time_s": "240",
    "RAY_worker_niceness": "0",
    "RAY_worker_register_timeout_seconds": "240",
}


def free_ports() -> Iterator[int]:
    """Yield free ports. The system gives none of them to a program that asks for any port.

    So they are still free when Ray takes them, seconds later.
    """
    given = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    low, high = map(int, given)
    others = [port for port in range(10_000, 1 << 16) if not low <= port <= high]
    others = others or list(range(low, high + 1))
    for port in random.sample(others, len(others)):
        with socket.socket() as bound:
            try:
                bound.bind(("", port))
            except OSError:
                continue
        yield port


class Node:
    """A node of Ray: a group of processes, which has a number of places."""

    def __init__(
        self, folder: Path, name: str, places: int, ports: Iterator[int], *arguments: str
    ) -> None:
        self.log = folder / f"{name}.log"
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block"]
        command += ["--disable-usage-stats", f"--num-cpus={places}", "--num-gpus=0"]
        # Less than Ray takes by itself. The roles do not use it.
        command += ["--object-store-memory=80000000", *arguments]
        # A node ends when its processes of Python have not said within 15 s which ports they chose.
        # So it is told these ports.
        listen = ["dashboard-agent-grpc", "metrics-export", "runtime-env-agent"]
        # Nobody uses this one. Otherwise it is the same one in all clusters.
        listen += ["ray-client-server"] * ("--head" in arguments)
        command += [f"--{what}-port={next(ports)}" for what in listen]
        # Workers of both nodes would try the same ports.
        command += ["--min-worker-port=0", "--max-worker-port=0"]
        environment = {**os.environ, **PATIENT, NODE: name}
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
    ports = free_ports()
    try:
        head = ["--head", "--port=0", "--include-dashboard=false", f"--temp-dir={temporary}"]
        started.append(Node(folder, "first", 3, ports, *head))
        address = started[0].address()
        started.append(Node(folder, "second", 1, ports, f"--address={address}"))
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
