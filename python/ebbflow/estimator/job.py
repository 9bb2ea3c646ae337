"""One training of an estimator, from its start to its output."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ebbflow.errors import Error, JobCancelledError, RunTimeoutError
from ebbflow.estimator.metrics import Definitions, Metric
from ebbflow.estimator.output import Output, merged, pack
from ebbflow.estimator.variables import Host
from ebbflow.launcher import Launch
from ebbflow.result import Result

__all__ = ["TrainingJob"]

#: The model of a job whose script writes none.
_MODEL = "model.safetensors"


class TrainingJob:
    """A training of an estimator. ``estimator.latest_training_job`` is the last one.

    Attributes:
        name: Name of the job.
        output: Path or URL of the job's folder. ``run/logs`` in it has the output of each process,
            and ``run`` the files of ``ebb run``.
        metrics: What the ``metric_definitions`` found so far, in the order of the lines.
        model_data: Path or URL of ``model.tar.gz``, once the job is complete.
        output_data: Path or URL of ``output.tar.gz``, if the script wrote other results.
        result: The result of the script's first ``ebbflow.join``, once the job is complete.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[Callable[[str], object]], Launch],
        root: Path,
        hosts: Sequence[Host],
        output: Output,
        definitions: Definitions,
        max_run: float | None,
    ) -> None:
        self.name = name
        self.output = output.url
        self.metrics: list[Metric] = []
        self.model_data: str | None = None
        self.output_data: str | None = None
        self.result: Result | None = None
        self._root = root
        self._hosts = hosts
        self._place = output
        self._definitions = definitions
        self._max_run = max_run
        self._failure: BaseException | None = None
        self._is_over = threading.Event()
        self._launch = start(self._line)
        threading.Thread(target=self._finish, name=f"training {name}").start()

    def __repr__(self) -> str:
        return f"<training job {self.name}: {self.status}>"

    @property
    def status(self) -> str:
        """``InProgress``, ``Completed``, ``Failed``, or ``Stopped`` by a call or by ``max_run``."""
        if not self._is_over.is_set():
            return "InProgress"
        if self._failure is None:
            return "Completed"
        stopped = isinstance(self._failure, JobCancelledError | RunTimeoutError)
        return "Stopped" if stopped else "Failed"

    @property
    def final_metrics(self) -> dict[str, float]:
        """The last value of each metric that was found."""
        return {metric.metric_name: metric.value for metric in self.metrics}

    def logs(self) -> Iterator[str]:
        """Return the lines of output; see :meth:`ebbflow.Launch.logs`."""
        return self._launch.logs()

    def stop(self) -> None:
        """Ask all processes to end. Nothing is left of what they trained."""
        self._launch.cancel()

    def wait(self, logs: bool = True) -> None:
        """Wait for the end of the job, and until its output is whole. Ctrl-C ends the wait only.

        Args:
            logs: Print the lines of output.

        Raises:
            ScriptError: The script failed. The message ends with its last lines.
            JobFailedError: The job of its ``ebbflow.join`` failed.
            JobCancelledError: The job was stopped.
            RunTimeoutError: It took longer than ``max_run``.
            OSError: The output cannot be written.
        """
        if logs:
            for line in self.logs():
                print(line, flush=True)
        self._is_over.wait()
        if self._failure is not None:
            raise self._failure

    def _line(self, line: str) -> None:
        self.metrics += self._definitions.find(line, time.time())

    def _finish(self) -> None:
        try:
            try:
                self.result = self._trained()
            except Error:
                # Why it failed matters more than why its logs cannot be written.
                with contextlib.suppress(OSError):
                    self._place.write_run()
                raise
            self._place.write_run()
            others = merged([host.output for host in self._hosts])
            if others:
                self.output_data = self._write(others, "output.tar.gz")
            # The last file: whoever sees it sees all.
            model = merged([host.model for host in self._hosts])
            kept = self._place.run / _MODEL
            self.model_data = self._write(model or {_MODEL: kept}, "model.tar.gz")
        except BaseException as error:
            self._failure = error
        finally:
            shutil.rmtree(self._root, ignore_errors=True)
            self._is_over.set()

    def _trained(self) -> Result:
        try:
            return self._launch.wait(self._max_run)
        except TimeoutError as error:
            if self._launch.state != "running":
                raise
            self._launch.cancel()
            with contextlib.suppress(Error):
                return self._launch.wait()
            raise RunTimeoutError(
                f"{self.name} has not ended after max_run = {self._max_run} s, and was ended"
            ) from error

    def _write(self, files: dict[str, Path], name: str) -> str:
        archive = self._root / name
        pack(files, archive)
        return self._place.write(archive)
