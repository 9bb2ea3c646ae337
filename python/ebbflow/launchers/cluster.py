"""One launch: a master, ps and agents on a platform, a script that is sent to them, and the end.

Nothing here knows a platform. Roles that end are started again, except the master: its URL would be
another one. Everything is taken away when the launch ends, on Ctrl-C and on SIGTERM too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from ebbflow.errors import ClusterError
from ebbflow.launchers.platform import ADDRESS, SCRATCH, Master, Platform, Role, plain_environment

__all__ = ["Plan", "Restarts", "Stopped", "train"]

#: Starts of a role after its first one, within :data:`RESTARTS_SECS`.
RESTARTS_MAX = 3

#: See :data:`RESTARTS_MAX`.
RESTARTS_SECS = 600.0

#: ``ebb submit`` prints this before the name of the job.
_SUBMITTED = "submitted "

#: Exit code of a launch that failed.
_FAILURE = 1

_MASTER = "master"


@dataclass(frozen=True)
class Plan:
    """What is launched.

    Attributes:
        script: The script.
        arguments: Its arguments.
        workers: Number of its processes, each with an agent of its own.
        ps: Number of ps.
        out: Folder for the results.
        python: Interpreter of the script; ``None``: that of the agents.
        environment: Variables of the script, each ``NAME=VALUE``.
        json: Print the result as JSON.
        cpus: Processors of an agent.
        gpu: Each agent gets a GPU.
    """

    script: Path
    arguments: Sequence[str]
    workers: int
    ps: int
    out: Path
    python: str | None = None
    environment: Sequence[str] = ()
    json: bool = False
    cpus: int = 1
    gpu: bool = False


class Stopped(BaseException):
    """A signal asked the launch to end.

    Attributes:
        number: Number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass
class Restarts:
    """Says whether a role is started again: three times in ten minutes."""

    _starts: deque[float] = field(default_factory=deque)

    def allow(self, now: float) -> bool:
        """Return whether a role that has just ended is started again, and count that."""
        while self._starts and now - self._starts[0] >= RESTARTS_SECS:
            self._starts.popleft()
        if len(self._starts) >= RESTARTS_MAX:
            return False
        self._starts.append(now)
        return True


def train(plan: Plan, platform: Platform, say: Callable[[str], None]) -> int:
    """Launch a script, wait for its end, and take everything away. Returns the exit code.

    Call it on the main thread. SIGINT and SIGTERM end the launch in good order. A second one ends
    this process at once.

    Raises:
        ClusterError: The platform refuses a role, or a role ends too often.
        Stopped: A signal came.
    """
    with _signals():
        try:
            return _Launch(plan, platform, say).run()
        finally:
            try:
                platform.stop()
            except ClusterError as error:
                # What the script trained is there.
                say(f"warning: {error}")


class _Launch:
    def __init__(self, plan: Plan, platform: Platform, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._platform = platform
        self._say = say
        #: The roles that are there, by their full names.
        self._roles: dict[str, Role] = {}
        #: By the names of roles, which all their starts have.
        self._restarts: dict[str, Restarts] = {}

    def run(self) -> int:
        plan = self._plan
        listens = self._platform.master_listens
        open_to_all = ["--insecure"] if self._platform.is_remote else []
        self._start(_MASTER, "--listen", listens, "--data-dir", SCRATCH, *open_to_all)
        self._say("waiting for the master to start")
        url = self._platform.master_url or self._wait_for_master().url
        self._say(f"the URL of the master is {url}")
        if self._platform.is_remote:
            self._say("it has no keys: everyone who reaches it may run programs with your rights")
        common = ["--master", url, *open_to_all]
        for index in range(plan.ps):
            name = f"ps-{index}"
            self._start(name, "--name", name, "--listen", f"{ADDRESS}:0", *common)
        python = [] if plan.python is None else ["--python", plan.python]
        # Also where it sees several devices: another agent is there for each further process.
        takes = ["--scripts", "--script-processes", "1"]
        device = "auto" if plan.gpu else "cpu"
        for index in range(plan.workers):
            name = f"agent-{index}"
            self._start(name, "--name", name, *takes, "--device", device, *python, *common)
        return self._submit(self._wait_for_master())

    def _start(self, name: str, *arguments: str) -> None:
        """Start the role that ``name`` begins with."""
        kind = name.partition("-")[0]
        verb = "worker" if kind == "agent" else kind
        is_agent = verb == "worker"
        role = Role(
            name,
            0,
            (verb, *arguments),
            self._plan.cpus if is_agent else 1,
            is_agent and self._plan.gpu,
        )
        self._platform.start(role)
        self._roles[role.full_name] = role

    def _wait_for_master(self) -> Master:
        while (master := self._platform.master()) is None:
            self._look()
            time.sleep(self._platform.interval)
        return master

    def _look(self) -> None:
        """Start again what has ended.

        Raises:
            ClusterError: The master has ended, or another role has ended too often.
        """
        for full_name, why in self._platform.ended().items():
            role = self._roles.pop(full_name, None)
            if role is None:
                continue
            restarts = self._restarts.setdefault(role.name, Restarts())
            if role.name == _MASTER or not restarts.allow(time.monotonic()):
                often = "" if role.name == _MASTER else " too often"
                lines = "".join(f"\n    {line}" for line in self._platform.output(role))
                said = f" said last:{lines}" if lines else " said nothing"
                raise ClusterError(f"{role.name} {why}{often}; it{said}")
            self._say(f"{role.name} {why}; it is started again")
            role = replace(role, attempt=role.attempt + 1)
            self._platform.start(role)
            self._roles[role.full_name] = role

    def _submit(self, master: Master) -> int:
        """Send the script, show what its processes say, and wait for the end of all of them."""
        plan = self._plan
        command = ["submit", str(plan.script), "--master", master.url_here]
        command += ["--workers", str(plan.workers), "--follow", "--out", str(plan.out)]
        command += ["--json"] if plan.json else []
        for variable in plan.environment:
            command += ["--env", variable]
        with _Ebb([*command, "--", *plan.arguments], self._say, passes_output=True) as submit:
            while submit.submitted is None and not submit.wait(self._platform.interval):
                self._look()
            job = submit.submitted
            if job is None:
                return submit.code
            # It ends with the last process of the script.
            follow = ["logs", job, "--follow", "--master", master.url_here]
            with _Ebb(follow, _Logs(plan.out / "logs", self._say)) as logs:
                for child in (submit, logs):
                    while not child.wait(self._platform.interval):
                        self._look()
            return submit.code


class _Ebb:
    """The program ``ebb``, as a child of this thread. Another thread hears its lines."""

    def __init__(
        self, arguments: Sequence[str], line: Callable[[str], None], *, passes_output: bool = False
    ) -> None:
        environment = {**plain_environment(), "EBB_INSECURE": "1"}
        self._child = subprocess.Popen(
            [sys.executable, "-m", "ebbflow._launched", str(os.getpid()), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=None if passes_output else subprocess.PIPE,
            stderr=subprocess.PIPE if passes_output else None,
            env=environment,
            # A signal from the terminal is for the launcher, which ends its children.
            start_new_session=True,
        )
        self._line = line
        #: Name of the job, once ``ebb submit`` has said it.
        self.submitted: str | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def __enter__(self) -> _Ebb:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._child.kill()
        self._child.wait()
        self._thread.join()

    @property
    def code(self) -> int:
        return _FAILURE if self._child.returncode < 0 else self._child.returncode

    def wait(self, seconds: float) -> bool:
        """Return whether the program has ended. It waits so long for that, and for its lines."""
        try:
            self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        self._thread.join()
        return True

    def _read(self) -> None:
        lines = self._child.stderr or self._child.stdout
        assert lines is not None
        with lines:
            for content in lines:
                line = content.decode(errors="replace").rstrip("\r\n")
                if self.submitted is None and line.startswith(_SUBMITTED):
                    self.submitted = line[len(_SUBMITTED) :]
                self._line(line)


class _Logs:
    """Shows the lines of processes, ``NAME | LINE``, and writes each to the file of its process."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._say = say
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.log"):
            old.unlink()

    def __call__(self, line: str) -> None:
        self._say(line)
        name, found, rest = line.partition(" | ")
        # The name comes from the master. It is a name of the script and two numbers.
        if found and "/" not in name:
            with (self._folder / f"{name}.log").open("a", encoding="utf-8") as file:
                file.write(f"{rest}\n")


@contextlib.contextmanager
def _signals() -> Iterator[None]:
    """Make SIGINT and SIGTERM an exception, once."""

    def stop(number: int, _: FrameType | None) -> None:
        # A second one must not end the launch in the midst of its end: it ends the process.
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)
        raise Stopped(number)

    before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
