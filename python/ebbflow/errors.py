"""The exceptions of this package. Each message says what failed, and what to do about it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = [
    "AccessError",
    "AnswerLostError",
    "AttemptsError",
    "CheckpointError",
    "ClusterError",
    "EndedError",
    "Error",
    "ExportError",
    "IncompatibleError",
    "InvalidJobError",
    "JobCancelledError",
    "JobFailedError",
    "LimitError",
    "NotEndedError",
    "NotFoundError",
    "OutputError",
    "RecordError",
    "ResourceLimitError",
    "ResourcesError",
    "RunTimeoutError",
    "ScriptError",
    "SessionError",
    "SessionFailedError",
    "UnreachableError",
    "UnsupportedError",
    "UntranslatableError",
    "WrittenError",
]


class Error(Exception):
    """Any failure of Ebbflow, and the base of the other exceptions."""


class InvalidJobError(Error, ValueError):
    """The job, or an argument beside it, is wrong, or a file that it names cannot be read."""


class UnreachableError(Error, ConnectionError):
    """No master answered in time. Nothing was changed."""


class AnswerLostError(Error, ConnectionError):
    """A job was sent and the answer was lost: look at ``Client.jobs()`` before sending it again."""


class NotFoundError(Error, LookupError):
    """The master does not know the job."""


class NotEndedError(Error):
    """The job has no results yet."""


class EndedError(Error):
    """The job is ending or has ended, so it can no longer be changed."""


class AccessError(Error, PermissionError):
    """The token does not allow the call, or keys are wrong, missing or not accepted."""


class LimitError(Error):
    """A limit of the master is reached. Wait, and try again."""


class IncompatibleError(Error):
    """The versions of this package and of the master do not fit."""


class OutputError(Error, OSError):
    """The folder for results cannot be written, or a result did not arrive whole."""


class ExportError(Error):
    """A model cannot be written in another format, or computes something else in it."""


class CheckpointError(Error):
    """A checkpoint is missing or damaged."""


class ClusterError(Error):
    """A part of the cluster in this process failed."""


class JobFailedError(Error):
    """The job failed.

    Attributes:
        result: The :class:`~ebbflow.Result` that the job left: its state, its events, and its last
            weights if it had any.
    """

    def __init__(self, message: str, result: Any) -> None:
        super().__init__(message)
        self.result = result


class JobCancelledError(Error):
    """A user cancelled the job.

    Attributes:
        result: The :class:`~ebbflow.Result` that the job left. It has a model if the job was not
            ended by force. ``None`` if the processes of a script were ended before their job was.
    """

    def __init__(self, message: str, result: Any) -> None:
        super().__init__(message)
        self.result = result


class SessionError(Error):
    """A training loop does not do what its job needs. The message says what to change."""


class SessionFailedError(Error):
    """The job of a training loop failed or was cancelled. The message is its reason."""


class ScriptError(Error):
    """The processes of a script failed, or none of them joined a job.

    Attributes:
        lines: The last lines of output of the process that failed.
        logs: Folder with all output, a file for each process.
    """

    def __init__(self, message: str, lines: list[str], logs: Path) -> None:
        super().__init__(message)
        self.lines = lines
        self.logs = logs


class RunTimeoutError(Error, TimeoutError):
    """A training took longer than it may, and was ended."""


class ResourceLimitError(LimitError):
    """The host, or its operator, does not allow a cluster of this size. Nothing was started."""


class RecordError(Error):
    """A record of a data set cannot be loaded. The message has its number."""


class UnsupportedError(Error, NotImplementedError):
    """Something of another system that Ebbflow does not have. The message says what to do."""


class ResourcesError(Error):
    """A task requests resources that the machine lacks."""


class AttemptsError(Error):
    """A function failed as often as it may. The cause is its last error.

    Attributes:
        attempts: How often it was called.
    """

    def __init__(self, message: str, attempts: int) -> None:
        super().__init__(message)
        self.attempts = attempts


class UntranslatableError(Error, ValueError):
    """An optimizer or a scheduler that the ps cannot apply. The message names the obstacle."""


class WrittenError(Error):
    """A training loop wrote a tensor that only its job may change."""
