"""Collects the events of a job, shows them, and makes its result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from ebbflow.errors import JobCancelledError, JobFailedError
from ebbflow.progress import Progress
from ebbflow.result import Metrics, Result, _read_model
from ebbflow.status import Event, Status


class Collector:
    """Takes each event, for ``_native``."""

    def __init__(
        self, progress: bool | None, on_event: Callable[[Event], object] | None = None
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        self._progress = Progress(progress)
        self._on_event = on_event

    def __enter__(self) -> Collector:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.close()

    def __call__(self, text: str, total_steps: int) -> None:
        event = Event.of(text, total_steps)
        self.rows.append(dict(event))
        self._progress.event(event)
        if self._on_event is not None:
            self._on_event(event)


def finished(
    status: Status,
    collector: Collector,
    out: Path | None,
    weights: Callable[[], bytes | None],
    check: bool,
) -> Result:
    """Return the result of a job that ended.

    Raises:
        JobFailedError: ``check``, and the job failed.
        JobCancelledError: ``check``, and a user cancelled the job.
    """
    read = weights if out is None else lambda: _read_model(out)
    result = Result(status, Metrics(collector.rows), out, read)
    if check and status.state == "failed":
        raise JobFailedError(f"{status.job} failed: {status.reason}", result)
    if check and status.state == "cancelled":
        raise JobCancelledError(f"{status.job} was cancelled: {status.reason}", result)
    return result
