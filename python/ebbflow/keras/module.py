"""A Keras model on its backend torch, as a module that torch exports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class _Called(torch.nn.Module):  # type: ignore[misc]
    """Calls a model as in a prediction, with its inputs one by one."""

    def __init__(self, model: Any, names: list[str] | None, is_one: bool) -> None:
        super().__init__()
        self._model = model
        self._names = names
        self._is_one = is_one

    def forward(self, *tensors: Any) -> Any:
        if self._is_one:
            inputs = tensors[0]
        elif self._names is None:
            inputs = list(tensors)
        else:
            inputs = dict(zip(self._names, tensors, strict=True))
        return self._model(inputs, training=False)


def called(model: Any, inputs: Any) -> tuple[Any, tuple[Any, ...], list[str]]:
    """Return a module that calls a model, its arguments by position, and their names in a file.

    Args:
        model: The model.
        inputs: What a call of the model takes: an array or a tensor, or several ones in a sequence
            or a dictionary.
    """
    from keras import ops

    keys = [str(key) for key in inputs] if isinstance(inputs, Mapping) else None
    is_one = keys is None and not isinstance(inputs, list | tuple)
    values = list(inputs.values()) if keys is not None else [inputs] if is_one else list(inputs)
    tensors = tuple(ops.convert_to_tensor(value) for value in values)
    names = keys or (["x"] if is_one else [f"x_{number}" for number in range(len(tensors))])
    return _Called(model, keys, is_one), tensors, names
