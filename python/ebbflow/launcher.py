"""A script with a cluster of its own, on this host or on others: ``ebb run`` from Python."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ebbflow.errors import InvalidJobError, JobCancelledError, JobFailedError, ScriptError
from ebbflow.result import Result

__all__ = ["Launch", "launch"]

#: Lines that a launch keeps for its readers. The folder for results has all of them.
LINES_KEPT = 10_000

#: Exit code of ``ebb`` for an argument that it does not take.
_WRONG_ARGUMENT = 2

_ERROR = "error: "


def launch(
    script: str | os.PathLike[str],
    arguments: Sequence[str | os.PathLike[str]] = (),
    *,
    workers: int = 1,
    ps: int = 1,
    out: str | os.PathLike[str] | None = None,
    python: str | os.PathLike[str] | None = None,
    environment: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    on_line: Callable[[str], object] | None = None,
    on: str | None = None,
    cpus: int = 1,
    gpu: bool = False,
    image: str | None = None,
    mounts: Sequence[str | os.PathLike[str]] = (),
) -> Launch:
    """Start a script with ``ebbflow.join`` in processes of its own, and return at once.

    This is ``ebb run SCRIPT.py``: a master and ps in one process, the script in ``workers`` others.
    A process that fails or is killed is started again, and the weights have the bits of one process
    alone. All of them end with this process.

    With ``on`` they run on machines of a platform, as by ``ebb run SCRIPT.py --on PLATFORM``:
    the files of the script's folder are sent there, and everything is taken away at the end.

    Args:
        script: The script, whose name ends in ``.py``.
        arguments: Arguments of the script.
        workers: Processes of the script, 1 to 256.
        ps: Number of ps, 1 to 256.
        out: Folder for the results and the output of each process. Default: ``out/NAME`` for a
            script ``NAME.py``.
        python: The interpreter. Default: the variable ``EBB_PYTHON``, then that of this process.
        environment: Variables for the processes, beside those of this process. Other users of the
            host can see them. Names that begin with ``EBB_``, ``EBBFLOW_``, ``LD_`` or ``PYTHON``,
            and ``PATH``, are refused.
        cwd: Folder in which the processes start. Default: that of this process.
        on_line: Called with each line of output, on another thread. An exception in it cancels the
            launch, and :meth:`Launch.wait` raises it.
        on: ``slurm``, ``ray``, ``kubernetes`` or ``compose``. Default: processes of this host.
        cpus: Processors of each process of the script, with ``on``.
        gpu: Give each process of the script a GPU, with ``on``.
        image: Image of the containers, on Kubernetes and with Compose.
        mounts: Files and folders of this host that the script sees at the same paths, with Compose.
            One whose text ends in ``:ro`` cannot be written there.

    Raises:
        InvalidJobError: There is no such script, or an argument does not go with another one.
    """
    script = Path(script).absolute()
    if script.suffix != ".py" or not script.is_file():
        raise InvalidJobError(f"{script}: no script; expected a file whose name ends in .py")
    folder = Path("out", script.stem) if out is None else Path(out)
    folder = folder.absolute()
    if on is None:
        if (cpus, gpu, image) != (1, False, None) or mounts:
            raise InvalidJobError("cpus, gpu, image and mounts: only with `on`")
        command = ["-m", "ebbflow._launched", str(os.getpid()), "run", str(script)]
    else:
        if cwd is not None:
            raise InvalidJobError("cwd: not with `on`; the script begins in a copy of its folder")
        command = ["-m", "ebbflow.launchers", "--parent", str(os.getpid()), "--on", on]
        command += ["--cpus", str(cpus)] + ["--gpu"] * gpu
        command += [] if image is None else ["--image", image]
        for mount in mounts:
            command += ["--mount", os.fspath(mount)]
    command += ["--workers", str(workers), "--ps", str(ps), "--out", str(folder), "--json"]
    if python is not None:
        command += ["--python", os.fspath(python)]
    for name, value in (environment or {}).items():
        command += ["--env", f"{name}={value}"]
    # The launcher of other machines takes the script behind `--` too.
    command += ["--"] if on is None else ["--", str(script)]
    command += [os.fspath(argument) for argument in arguments]
    return Launch(script, command, folder, None if cwd is None else Path(cwd), on_line)


class Launch:
    """Processes of a script, and their cluster. :func:`launch` makes it.

    Attributes:
        script: The script.
        out: Folder for the results. ``logs/worker-N.log`` in it has the output of each process.
    """

    def __init__(
        self,
        script: Path,
        command: Sequence[str],
        out: Path,
        cwd: Path | None,
        on_line: Callable[[str], object] | None,
    ) -> None:
        self.script = script
        self.out = out
        self._on_line = on_line
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        #: Number of all lines so far.
        self._count = 0
        self._changed = threading.Condition()
        self._is_over = False
        self._is_cancelled = False
        self._child: subprocess.Popen[bytes] | None = None
        self._failure: BaseException | None = None
        self._facts = b""
        started = threading.Event()
        # The kernel ends the child when the thread ends that started it. So this thread lives as
        # long as the child. It is no daemon: a program ends after what it launched.
        self._thread = threading.Thread(
            target=self._follow, args=(command, cwd, started), name=f"launch {script.name}"
        )
        self._thread.start()
        started.wait()
        if self._child is None:
            self._thread.join()
            assert self._failure is not None
            raise self._failure

    def __repr__(self) -> str:
        return f"<launch of {self.script}: {self.state}>"

    @property
    def state(self) -> str:
        """``running``, ``succeeded``, ``failed``, or ``cancelled`` by :meth:`cancel`."""
        if not self._is_over:
            return "running"
        if self._code == 0:
            return "succeeded"
        return "cancelled" if self._is_cancelled else "failed"

    def logs(self) -> Iterator[str]:
        """Return the lines of output, from the first one to the end. It waits for further lines.

        Lines of a process begin with its name, such as ``worker-0 | ``. Other lines tell about
        processes that are started again, and about the progress of the job. A reader that is more
        than 10,000 lines behind misses some, and gets a line that says so.
        """
        read = 0
        while True:
            with self._changed:
                while read == self._count and not self._is_over:
                    self._changed.wait()
                missed = self._count - len(self._lines) - read
                new = list(self._lines)[max(-missed, 0) :]
                read, is_over = self._count, self._is_over
            if missed > 0:
                yield f"{missed} lines are left out here; {self.out / 'logs'} has all of them"
            yield from new
            if is_over:
                return

    def wait(self, timeout: float | None = None) -> Result:
        """Wait for the end of all processes, and return the result of the script's first job.

        Ctrl-C ends the wait, and the processes go on: call :meth:`cancel`.

        Args:
            timeout: Longest wait in seconds. Default: none.

        Raises:
            TimeoutError: The processes have not ended after ``timeout`` seconds.
            InvalidJobError: ``ebb run`` does not take an argument.
            ScriptError: The script failed, before or after its job, or never joined one.
            JobFailedError: The job failed.
            JobCancelledError: :meth:`cancel` was called.
        """
        return self.results(timeout)[0]

    def results(self, timeout: float | None = None) -> list[Result]:
        """Wait as :meth:`wait` does, and return the results of all jobs of the script."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_over, timeout):
                raise TimeoutError(f"{self.script.name} has not ended after {timeout} s")
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        results = [Result.read(folder) for folder in self._folders()]
        if self._code == 0:
            return results
        last = results[-1] if results else None
        if self._is_cancelled:
            raise JobCancelledError(f"{self.script.name} was cancelled", last)
        if last is not None and last.status.state == "failed":
            raise JobFailedError(f"{last.status.job} failed: {last.status.reason}", last)
        if last is not None and last.status.state == "cancelled":
            raise JobCancelledError(f"{last.status.job} was cancelled: {last.status.reason}", last)
        what, lines = _explained(list(self._lines), self._code, self.script)
        if self._code == _WRONG_ARGUMENT:
            raise InvalidJobError(what)
        raise ScriptError(what, lines, self.out / "logs")

    def cancel(self, *, force: bool = False) -> None:
        """Ask all processes to end, by SIGTERM. They are killed after 30 s, by ``force`` at once.

        Nothing happens if they have ended.
        """
        self._is_cancelled |= not self._is_over
        assert self._child is not None
        with contextlib.suppress(ProcessLookupError):
            # The processes die with it.
            (self._child.kill if force else self._child.terminate)()

    @property
    def _code(self) -> int:
        assert self._child is not None
        code: int = self._child.returncode
        return code

    def _folders(self) -> list[Path]:
        """Return the folders of the jobs that ended. The first job has the folder itself."""
        jobs = jobs_of(self._facts)
        return [self.out / job if index else self.out for index, job in enumerate(jobs)]

    def _follow(self, command: Sequence[str], cwd: Path | None, started: threading.Event) -> None:
        try:
            with tempfile.TemporaryFile() as facts:
                # Ctrl-C on the terminal is for this process.
                child = subprocess.Popen(
                    [sys.executable, *command],
                    stdin=subprocess.DEVNULL,
                    stdout=facts,
                    stderr=subprocess.PIPE,
                    cwd=cwd,
                    start_new_session=True,
                )
                self._child = child
                started.set()
                with child:
                    assert child.stderr is not None
                    for line in child.stderr:
                        self._line(line.decode(errors="replace").rstrip("\r\n"))
                facts.seek(0)
                self._facts = facts.read()
        except BaseException as error:
            self._failure = self._failure or error
        finally:
            with self._changed:
                self._is_over = True
                self._changed.notify_all()
            started.set()

    def _line(self, line: str) -> None:
        with self._changed:
            self._lines.append(line)
            self._count += 1
            self._changed.notify_all()
        if self._on_line is not None and self._failure is None:
            try:
                self._on_line(line)
            except BaseException as error:
                self._failure = error
                self.cancel()


def _explained(lines: Sequence[str], code: int, script: Path) -> tuple[str, list[str]]:
    """Return what ``ebb`` says about its failure, and the last lines of the process in it."""
    begins = [index for index, line in enumerate(lines) if line.startswith(_ERROR)]
    if not begins:
        return f"{script.name}: `ebb run` ended with exit code {code}", []
    text = "\n".join(lines[begins[-1] :])[len(_ERROR) :]
    text = text.replace(f"{script}: ", f"{script.name}: ", 1)
    quoted = [line[4:] for line in text.splitlines()[1:] if line.startswith("    ")]
    return text, quoted


def jobs_of(output: bytes) -> list[str]:
    """Return the jobs that ``ebb run`` names in its output, a line of JSON each.

    Libraries of platforms write there too: Ray says which of its nodes are lost.
    """
    lines = [line for line in output.splitlines() if line.startswith(b"{")]
    return [json.loads(line)["job"] for line in lines]
