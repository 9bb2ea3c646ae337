"""Objects that hear the events of a job: to print, to record, to notify.

``ebbflow.join(callbacks=[...])`` gives them to a job. Each process of a job makes its own objects,
and the master elects the one process that calls them. If that process ends, another one is
elected, and its objects hear the job from its first event on. So each object hears each event at
most once, and the last one that is elected hears all of them.

``follow`` calls objects in a process that does not train, for any job of a master.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ebbflow.client import Job
from ebbflow.status import Event, Status
from ebbflow.worst import Worst

__all__ = ["Callback", "follow"]


class Callback:
    """What hears the events of a job. Override any of its methods.

    A method that raises ends the loop of its process with that error.
    """

    def on_begin(self, job: str) -> None:
        """Hear that events of ``job`` follow, its first one first."""

    def on_event(self, event: Event) -> None:
        """Hear an event: ``event.kind`` says what it is, and ``event["loss"]`` reaches a field."""

    def on_worst(self, worst: Worst, updates: int) -> None:
        """Hear which records had the largest losses, after ``updates`` updates.

        It comes after the last event, for ``worst`` of ``ebbflow.join``, and from :func:`follow`
        also for a job file with ``evaluation.worst``.
        """

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Hear that the job has ended, whatever its success.

        ``summary`` is the job in numbers, with ``status``, ``reason`` and ``final``.
        """


def follow(job: Job, callbacks: Sequence[Callback]) -> Status:
    """Call objects with the events of a job, from the first one to the last one, in this process.

    It waits for the end of the job, and returns its state.
    """
    for callback in callbacks:
        callback.on_begin(job.name)
    watch = job.watch()
    measured = 0
    for event in watch:
        if event.kind == "eval":
            measured = int(event["step"])
        for callback in callbacks:
            callback.on_event(event)
    assert watch.status is not None
    worst = job.worst()
    if worst:
        # They are of the best version, if the job selects one.
        best = watch.status["best"]
        for callback in callbacks:
            callback.on_worst(worst, measured if best is None else int(best["step"]))
    for callback in callbacks:
        callback.on_end(watch.status)
    return watch.status


class Vote(Protocol):
    """How a process learns whether it is the one that calls the objects."""

    @property
    def is_elected(self) -> bool:
        """Whether it is this process now."""

    def wait(self) -> bool:
        """Wait until it is this process, or another one has called all. Returns whether it is."""

    def finish(self) -> None:
        """Say that this process has called all, so that nobody else does."""

    def close(self) -> None:
        """Take no part any more."""


class Caller:
    """Keeps the events of a job until this process is elected, and calls objects with them.

    It calls them on the thread of the training loop, between two batches.
    """

    def __init__(self, job: str, callbacks: Sequence[Callback], vote: Vote) -> None:
        self._job = job
        self._callbacks = list(callbacks)
        self._vote = vote
        self._waiting: deque[Event] = deque()
        self._begun = False

    def event(self, event: Event) -> None:
        """Take the next event."""
        self._waiting.append(event)
        self._call()

    def end(self, summary: Mapping[str, Any], worst: Worst | None = None, updates: int = 0) -> None:
        """Take the end. Waits until a process has called all objects: this one or another one.

        ``worst`` has the worst records after ``updates`` updates, if the job lists some.
        """
        while self._vote.wait():
            self._call()
            if self._waiting:
                continue
            for callback in self._callbacks:
                if worst:
                    callback.on_worst(worst, updates)
                callback.on_end(summary)
            self._vote.finish()
            return

    def close(self) -> None:
        """Take no part any more."""
        self._vote.close()

    def _call(self) -> None:
        if not self._vote.is_elected:
            return
        if not self._begun:
            self._begun = True
            for callback in self._callbacks:
                callback.on_begin(self._job)
        while self._waiting and self._vote.is_elected:
            event = self._waiting.popleft()
            for callback in self._callbacks:
                callback.on_event(event)
