"""What ``ebbflow.fabric`` checks and counts. Everything here is private to it."""

from __future__ import annotations

import math
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ebbflow._measured import Sums
from ebbflow.session import Batch, Session

_METHODS = ("log_train_metrics", "log_test_metrics", "on_train_begin", "on_train_end")


class Part(ABC):
    """What depends on the library in which a model is written."""

    @abstractmethod
    def prepare(self, train: Any, test: Any, seed: int, to_onnx: bool) -> dict[str, Sums]:
        """Take the data sets, and check what can be checked before a job. Returns the metrics."""

    @abstractmethod
    def join(self, batch_size: int, loaders: int, **options: Any) -> Session:
        """Take part in a job, with so many processes that load records of each data set."""

    @abstractmethod
    def train(self, job: Session, batch: Batch) -> dict[str, Any]:
        """Step a batch. Returns its loss and its metrics."""

    @abstractmethod
    def test(self, batch: Batch) -> dict[str, Any]:
        """Return the loss and the metrics of a batch of test data."""

    @abstractmethod
    def export(self) -> None:
        """Write the final model as ONNX."""


#: Most processes of a job.
_FLEET_MAX = 1024


def batches(
    batch_size: int, engines: int | None, effective: int | None, fleet: int | None = None
) -> tuple[int, int]:
    """Return the number of devices and the records of an update.

    ``(32, 4, None)`` gives 4 and 128. ``(32, None, 100)`` gives 4 and 128, with a warning, because
    an update consists of whole batches. Of both the larger number of devices counts. Without both
    it is that of the fleet, and 1 if nobody knows the fleet: ``(32, None, None, 2)`` gives 2 and
    64.
    """
    whole("batch_size", batch_size, 1)
    if engines is not None:
        whole("engines_number", engines, 1)
    if effective is None:
        # A process has one device.
        engines = engines or fleet or 1
        return engines, batch_size * engines
    whole("effective_batch_size", effective, 1)
    parts = math.ceil(effective / batch_size)
    rounded = parts * batch_size
    if rounded != effective:
        warnings.warn(
            f"effective_batch_size = {effective} is no multiple of batch_size = {batch_size}; an "
            f"update has {rounded} records",
            stacklevel=3,
        )
    return max(engines or 1, parts), rounded


def fleet_of(variables: Mapping[str, str]) -> int | None:
    """Return the number of processes with which a script was started on a cluster, if it is known.

    ``ebb run`` and ``ebb submit`` set it to their ``--workers``. It stays the same for a process
    that is started later, so all processes describe the same job.

    Raises:
        ValueError: The variable is no such number.
    """
    text = variables.get("EBBFLOW_WORKERS", "").strip()
    if not text or "EBBFLOW_MASTER" not in variables:
        return None
    if not text.isdecimal() or not 1 <= int(text) <= _FLEET_MAX:
        raise ValueError(f"EBBFLOW_WORKERS = {text!r}: expected a number from 1 to {_FLEET_MAX}")
    return int(text)


def onnx_path() -> Path:
    """Return the file for ``save_to_onnx``."""
    return Path(os.environ.get("RESULT_DIR", "."), "model.onnx")


def check_function(what: str, function: Any) -> None:
    if not callable(function):
        found = repr(function) if isinstance(function, str) else type(function).__name__
        raise TypeError(f"{what}: expected a function or a callable object, found {found}")


def checked_logger(what: str, logger: Any) -> Any:
    missing = [method for method in _METHODS if logger is not None and not hasattr(logger, method)]
    if missing:
        raise TypeError(
            f"{what}: {type(logger).__name__} has no {missing[0]}; derive it from "
            "ebbflow.fabric.LoggerCallback"
        )
    return logger


def pair(datasets: Any) -> tuple[Any, Any]:
    if not isinstance(datasets, Sequence) or len(datasets) != 2:
        raise TypeError(
            "datasets_function: expected a pair of a training and a test data set, found "
            f"{type(datasets).__name__}"
        )
    for what, data in zip(("training", "test"), datasets, strict=True):
        if not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
            raise TypeError(
                f"datasets_function: the {what} data set, {type(data).__name__}, has no __len__ or "
                "no __getitem__; return map-style data sets"
            )
        if len(data) == 0:
            raise ValueError(
                f"datasets_function: the {what} data set has no records, and a job needs at least "
                "one; check its path and its filters"
            )
    return datasets[0], datasets[1]


def whole(what: str, number: Any, least: int) -> None:
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"{what}: expected an integer, found {number!r}")
    if number < least:
        raise ValueError(f"{what} = {number}: expected at least {least}")


def limits(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return the limits of a job that EDT's variables set.

    ``EDT_PULL_WEIGHT_TIME_OUT`` is a number of seconds, and ``EDT_PULL_FAILED_LIMITS`` a number of
    such times, after which a process whose pulls fail all the time leaves the job.

    Raises:
        ValueError: A variable is no such number.
    """
    found: dict[str, Any] = {}
    for name, setting, kind, expected in (
        ("EDT_PULL_WEIGHT_TIME_OUT", "pull_timeout", float, "seconds, 0.1 to 86400"),
        ("EDT_PULL_FAILED_LIMITS", "pull_attempts_max", int, "a number from 1 to 10000"),
    ):
        text = variables.get(name, "").strip()
        if not text:
            continue
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        least, most = (0.1, 86400) if kind is float else (1, 10000)
        if not least <= value <= most:
            raise ValueError(f"{name} = {text!r}: expected {expected}")
        found[setting] = f"{round(value * 1000)}ms" if kind is float else value
    return found


def number(value: Any) -> float:
    """Return a number of an event, in which ``None`` stands for one that is not finite."""
    return math.nan if value is None else float(value)


def measured(value: Any) -> Any:
    """Return the value of a metric in an event. Some metrics have one for each class."""
    return value if isinstance(value, list | dict) else number(value)


def shown(metrics: Mapping[str, Any]) -> str:
    texts = {
        name: f"{value:.4f}" if isinstance(value, float | int) else str(value)
        for name, value in metrics.items()
    }
    return " ".join(f"{name}={text}" for name, text in texts.items())
