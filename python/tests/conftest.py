"""A cluster of real processes, started by the wheel's own ``ebb``."""

from __future__ import annotations

import ast
import atexit
import contextlib
import functools
import importlib
import importlib.machinery
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

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

# Threads of OpenMP that wait for each other sleep. Otherwise they compute in vain for most of the
# time on a machine that is busy, as in a loop of PyTorch without a job. OpenMP reads it when it is
# loaded. There are as many threads as before.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

#: What JAX has compiled in processes of the tests, for others of them: each compiles for seconds.
COMPILED = tempfile.mkdtemp(prefix="ebb-compiled-")
atexit.register(shutil.rmtree, COMPILED, ignore_errors=True)
KEEP_COMPILED = {
    "JAX_COMPILATION_CACHE_DIR": COMPILED,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
os.environ.update(KEEP_COMPILED)

#: The script that pip or maturin made for the interpreter of the tests.
EBB = Path(sys.executable).parent / "ebb"

DIGITS = Path(__file__).parents[2] / "examples/digits/job.toml"

#: Seconds after which a test that hangs fails. `faulthandler_timeout` in `pyproject.toml` is
#: longer: it ends tests that do not even notice a signal.
LIMIT = 600


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


def hide_tensorflow() -> None:
    """Have no TensorFlow where Keras is on PyTorch, like most users of that.

    Keras imports it for 8 s, where it is installed, to set seeds that nothing draws from.
    `test_keras_shards.py` has both.
    """
    if os.environ["KERAS_BACKEND"] == "torch":
        sys.modules.setdefault("tensorflow", None)  # type: ignore[arg-type]


def needs(*modules: str) -> Any:
    """Import modules, or skip the test. With ``EBB_REQUIRE_ALL=1`` a missing one fails it.

    Returns:
        The first one.
    """
    required = os.environ.get("EBB_REQUIRE_ALL") == "1"
    find = importlib.import_module if required else pytest.importorskip
    for name in modules:
        if name in sys.modules and sys.modules[name] is None:
            # Another file hides it.
            del sys.modules[name]
    first, *_ = [find(name) for name in modules]
    return first


def needs_there(*modules: str) -> None:
    """Skip without these modules, and import none: processes of the tests import them.

    The process of the tests would spend seconds on each. With ``EBB_REQUIRE_ALL=1`` a missing one
    fails the test.
    """
    # Also what this process hides from itself.
    find = importlib.machinery.PathFinder.find_spec
    missing = [module for module in modules if find(module) is None]
    if missing:
        said = f"no {', '.join(missing)}"
        assert os.environ.get("EBB_REQUIRE_ALL") != "1", said
        pytest.skip(said, allow_module_level=True)


def keras_on(*backends: str) -> str:
    """Skip the file if Keras has none of these backends in this process.

    On PyTorch it hides TensorFlow, as ``gated.py`` does.

    Returns:
        The backend that it has.
    """
    backend = os.environ["KERAS_BACKEND"]
    if backend not in backends:
        said = f"Keras is on {backend} in this process; set KERAS_BACKEND={' or '.join(backends)}"
        pytest.skip(said, allow_module_level=True)
    hide_tensorflow()
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
    """A master, ps and workers on this machine. ``certs`` has their keys, if they have any.

    Use it in a ``with`` statement, which ends its processes.
    """

    def __init__(
        self, folder: Path, workers: int = 1, certs: Path | None = None, ps: int = 2
    ) -> None:
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
                for index in range(ps)
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


#: Modules whose import computes for long, with what a loop imports of them at last. A server of
#: forks has them. `ebbflow.jax` and `ebbflow.keras` say what a library reads when it is imported.
DEAR = {
    "torch": ("torch", "torch._dynamo"),
    "torchmetrics": ("torchmetrics",),
    "ebbflow.jax": ("ebbflow.jax",),
    "jax": ("jax",),
    "optax": ("optax",),
    "ebbflow.keras": ("ebbflow.keras",),
    "keras": ("keras",),
    "tensorflow": ("tensorflow",),
}

#: Variables that count when Python starts or imports, so a child of a server cannot get others.
OF_IMPORTS = ("CUDA_", "JAX_", "KERAS_", "LD_", "MKL_", "OMP_", "PYTHON", "TF_", "TORCH", "XLA_")


def dear_imports(script: Path) -> tuple[str, ...]:
    """Return what a script imports of ``DEAR``, in its order, outside of functions."""
    names = []
    for node in ast.parse(script.read_text()).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.append(node.module)
    found = [name if name in DEAR else name.partition(".")[0] for name in names]
    return tuple(dict.fromkeys(module for name in found for module in DEAR.get(name, ())))


@functools.cache
def fork_server(modules: tuple[str, ...], variables: tuple[tuple[str, str], ...]) -> socket.socket:
    """Start a process that has these modules and variables, and forks. Returns its socket.

    It ends with the process of the tests, which waits for it.
    """

    def end() -> None:
        requests.close()
        server.wait()

    requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OF_IMPORTS)}
    with theirs:
        program = Path(__file__).with_name("fork_server.py")
        server = subprocess.Popen(
            [sys.executable, program, str(theirs.fileno()), *modules],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**kept, **dict(variables)},
        )
    atexit.register(end)
    return requests


class Forked:
    """A process of ``fork_server.py``, with what tests use of ``subprocess.Popen``."""

    def __init__(
        self, modules: tuple[str, ...], arguments: Sequence[str], variables: Mapping[str, str]
    ) -> None:
        fixed = [pair for pair in variables.items() if pair[0].startswith(OF_IMPORTS)]
        server = fork_server(modules, tuple(sorted(fixed)))
        self.returncode: int | None = None
        self._end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        (reads, stdin), (stdout, out), (stderr, said) = os.pipe(), os.pipe(), os.pipe()
        self.stdin: IO[str] = os.fdopen(stdin, "w")
        self.stdout: IO[str] = os.fdopen(stdout)
        self.stderr: IO[str] = os.fdopen(stderr)
        asked = {"arguments": arguments, "variables": dict(variables), "folder": str(Path.cwd())}
        with theirs:
            files = [reads, out, said, theirs.fileno()]
            socket.send_fds(server, [json.dumps(asked).encode()], files)
        for file in (reads, out, said):
            os.close(file)
        pid, pidfds, _, _ = socket.recv_fds(self._end, 64, 1)
        assert pid, "the server of forks has ended"
        self.pid, (self._pidfd,) = int(pid), pidfds

    def poll(self) -> int | None:
        ended = self.returncode is not None or select.select([self._end], [], [], 0)[0]
        return self.wait() if ended else None

    def wait(self) -> int:
        if self.returncode is None:
            code = self._end.recv(64)
            assert code, "the server of forks has ended"
            self.returncode = int(code)
            self._end.close()
            os.close(self._pidfd)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            # Before its parent has waited for it, or after: it is the process or nothing.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self) -> tuple[str, str]:
        """Wait for the end. Returns what is left to read of stdout and stderr."""
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        said: list[str] = []
        reader = threading.Thread(target=lambda: said.append(self.stderr.read()), daemon=True)
        reader.start()
        out = self.stdout.read()
        reader.join()
        self.stdout.close()
        self.stderr.close()
        self.wait()
        return out, said[0]


class Script:
    """A process that runs a script, with a gate: see ``gated.py``. Without a master it is alone.

    A wait for it that fails, or takes too long, ends the process. What is dear to import is
    imported before the process begins: it is a fork. With ``fresh`` it is a new interpreter, as
    each process of a user is: it has its own seed of Python's hashes, and compiles all of its
    program itself. What other processes found is compared with it.
    """

    child: subprocess.Popen[str] | Forked

    def __init__(
        self,
        master: str | None,
        script: Path,
        *arguments: str,
        gate: str = "none",
        keys: Mapping[str, str] | None = None,
        fresh: bool = False,
    ) -> None:
        environment = {**os.environ, **(keys or {})}
        environment.pop("EBBFLOW_MASTER", None)
        if master is not None:
            environment["EBBFLOW_MASTER"] = master
        if fresh:
            environment = {n: value for n, value in environment.items() if n not in KEEP_COMPILED}
        dear = () if fresh else dear_imports(script)
        if dear:
            self.child = Forked(dear, [gate, str(script), *arguments], environment)
            return
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
        return self.child.wait(), said

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

    def one_killed_and_two_that_join(
        self, job: str, script: Path, *arguments: str, gate: str
    ) -> list[dict[str, Any]]:
        """Train with three processes, of which one is killed at its gate before the others begin.

        Returns:
            What the two others found.
        """
        killed = self.script(script, *arguments, gate=gate)
        killed.arrive()
        others = [self.script(script, *arguments, gate="join") for _ in range(2)]
        for process in others:
            process.arrive()
        self.wait_for_workers(job, 3)
        killed.kill()
        for process in others:
            process.go()
        return [process.result() for process in others]

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


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """End the launches that a test leaves when it fails, and tell what they said.

    Otherwise they keep places of a cluster that the next tests need.
    """
    begin, begun = ebbflow.launch, []

    def launch(*arguments: Any, **options: Any) -> ebbflow.Launch:
        begun.append(begin(*arguments, **options))
        return begun[-1]

    monkeypatch.setattr(ebbflow, "launch", launch)
    yield
    for left in begun:
        if left.state == "running":
            left.cancel(force=True)
            print(f"{left} was left. It said:", *left.logs(), sep="\n    ")
