"""The state and the events of a job, as the master tells them."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["Event", "Status"]

#: States of a job that does not change any more.
_ENDED = ("succeeded", "failed", "cancelled")


class Status(dict[str, Any]):
    """The state of a job at one moment, with its counters and metrics.

    It is a dictionary with the fields of ``ebb status --json``. The properties are the usual ones.
    """

    @property
    def job(self) -> str:
        """The job's name with its number, such as ``digits-7``."""
        return str(self["job"])

    @property
    def state(self) -> str:
        """The state's name. ``succeeded``, ``failed`` and ``cancelled`` are ends."""
        return str(self["status"])

    @property
    def reason(self) -> str:
        """Why the job is in this state."""
        return str(self["reason"])

    @property
    def is_end(self) -> bool:
        """Whether the job has ended, whatever its success."""
        return self.state in _ENDED

    @property
    def steps(self) -> int:
        """Number of steps of the whole job; 0 before the data are counted."""
        return int(self["steps"])

    @property
    def steps_done(self) -> int:
        """Number of steps that are applied."""
        return int(self["steps_done"])

    @property
    def final(self) -> dict[str, float]:
        """Metrics of the newest evaluation; without one, the training loss of the newest step."""
        return dict(self["final"])

    @property
    def model_sha256(self) -> str | None:
        """SHA-256 of the trained model in hexadecimal digits; ``None`` before there is a model."""
        value = self["model_sha256"]
        return None if value is None else str(value)

    @classmethod
    def of(cls, text: str) -> Status:
        """Return the state in a JSON object."""
        return cls(json.loads(text))


class Event(dict[str, Any]):
    """Something that happened to a job.

    It is a dictionary with the fields of ``ebb watch --json``. ``event["event"]`` says what it is:
    ``train``, ``eval``, ``fleet``, ``checkpoint``, ``rewind``, ``state``, ``indexing`` or
    ``warning``. A number that is not finite is ``None``.
    """

    #: Number of steps of the whole job; 0 where the event does not say.
    total_steps: int = 0

    @property
    def kind(self) -> str:
        """What happened: the field ``event``."""
        return str(self["event"])

    @property
    def sequence(self) -> int:
        """The number of the event in its job, counted from 1. Numbers grow, with gaps."""
        return int(self["sequence"])

    @property
    def unix_ms(self) -> int:
        """Time on the master's clock, in milliseconds since 1970."""
        return int(self["unix_ms"])

    @classmethod
    def of(cls, text: str, total_steps: int) -> Event:
        """Return the event in a JSON object, of a job with so many steps."""
        event = cls(json.loads(text))
        event.total_steps = total_steps
        return event
