"""Metrics of a loop, as numbers that add up over records.

Each batch of ``job.evaluate`` gives some numbers for each metric. The master adds those of all
batches, in the order of the records, and each process turns the sums into the value. So the value
does not depend on which process measured what.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ebbflow._listed import PARTS as LISTED

#: Names in an event of an evaluation that are no metrics.
KNOWN = frozenset({"event", "sequence", "unix_ms", "epoch", "step", "set"})

#: Names that the function of ``job.evaluate`` returns beside metrics.
_PARTS = ("loss", "outputs", "labels", *LISTED)


class Sums(ABC):
    """One metric.

    Attributes:
        is_mean: Whether its numbers are a sum and its count, whose quotient is the value. Then the
            master knows the value, and all programs that watch the job do.
        needs_outputs: Whether it computes its numbers of the outputs of the model.
    """

    is_mean = False
    needs_outputs = True

    @abstractmethod
    def of(self, found: Mapping[str, Any], records: int) -> list[float]:
        """Return the numbers of one batch of so many records.

        ``found`` has the outputs, the labels, and what else the function of the user returned.
        """

    def value(self, sums: Sequence[float]) -> Any:
        """Return the value for the numbers of all batches."""
        raise NotImplementedError


class Given(Sums):
    """The mean over records of a value that the function of the user returned itself."""

    is_mean = True
    needs_outputs = False

    def __init__(self, name: str) -> None:
        self._name = name

    def of(self, found: Mapping[str, Any], records: int) -> list[float]:
        return [float(found[self._name]) * records, float(records)]


class Function(Sums):
    """A function of outputs and labels: a mean over the batch, or a sum and its count."""

    is_mean = True

    def __init__(self, name: str, function: Callable[[Any, Any], Any]) -> None:
        self._name = name
        self._function = function

    def of(self, found: Mapping[str, Any], records: int) -> list[float]:
        measured = self._function(found["outputs"], found["labels"])
        if isinstance(measured, tuple | list):
            if len(measured) != 2:
                raise TypeError(
                    f"metrics[{self._name!r}]: expected the mean over the batch, or a sum and its "
                    f"count, found {len(measured)} values"
                )
            return [float(measured[0]), float(measured[1])]
        return [float(measured) * records, float(records)]


class Torchmetrics(Sums):
    """A metric of torchmetrics whose states are sums (``dist_reduce_fx="sum"``)."""

    def __init__(self, name: str, metric: Any) -> None:
        self._name = name
        self._metric = metric
        # A tracker and a wrapper have none.
        self._states = list(getattr(metric, "_defaults", ()))
        if not self._states:
            raise TypeError(
                f"metrics[{name!r}]: {type(metric).__name__} has no states of its own; give the "
                "metrics inside it by a name each"
            )
        for state, default in metric._defaults.items():
            reduction = metric._reductions[state]
            found = getattr(reduction, "__name__", reduction)
            if isinstance(default, list) or found not in ("dim_zero_sum", "sum"):
                kept = "keeps all outputs" if isinstance(default, list) else f"is a {found}"
                raise TypeError(
                    f"metrics[{name!r}]: the state `{state}` of {type(metric).__name__} {kept}, "
                    "and only sums are merged over processes; give the metric another setting, "
                    "such as `thresholds`, or use another metric"
                )

    def of(self, found: Mapping[str, Any], records: int) -> list[float]:
        import torch

        metric = self._metric
        metric.reset()
        metric.update(found["outputs"], found["labels"])
        numbers: list[float] = []
        for state in self._states:
            value, default = getattr(metric, state), metric._defaults[state]
            if value.shape != default.shape:
                raise TypeError(
                    f"metrics[{self._name!r}]: the state `{state}` has the shape "
                    f"{tuple(value.shape)} after a batch and {tuple(default.shape)} before it; "
                    "tell the metric the number of outputs or classes when you make it"
                )
            added = value.detach().to("cpu", torch.float64) - default.to("cpu", torch.float64)
            numbers += added.reshape(-1).tolist()
        metric.reset()
        return numbers

    def value(self, sums: Sequence[float]) -> Any:
        import torch

        metric = self._metric
        metric.reset()
        begin = 0
        for state in self._states:
            default = metric._defaults[state]
            end = begin + default.numel()
            added = torch.tensor(sums[begin:end], dtype=torch.float64).reshape(default.shape)
            whole = (default.to("cpu", torch.float64) + added).to(default.dtype)
            setattr(metric, state, whole.to(metric.device))
            begin = end
        # Without an update torchmetrics warns that there is nothing to compute from.
        metric._update_count = 1
        value = plain(metric.compute())
        metric.reset()
        return value


class Keras(Sums):
    """A metric of Keras whose variables are sums."""

    def __init__(self, name: str, metric: Any) -> None:
        self._name = name
        self._metric = metric
        if not isinstance(metric, _additive()):
            raise TypeError(
                f"metrics[{name!r}]: nobody knows whether the variables of "
                f"{type(metric).__name__} are sums; give a metric that is a mean, AUC, Precision, "
                "Recall, a count of a confusion matrix, IoU or F1Score"
            )

    def of(self, found: Mapping[str, Any], records: int) -> list[float]:
        self._metric.reset_state()
        self._metric.update_state(found["labels"], found["outputs"])
        numbers = self._numbers()
        self._metric.reset_state()
        return numbers

    def _numbers(self) -> list[float]:
        """Return what the metric has counted since it was reset."""
        import keras
        import numpy as np

        numbers: list[float] = []
        for variable in self._metric.variables:
            values = np.asarray(keras.ops.convert_to_numpy(variable.value), dtype=np.float64)
            numbers += values.reshape(-1).tolist()
        return numbers

    def value(self, sums: Sequence[float]) -> Any:
        import numpy as np

        metric = self._metric
        metric.reset_state()
        sizes = [math.prod(variable.shape) for variable in metric.variables]
        if sum(sizes) != len(sums):
            raise TypeError(
                f"metrics[{self._name!r}]: {type(metric).__name__} makes its variables with its "
                "first batch, and this process measured none; call its update_state once before"
            )
        begin = 0
        for variable, size in zip(metric.variables, sizes, strict=True):
            values = np.asarray(sums[begin : begin + size], dtype=np.float64)
            variable.assign(values.reshape(variable.shape).astype(variable.dtype))
            begin += size
        value = plain(metric.result())
        metric.reset_state()
        return value


class Counted(Keras):
    """A metric of Keras that the caller has reset, and updated with the batch alone."""

    needs_outputs = False

    def of(self, found: Mapping[str, Any], records: int) -> list[float]:
        return self._numbers()


def metrics_of(metrics: Any) -> dict[str, Sums]:
    """Return the metrics that a user gives ``job.evaluate``.

    Raises:
        TypeError: One is of a kind that does not add up, or has no name of its own.
    """
    if metrics is None:
        return {}
    # A MetricCollection of torchmetrics is no Mapping, and has its items too.
    if not hasattr(metrics, "items"):
        raise TypeError(
            f"metrics: expected a dictionary of metrics by name, found {type(metrics).__name__}"
        )
    found: dict[str, Sums] = {}
    for name, metric in metrics.items():
        if not isinstance(name, str) or not name or name in KNOWN or name in _PARTS:
            raise TypeError(f"metrics[{name!r}]: a metric needs a name of its own")
        found[name] = metric if isinstance(metric, Sums) else _metric_of(name, metric)
    return found


def _metric_of(name: str, metric: Any) -> Sums:
    modules = {kind.__module__.partition(".")[0] for kind in type(metric).__mro__}
    if "torchmetrics" in modules:
        return Torchmetrics(name, metric)
    if "keras" in modules:
        return Keras(name, metric)
    if not callable(metric):
        raise TypeError(
            f"metrics[{name!r}]: expected a function of outputs and labels, or a metric of "
            f"torchmetrics or Keras, found {type(metric).__name__}"
        )
    return Function(name, metric)


def parts(found: Mapping[str, Any], batch: Any, metrics: Mapping[str, Sums]) -> Mapping[str, Any]:
    """Return what a user's function returned for a batch, with outputs and labels.

    Raises:
        TypeError: A metric needs outputs, and there are none.
    """
    wanting = [name for name, metric in metrics.items() if metric.needs_outputs]
    if not wanting:
        return found
    if "outputs" not in found:
        raise TypeError(
            f"job.evaluate: metrics[{wanting[0]!r}] needs the outputs of the model; let the "
            'function return them too, as in {"loss": loss, "outputs": outputs}'
        )
    return found if "labels" in found else {**found, "labels": batch.y}


def plain(value: Any) -> Any:
    """Return a value of a metric as numbers of Python."""
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    if hasattr(value, "detach"):
        value = value.detach().cpu()
    if hasattr(value, "numpy"):
        value = value.numpy()
    return value.tolist() if hasattr(value, "tolist") else value


def _additive() -> tuple[type, ...]:
    """Return the kinds of metrics of Keras whose variables are sums over records."""
    from keras import metrics

    return (
        metrics.Mean,
        metrics.Sum,
        metrics.AUC,
        metrics.Precision,
        metrics.Recall,
        metrics.TruePositives,
        metrics.TrueNegatives,
        metrics.FalsePositives,
        metrics.FalseNegatives,
        metrics.PrecisionAtRecall,
        metrics.RecallAtPrecision,
        metrics.SensitivityAtSpecificity,
        metrics.SpecificityAtSensitivity,
        metrics.IoU,
        metrics.FBetaScore,
    )
