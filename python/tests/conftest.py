"""A cluster of real processes, started by the wheel's own ``ebb``."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import ebbflow
import pytest

# Whoever starts the tests in the background makes them ignore Ctrl-C. The processes of the tests
# would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Scripts run with the interpreter of the tests, whatever another one is for.
os.environ.pop("EBB_PYTHON", None)

# Keras reads its backend when it is imported, and keeps it: a process has one. No file of tests
# sets it.
os.environ.setdefault("KERAS_BACKEND", "torch")

#: The script that pip or maturin made for the interpreter of the tests.
EBB = Path(sys.executable).parent / "ebb"

DIGITS = Path(__file__).parents[2] / "examples/digits/job.toml"

#: Seconds after which a test that hangs fails. `faulthandler_timeout` in `pyproject.toml` is
#: longer: it ends tests that do not even notice a signal.
LIMIT = 300


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """End a test that hangs, also while its fixtures of any scope begin or end."""

    def hang(*_: object) -> None:
        raise TimeoutError(f"no end within {LIMIT} s")

    before = signal.signal(signal.SIGALRM, hang)
    signal.alarm(LIMIT)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def needs(*modules: str) -> Any:
    """Import modules, or skip the test. With ``EBB_REQUIRE_ALL=1`` a missing one fails it.

    Returns:
        The first one.
    """
    required = os.environ.get("EBB_REQUIRE_ALL") == "1"
    find = importlib.import_module if required else pytest.importorskip
    first, *_ = [find(name) for name in modules]
    return first


def needs_there(*modules: str) -> None:
    """Skip without these modules, and import none: processes of the tests import them.

    The process of the tests would spend seconds on each. With ``EBB_REQUIRE_ALL=1`` a missing one
    fails the test.
    """
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        said = f"no {', '.join(missing)}"
        assert os.environ.get("EBB_REQUIRE_ALL") != "1", said
        pytest.skip(said, allow_module_level=True)


def keras_on(*backends: str) -> str:
    """Skip the file if Keras has none of these backends in this process.

    Returns:
        The backend that it has.
    """
    backend = os.environ["KERAS_BACKEND"]
    if backend not in backends:
        said = f"Keras is on {backend} in this process; set KERAS_BACKEND={' or '.join(backends)}"
        pytest.skip(said, allow_module_level=True)
    return backend


def needs_programs(*programs: str, packages: str) -> None:
    """Skip the test without these programs. With ``EBB_REQUIRE_ALL=1`` a missing one fails it."""
    path = f"{os.environ.get('PATH')}:/usr/sbin:/sbin"
    missing = [program for program in programs if shutil.which(program, path=path) is None]
    if missing:
        said = f"no {', '.join(missing)} (of {packages})"
        assert os.environ.get("EBB_REQUIRE_ALL") != "1", said
        pytest.skip(said)


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

    def url(self, words: str = "listening on ") -> str:
        """Return the URL after these words, in a line that a server prints when it is ready."""
        assert self.child.stdout is not None
        for line in self.child.stdout:
            _, found, url = line.partition(words)
            if found:
                return url.strip()
        raise AssertionError(f"it ended without a URL:\n{self.log.read_text()}")

    def stop(self) -> None:
        self.child.kill()
        self.child.wait()
        if self.child.stdout is not None:
            self.child.stdout.close()


def variables(certs: Path, name: str) -> dict[str, str]:
    """Return the variables that give a process the keys of ``name``."""
    return {
        "EBB_TLS_CA": str(certs / "ca.pem"),
        "EBB_TLS_CERT": str(certs / f"{name}.pem"),
        "EBB_TLS_KEY": str(certs / f"{name}.key"),
        "EBB_TOKEN_FILE": str(certs / f"{name}.token"),
    }


class Cluster:
    """A master, two ps and workers on this machine. ``certs`` has their keys, if they have any.

    Use it in a ``with`` statement, which ends its processes.
    """

    def __init__(self, folder: Path, workers: int = 1, certs: Path | None = None) -> None:
        self.folder = folder
        self.certs = certs
        self.processes: list[Process] = []
        data = str(folder / "data")
        with contextlib.ExitStack() as begun:
            # A cluster that does not get whole leaves no process.
            begun.callback(self.stop)
            self.url = self.start(
                "master", "master", "--listen", "127.0.0.1:0", "--data-dir", data
            ).url()
            self.ps = [
                self.start(f"ps-{index}", "ps", "--master", self.url, "--listen", "127.0.0.1:0")
                for index in range(2)
            ]
            self.ps_urls = [ps.url() for ps in self.ps]
            for index in range(workers):
                self.start(f"worker-{index}", "worker", "--master", self.url, "--device", "cpu")
            begun.pop_all()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, name: str, *args: str) -> Process:
        environment = None
        if self.certs is not None:
            tokens = {"EBB_TOKENS": str(self.certs / "tokens.toml")}
            environment = {**os.environ, **variables(self.certs, args[0]), **tokens}
        process = Process(self.folder, name, *args, env=environment)
        self.processes.append(process)
        return process

    def stop(self) -> None:
        with contextlib.ExitStack() as left:
            for process in self.processes:
                left.callback(process.stop)


class Script:
    """A process that runs a script, with a gate: see ``gated.py``. Without a master it is alone.

    A wait for it that fails, or takes too long, ends the process.
    """

    def __init__(
        self,
        master: str | None,
        script: Path,
        *arguments: str,
        gate: str = "none",
        keys: Mapping[str, str] | None = None,
    ) -> None:
        environment = {**os.environ, **(keys or {})}
        environment.pop("EBBFLOW_MASTER", None)
        if master is not None:
            environment["EBBFLOW_MASTER"] = master
        self.child = subprocess.Popen(
            [sys.executable, Path(__file__).parent / "gated.py", gate, script, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def arrive(self) -> None:
        """Wait until the process is at its gate."""
        assert self.child.stdout is not None and self.child.stderr is not None
        with self._waiting():
            for line in self.child.stdout:
                if line == "at the gate\n":
                    return
            raise AssertionError(f"it ended before its gate:\n{self.child.stderr.read()}")

    def hear(self, words: str) -> str:
        """Wait until the process says a line with these words on stderr, and return the line."""
        assert self.child.stderr is not None
        said = []
        with self._waiting():
            for line in self.child.stderr:
                if words in line:
                    return line
                said.append(line)
            raise AssertionError(f"it ended and did not say {words!r}:\n{''.join(said)}")

    def go(self) -> None:
        """Open the gate."""
        assert self.child.stdin is not None
        self.child.stdin.write("\n")
        self.child.stdin.flush()

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()
        for pipe in (self.child.stdin, self.child.stdout, self.child.stderr):
            # What was not written yet is lost.
            with contextlib.suppress(BrokenPipeError):
                if pipe is not None:
                    pipe.close()

    def end(self) -> tuple[int, str]:
        """Wait for the end. Returns the exit code and what the process said on stderr."""
        with self._waiting():
            _, said = self.child.communicate()
        return self.child.returncode, said

    def result(self) -> dict[str, Any]:
        """Wait for the end, which must be a good one: the process holds the final weights.

        Returns:
            What ``gated.py`` prints last.
        """
        with self._waiting():
            out, said = self.child.communicate()
        assert self.child.returncode == 0, said
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        assert found["held"] == found["sha"], f"the model is not the job's: {found}"
        return found

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.kill()
            raise


class Place:
    """A master with two ps, for scripts. A ``with`` statement ends those that were started here."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.client = ebbflow.Client(cluster.url)
        self.scripts: list[Script] = []

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def script(self, script: Path, *arguments: str, gate: str = "none") -> Script:
        self.scripts.append(Script(self.cluster.url, script, *arguments, gate=gate))
        return self.scripts[-1]

    def wait_for_workers(self, job: str, number: int) -> None:
        """Wait until so many workers train a job. Each is there from its ``join`` on."""
        while self._status(job, "workers") != number:
            self._wait()

    def wait_for_more(self, job: str, number: int) -> None:
        """Wait until more than so many microbatches of a job are applied."""
        while self._status(job, "microbatches_applied") <= number:
            self._wait()

    def one_killed_and_two_that_stay(
        self, job: str, script: Path, *arguments: str
    ) -> list[dict[str, Any]]:
        """Train with three processes, of which each has a share in the model.

        The first one is killed with a batch in its hands. The two others go on together in the end.

        Returns:
            What the two others found.
        """
        killed = self.script(script, *arguments, gate="30")
        killed.arrive()
        first = self.script(script, *arguments, gate="40")
        self.wait_for_workers(job, 2)
        killed.kill()
        # The job goes on without the one that is dead, which gave no more than 30 microbatches.
        first.arrive()
        self.wait_for_more(job, 30)
        second = self.script(script, *arguments, gate="join")
        second.arrive()
        self.wait_for_workers(job, 2)
        second.go()
        # The first one waits with a batch in its hands, so the second one gave the others.
        self.wait_for_more(job, 30 + 40)
        first.go()
        return [first.result(), second.result()]

    def _wait(self) -> None:
        """Let a little time pass. No script may have failed."""
        for script in self.scripts:
            code = script.child.poll()
            assert code in (None, 0, -signal.SIGKILL), f"{code}: {script.child.communicate()[1]}"
        time.sleep(0.02)

    def _status(self, job: str, name: str) -> int:
        try:
            return int(self.client.status(job)[name])
        except ebbflow.errors.NotFoundError:
            # The first process has not submitted it yet.
            return 0

    def stop(self) -> None:
        with contextlib.ExitStack() as left:
            for script in self.scripts:
                left.callback(script.kill)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    """Give a master with two ps and no worker, which the test may damage."""
    with Cluster(tmp_path, workers=0) as cluster, Place(cluster) as place:
        yield place


@pytest.fixture(scope="module")
def cluster_of_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Give a master with two ps and no worker, which the tests of a file share."""
    with Cluster(tmp_path_factory.mktemp("cluster"), workers=0) as cluster:
        yield cluster


@pytest.fixture
def shared(cluster_of_file: Cluster) -> Iterator[Place]:
    """Give the cluster of the file. The test leaves it whole, and its jobs have their own names."""
    with Place(cluster_of_file) as place:
        yield place


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Give a cluster that the tests share."""
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: Cluster) -> ebbflow.Client:
    """Give a client of the shared cluster."""
    return ebbflow.Client(cluster.url)
