"""What talks to a master: submit jobs, follow them, change them, and fetch their results."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ebbflow import _native
from ebbflow._collect import Collector, finished
from ebbflow._job import JobSource, Resume, prepare
from ebbflow._reach import full
from ebbflow._reach import secrets as keys
from ebbflow.errors import InvalidJobError
from ebbflow.result import Result
from ebbflow.status import Event, Status
from ebbflow.worst import Worst

if TYPE_CHECKING:
    import asyncio

__all__ = ["Client", "Job", "Watch"]

#: An event with its job's number of steps, or the state of the job that ended.
_Step: TypeAlias = "tuple[tuple[str, int] | None, str | None]"


class Client:
    """A connection to a master, or to the leader of several masters.

    A job is named by its name with its number (``digits-7``), by its number, or by its name alone,
    which means the newest job of that name. Calls wait without the GIL, and Ctrl-C ends a wait at
    once. A client is for one process: a forked process makes its own.

    Args:
        url: URL of the master, or the URLs of several masters with commas between them. Default:
            the variable ``EBB_MASTER``, else ``http://127.0.0.1:4700``.
        token: The token to show. Default: the one in ``token_file``.
        token_file: File with the token. Default: the variable ``EBB_TOKEN_FILE``.
        ca: Certificates of the cluster's authority (PEM). Default: the variable ``EBB_TLS_CA``;
            without one, connections are not encrypted.
        cert: This user's certificate (PEM). Default: the variable ``EBB_TLS_CERT``.
        key: The private key of ``cert`` (PEM). Default: the variable ``EBB_TLS_KEY``.
        insecure: Show the token to other machines without encryption. Default: the variable
            ``EBB_INSECURE``.
        timeout: Seconds for which each call waits for a master that does not answer.

    Raises:
        AccessError: A file with keys cannot be read, or the keys do not belong together.
        Error: ``url`` is no URL.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        token: str | None = None,
        token_file: str | os.PathLike[str] | None = None,
        ca: str | os.PathLike[str] | None = None,
        cert: str | os.PathLike[str] | None = None,
        key: str | os.PathLike[str] | None = None,
        insecure: bool | None = None,
        timeout: float = 30.0,
        _agent: int | None = None,
    ) -> None:
        shown = keys(token, token_file, ca, cert, key, insecure)
        self.url = full(url or os.environ.get("EBB_MASTER") or "127.0.0.1:4700", shown)
        self._native = _native.Client(self.url, shown, timeout, _agent)

    def __repr__(self) -> str:
        return f"Client({self.url!r})"

    def submit(
        self,
        job: JobSource,
        *,
        changes: Mapping[str, Any] | None = None,
        resume: Resume = False,
        out: str | os.PathLike[str] | None = None,
    ) -> Job:
        """Send a job, and return at once.

        Args:
            job: Path of a job file, or its content as a dictionary. Relative paths in it start from
                the file's folder; in a dictionary they start from the current folder. Workers read
                the data where they see them.
            changes: Settings to change, such as ``{"optimizer.learning_rate": 0.01}``.
            resume: Go on from the newest checkpoint of an earlier run.
            out: Folder for the results, which ``Job.wait`` writes.

        Raises:
            InvalidJobError: The job is wrong: every violation at once.
            LimitError: The master has too many jobs.
            AnswerLostError: Nobody knows whether the master has the job.
            UnreachableError: No master answers.
        """
        if not isinstance(job, Mapping) and Path(job).suffix == ".py":
            raise InvalidJobError(f"{os.fspath(job)}: is a script; use submit_script for it")
        name, number = self._native.submit(prepare(job, changes, resume))
        return Job(self, name, number, None if out is None else Path(out), bool(resume))

    def submit_script(
        self,
        script: str | os.PathLike[str],
        arguments: Sequence[str | os.PathLike[str]] = (),
        *,
        workers: int = 1,
        name: str | None = None,
        environment: Mapping[str, str] | None = None,
        secrets: Sequence[str] = (),
        out: str | os.PathLike[str] | None = None,
    ) -> Job:
        """Send a script with ``ebbflow.join`` to the agents of the cluster, and return at once.

        This is ``ebb submit SCRIPT.py``. The files of the script's folder travel with it. Agents,
        which are workers with ``--scripts``, install or check its ``requirements.txt`` and start
        ``workers`` processes.

        Args:
            script: The script, whose name ends in ``.py``.
            arguments: Arguments of the script.
            workers: Processes of the script over all agents, 1 to 1024.
            name: Name of the script, and of its job unless ``join`` gets another one. Default: the
                name of the file.
            environment: Variables for the processes. Names that begin with ``EBB``, ``LD_`` or
                ``PYTHON``, and ``PATH``, are refused.
            secrets: Names of variables of this process that the processes of the script get too.
                Their values are stored nowhere, and left out of logs.
            out: Folder for the results, which ``Job.wait`` writes.

        Raises:
            InvalidJobError: The script cannot travel, or an argument is wrong.
            AccessError: The token may not send scripts.
            LimitError: The master has too many jobs.
            AnswerLostError: Nobody knows whether the master has the script.
            UnreachableError: No master answers.
        """
        made, number = self._native.submit_script(
            {
                "path": os.fspath(script),
                "name": name or "",
                "arguments": [os.fspath(argument) for argument in arguments],
                "variables": list((environment or {}).items()),
                # Rust refuses the ends of its range.
                "workers": min(max(workers, 0), 2**32 - 1),
                "secrets": list(secrets),
                "values": {each: os.environ[each] for each in secrets if each in os.environ},
            }
        )
        return Job(self, made, number, None if out is None else Path(out))

    def logs(
        self, job: str | int, *, worker: int | str | None = None, follow: bool = False
    ) -> Iterator[str]:
        """Return the lines that the processes of a script said, the oldest first.

        This is ``ebb logs``. The master keeps the newest 256 KiB of each process. Lines may have
        control characters.

        Args:
            job: The job of the script.
            worker: The only process to read, by its number or its name, such as ``train-7-0``.
                Default: all of them. Then the name of its process is before each line.
            follow: Go on with new lines until the script is over.

        Raises:
            NotFoundError: The master does not know the job, or it is of no script.
            AccessError: Neither the token's owner sent the script, nor is the token an operator's.
            InvalidJobError: ``worker`` is no number, and no name that ends with one. A process
                that is not there has no lines.
        """
        only = None if worker is None else str(worker)
        return _lines(self._native.logs(str(job), only, follow))

    def jobs(self) -> list[Status]:
        """Return all jobs of the master, the oldest first."""
        return [Status.of(text) for text in self._native.list()]

    def job(self, job: str | int) -> Job:
        """Return a handle of a job.

        Raises:
            NotFoundError: The master does not know the job.
        """
        status = self.status(job)
        return Job(self, status.job, int(status["id"]))

    def status(self, job: str | int) -> Status:
        """Return the state of a job, with its counters and metrics.

        Raises:
            NotFoundError: The master does not know the job.
        """
        return Status.of(self._native.status(str(job)))

    def watch(self, job: str | int) -> Watch:
        """Return the events of a job, from its first one to its end.

        Use it in a ``for`` loop, or in an ``async for`` loop, which does not block the event loop.

        Raises:
            NotFoundError: The master does not know the job.
        """
        return Watch(self._native.watch(str(job)))

    def scale(self, job: str | int, workers: int) -> Status:
        """Set how many workers take part in a job.

        Raises:
            EndedError: The job is ending or has ended.
        """
        return Status.of(self._native.scale(str(job), workers))

    def pause(self, job: str | int) -> Status:
        """Hand out no new work of a job until it is resumed.

        Raises:
            EndedError: The job is ending or has ended.
        """
        return Status.of(self._native.pause(str(job)))

    def resume(self, job: str | int, *, numerics: str | None = None) -> Status:
        """Let a paused job go on.

        Args:
            job: The job.
            numerics: The numerics class in which a job goes on that waits for workers of its class.

        Raises:
            EndedError: The job is ending or has ended.
        """
        return Status.of(self._native.resume(str(job), numerics))

    def cancel(self, job: str | int, *, force: bool = False) -> Status:
        """Stop a job. What is trained so far is exported, except with ``force``.

        Raises:
            EndedError: The job is ending or has ended.
        """
        return Status.of(self._native.cancel(str(job), force))

    def wait(
        self,
        job: str | int,
        *,
        out: str | os.PathLike[str] | None = None,
        progress: bool | None = None,
        check: bool = True,
    ) -> Result:
        """Wait for the end of a job. Ctrl-C ends the wait, and the job goes on.

        Args:
            job: The job.
            out: Folder for the results, written while the job trains. Default: none; the weights
                are fetched when they are asked for.
            progress: Show the progress: ``None`` on a terminal and in a notebook, ``True``
                everywhere, ``False`` never.
            check: Raise an exception if the job did not succeed.

        Raises:
            JobFailedError: The job failed.
            JobCancelledError: A user cancelled the job.
            OutputError: ``out`` cannot be written.
        """
        return self._wait(str(job), None if out is None else Path(out), False, progress, check)

    def fetch(self, job: str | int, out: str | os.PathLike[str]) -> Result:
        """Write the results of a job that ended, with its events, into the folder ``out``.

        Raises:
            NotEndedError: The job has no results yet.
            OutputError: The folder cannot be written, or a file does not arrive whole.
        """
        status = Status.of(self._native.fetch(str(job), os.fspath(out)))
        read = Result.read(out)
        return Result(status, read.metrics, read.out, read._weights)

    def worst(self, job: str | int) -> Worst:
        """Return the records with the largest losses in a job's last evaluation.

        With ``[early_stopping]`` they are those of the best version. There are some if the job file
        has ``evaluation.worst``, and the job has ended.

        Raises:
            NotFoundError: The master does not know the job.
        """
        return Worst(*self._native.worst(str(job)))

    def _wait(
        self, job: str, out: Path | None, resumes: bool, progress: bool | None, check: bool
    ) -> Result:
        with Collector(progress) as collector:
            folder = None if out is None else str(out)
            text = self._native.follow(job, folder, resumes, collector)
        status = Status.of(text)
        name = status.job
        return finished(status, collector, out, lambda: self._native.weights(name), check)


class Job:
    """A job of a master.

    Attributes:
        client: The client of its master.
        name: The job's name with its number, such as ``digits-7``.
        id: The job's number.
    """

    def __init__(
        self, client: Client, name: str, number: int, out: Path | None = None, resumes: bool = False
    ) -> None:
        self.client = client
        self.name = name
        self.id = number
        self._out = out
        self._resumes = resumes

    def __repr__(self) -> str:
        return f"<job {self.name} of {self.client.url}>"

    def status(self) -> Status:
        """Return the job's state; see ``Client.status``."""
        return self.client.status(self.name)

    def logs(self, *, worker: int | str | None = None, follow: bool = False) -> Iterator[str]:
        """Return the lines of the processes of the job's script; see ``Client.logs``."""
        return self.client.logs(self.name, worker=worker, follow=follow)

    def watch(self) -> Watch:
        """Return the job's events; see ``Client.watch``."""
        return self.client.watch(self.name)

    def scale(self, workers: int) -> Status:
        """Set how many workers take part; see ``Client.scale``."""
        return self.client.scale(self.name, workers)

    def pause(self) -> Status:
        """Hand out no new work until it is resumed; see ``Client.pause``."""
        return self.client.pause(self.name)

    def resume(self, *, numerics: str | None = None) -> Status:
        """Let the paused job go on; see ``Client.resume``."""
        return self.client.resume(self.name, numerics=numerics)

    def cancel(self, *, force: bool = False) -> Status:
        """Stop the job; see ``Client.cancel``."""
        return self.client.cancel(self.name, force=force)

    def wait(
        self,
        *,
        out: str | os.PathLike[str] | None = None,
        progress: bool | None = None,
        check: bool = True,
    ) -> Result:
        """Wait for the job's end; see ``Client.wait``. Default of ``out``: that of ``submit``."""
        folder = self._out if out is None else Path(out)
        return self.client._wait(self.name, folder, self._resumes, progress, check)

    def fetch(self, out: str | os.PathLike[str]) -> Result:
        """Write the job's results into a folder; see ``Client.fetch``."""
        return self.client.fetch(self.name, out)

    def worst(self) -> Worst:
        """Return the records with the largest losses; see ``Client.worst``."""
        return self.client.worst(self.name)


class Watch:
    """The events of a job, for one ``for`` or ``async for`` loop.

    Attributes:
        status: The job's last state, once the events have ended.
    """

    def __init__(self, events: _native.Events) -> None:
        self.status: Status | None = None
        self._events = events
        # A call that an asyncio task has left. The next call takes its event, so none is lost.
        self._pending: asyncio.Future[_Step] | None = None
        self._waiting: _native.Waiting | None = None

    def __iter__(self) -> Watch:
        return self

    def __next__(self) -> Event:
        if self.status is not None:
            raise StopIteration
        event = self._event(*self._events.next())
        if event is None:
            raise StopIteration
        return event

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> Event:
        if self.status is not None:
            raise StopAsyncIteration
        event = self._event(*await self._next())
        if event is None:
            raise StopAsyncIteration
        return event

    def close(self) -> None:
        """End a wait for an event that an asyncio task has left."""
        if self._waiting is not None:
            self._waiting.cancel()
        self._pending = self._waiting = None

    async def _next(self) -> _Step:
        import asyncio

        if self._pending is None:
            loop = asyncio.get_running_loop()
            future: asyncio.Future[_Step] = loop.create_future()

            def done(step: _Step | None, error: Exception | None) -> None:
                # The loop may be closed by now.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(_settle, future, step, error)

            self._waiting = self._events.next_later(done)
            self._pending = future
        try:
            step = await asyncio.shield(self._pending)
        except asyncio.CancelledError:
            raise
        except Exception:
            self._pending = self._waiting = None
            raise
        self._pending = self._waiting = None
        return step

    def _event(self, event: tuple[str, int] | None, ended: str | None) -> Event | None:
        if event is not None:
            return Event.of(*event)
        self.status = None if ended is None else Status.of(ended)
        return None


def _lines(logs: _native.Logs) -> Iterator[str]:
    while (lines := logs.next()) is not None:
        yield from lines


def _settle(future: asyncio.Future[_Step], step: _Step | None, error: Exception | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    elif step is not None:
        future.set_result(step)
