"""What ``ebbflow.fabric`` checks, counts and moves. Everything here is private to it."""

from __future__ import annotations

import math
import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# Names of means over records, under which a job has metrics.
_MEANS = re.compile(r"accuracy|log_loss|mae|mse|top([1-9]\d{0,2}|1000)")

_METHODS = ("log_train_metrics", "log_test_metrics", "on_train_begin", "on_train_end")


def batches(batch_size: int, engines: int | None, effective: int | None) -> tuple[int, int]:
    """Return the number of devices and the records of an update.

    ``(32, 4, None)`` gives 4 and 128. ``(32, None, 100)`` gives 4 and 128, with a warning, because
    an update consists of whole batches. Of both the larger number of devices counts.
    """
    whole("batch_size", batch_size, 1)
    if engines is not None:
        whole("engines_number", engines, 1)
    if effective is None:
        # At its submission a job has one process, with one device.
        engines = engines or 1
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


def aliases(names: Sequence[str]) -> dict[str, str]:
    """Return the names of metrics in the job's events, where they are others.

    The events of a job have a fixed set of names. A metric of another name travels as a top-k
    accuracy of a k that nobody measures, from ``top1000`` down, which is a mean over records too.
    """
    free = (name for name in (f"top{k}" for k in range(1000, 0, -1)) if name not in names)
    return {name: next(free) for name in names if not _MEANS.fullmatch(name)}


def check_model(model: Any, keras_custom_objects: Mapping[str, Any] | None) -> None:
    import torch

    if isinstance(model, torch.nn.Module):
        if keras_custom_objects is not None:
            raise TypeError(
                "keras_custom_objects: a torch.nn.Module has no Keras objects; leave it out"
            )
        return
    modules = {kind.__module__.partition(".")[0] for kind in type(model).__mro__}
    if modules & {"keras", "tensorflow", "tf_keras"}:
        raise TypeError(
            f"model: {type(model).__name__} is a Keras model, and Keras models are not trained "
            "yet; give a torch.nn.Module"
        )
    raise TypeError(f"model: expected a torch.nn.Module, found {type(model).__name__}")


def check_optimizer(optimizer: Any) -> None:
    import torch

    if not isinstance(optimizer, torch.optim.Optimizer):
        found = repr(optimizer) if isinstance(optimizer, str) else type(optimizer).__name__
        raise TypeError(
            f"optimizer: expected an instance of torch.optim, found {found}; such as "
            "torch.optim.Adam(model.parameters())"
        )


def check_function(what: str, function: Any) -> None:
    if not callable(function):
        found = repr(function) if isinstance(function, str) else type(function).__name__
        raise TypeError(f"{what}: expected a function or a callable object, found {found}")


def named(metrics: Sequence[Callable[[Any, Any], Any]]) -> dict[str, Callable[[Any, Any], Any]]:
    named: dict[str, Callable[[Any, Any], Any]] = {}
    for metric in metrics:
        check_function("metrics", metric)
        name = str(getattr(metric, "__name__", type(metric).__name__))
        if name == "loss" or name in named:
            why = "the loss is called so" if name == "loss" else "another metric is called so"
            raise ValueError(f"metrics: `{name}`: {why}; give the function another name")
        named[name] = metric
    return named


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
            raise ValueError(f"datasets_function: the {what} data set has no records")
    return datasets[0], datasets[1]


def whole(what: str, number: Any, least: int) -> None:
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"{what}: expected an integer, found {number!r}")
    if number < least:
        raise ValueError(f"{what} = {number}: expected at least {least}")


def device(model: Any) -> Any:
    import torch

    return next((tensor.device for tensor in model.parameters()), torch.device("cpu"))


def moved(part: Any, device: Any) -> Any:
    """Return a part of a batch with its tensors on a device."""
    import torch

    if isinstance(part, torch.Tensor):
        return part.to(device)
    if isinstance(part, Mapping):
        return {name: moved(value, device) for name, value in part.items()}
    if isinstance(part, list | tuple):
        return [moved(value, device) for value in part]
    return part


def export(model: Any, inputs: Any) -> None:
    import torch

    path = Path(os.environ.get("RESULT_DIR", "."), "model.onnx")
    path.parent.mkdir(parents=True, exist_ok=True)
    was_training = model.training
    model.eval()
    try:
        shapes = ({0: torch.export.Dim.DYNAMIC},)
        torch.onnx.export(
            model, (inputs,), str(path), dynamo=True, dynamic_shapes=shapes, external_data=False
        )
    finally:
        model.train(was_training)


def number(value: Any) -> float:
    """Return a number of an event, in which ``None`` stands for one that is not finite."""
    return math.nan if value is None else float(value)


def shown(metrics: Mapping[str, float]) -> str:
    return " ".join(f"{name}={value:.4f}" for name, value in metrics.items())
