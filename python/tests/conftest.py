"""A cluster of real processes, started by the wheel's own ``ebb``."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import ebbflow
import pytest

#: The script that pip or maturin made for the interpreter of the tests.
EBB = Path(sys.executable).parent / "ebb"

DIGITS = Path(__file__).parents[2] / "examples/digits/job.toml"

#: Seconds after which a test that hangs fails. `faulthandler_timeout` in `pyproject.toml` is
#: longer: it ends tests that do not even notice a signal.
LIMIT = 300


class Process:
    """One ``ebb`` process; its stderr goes to a file."""

    def __init__(
        self, folder: Path, name: str, *args: str, env: Mapping[str, str] | None = None
    ) -> None:
        self.log = folder / f"{name}.log"
        with self.log.open("wb") as log:
            self.child = subprocess.Popen(
                [EBB, *args], stdout=subprocess.PIPE, stderr=log, text=True, env=env
            )

    def url(self) -> str:
        """Return the URL in the line that a server prints when it is ready."""
        assert self.child.stdout is not None
        for line in self.child.stdout:
            _, found, url = line.partition("listening on ")
            if found:
                return url.strip()
        raise AssertionError(f"it ended without a URL:\n{self.log.read_text()}")

    def stop(self) -> None:
        self.child.kill()
        self.child.wait()
        if self.child.stdout is not None:
            self.child.stdout.close()


class Cluster:
    """A master, two ps and workers, without keys, on this machine."""

    def __init__(self, folder: Path, workers: int = 1) -> None:
        self.folder = folder
        self.processes: list[Process] = []
        data = str(folder / "data")
        self.url = self.start(
            "master", "master", "--listen", "127.0.0.1:0", "--data-dir", data
        ).url()
        for index in range(2):
            self.start(f"ps-{index}", "ps", "--master", self.url, "--listen", "127.0.0.1:0").url()
        for index in range(workers):
            self.start(f"worker-{index}", "worker", "--master", self.url, "--device", "cpu")

    def start(self, name: str, *args: str) -> Process:
        process = Process(self.folder, name, *args)
        self.processes.append(process)
        return process

    def stop(self) -> None:
        for process in reversed(self.processes):
            process.stop()


@pytest.fixture(autouse=True)
def limit() -> Iterator[None]:
    """End a test that hangs. Its processes are stopped then, as after any test."""

    def hang(*_: object) -> None:
        raise TimeoutError(f"no end within {LIMIT} s")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(LIMIT)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Give a cluster that the tests share."""
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.stop()


@pytest.fixture
def client(cluster: Cluster) -> ebbflow.Client:
    """Give a client of the shared cluster."""
    return ebbflow.Client(cluster.url)
