"""The part of ``ebbflow.fabric`` that is for PyTorch. Everything here is private to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ebbflow
from ebbflow._fabric import Part, check_function, onnx_path
from ebbflow._measured import Given, Sums
from ebbflow.export import onnx, require_onnx
from ebbflow.session import Batch, Session


class TorchPart(Part):
    """A ``torch.nn.Module`` with its loss, its optimizer and its metrics."""

    def __init__(
        self,
        model: Any,
        loss: Callable[[Any, Any], Any],
        optimizer: Any,
        metrics: Sequence[Callable[[Any, Any], Any]],
        keras_custom_objects: Mapping[str, Any] | None,
        collate: Callable[[list[Any]], Any] | None,
    ) -> None:
        _check_model(model, keras_custom_objects)
        _check_optimizer(optimizer)
        check_function("loss_function", loss)
        self._model = model
        self._loss = loss
        self._optimizer = optimizer
        self._metrics = _named(metrics)
        self._collate = collate
        self._device = _device(model)
        self._data: tuple[Any, Any] = (None, None)
        self._inputs: Any = None

    def prepare(self, train: Any, test: Any, seed: int, to_onnx: bool) -> dict[str, Sums]:
        self._data = train, test
        self._device = _device(self._model)
        self._inputs = self._example(train) if to_onnx else None
        return {name: Given(name) for name in self._metrics}

    def join(self, batch_size: int, loaders: int, **options: Any) -> Session:
        from torch.utils.data import DataLoader

        train, test = (
            DataLoader(
                data,
                batch_size=batch_size,
                shuffle=True,
                num_workers=loaders,
                collate_fn=self._collate,
            )
            for data in self._data
        )
        self._model.train()
        return ebbflow.join(self._model, self._optimizer, train, test, **options)

    def train(self, job: Session, batch: Batch) -> dict[str, float]:
        import torch

        outputs, labels, loss = self._forward(batch)
        values = {"loss": job.step(loss)}
        with torch.no_grad():
            return values | self._measured(outputs, labels)

    def test(self, batch: Batch) -> dict[str, float]:
        outputs, labels, loss = self._forward(batch)
        return {"loss": float(loss)} | self._measured(outputs, labels)

    def export(self) -> None:
        onnx(self._model, self._inputs, onnx_path())

    def _forward(self, batch: Batch) -> tuple[Any, Any, Any]:
        if not isinstance(batch.data, Sequence) or len(batch.data) != 2:
            raise TypeError(
                "a batch is no pair of features and labels, but "
                f"{type(batch.data).__name__}; return (features, label) from __getitem__, and "
                "(features, labels) from fn_batch_collate"
            )
        features, labels = (_moved(part, self._device) for part in batch.data)
        outputs = self._model(features)
        return outputs, labels, self._loss(outputs, labels)

    def _measured(self, outputs: Any, labels: Any) -> dict[str, float]:
        return {name: float(metric(outputs, labels)) for name, metric in self._metrics.items()}

    def _example(self, data: Any) -> Any:
        """Return the features of a batch of one record, for ``save_to_onnx``."""
        import torch
        from torch.utils.data import default_collate

        require_onnx("save_to_onnx=True")
        features = (self._collate or default_collate)([data[0]])[0]
        if not isinstance(features, torch.Tensor):
            raise TypeError(
                f"save_to_onnx=True: the features of a batch are {type(features).__name__}, and "
                "only models of one tensor are exported; leave save_to_onnx out, and export the "
                "model yourself"
            )
        return _moved(features, self._device)


def _check_model(model: Any, keras_custom_objects: Mapping[str, Any] | None) -> None:
    import torch

    if isinstance(model, torch.nn.Module):
        if keras_custom_objects is not None:
            raise TypeError(
                "keras_custom_objects: a torch.nn.Module has no Keras objects; leave it out"
            )
        return
    raise TypeError(
        f"model: expected a torch.nn.Module or a keras.Model, found {type(model).__name__}"
    )


def _check_optimizer(optimizer: Any) -> None:
    import torch

    if not isinstance(optimizer, torch.optim.Optimizer):
        found = repr(optimizer) if isinstance(optimizer, str) else type(optimizer).__name__
        raise TypeError(
            f"optimizer: expected an instance of torch.optim, found {found}; such as "
            "torch.optim.Adam(model.parameters())"
        )


def _named(metrics: Sequence[Callable[[Any, Any], Any]]) -> dict[str, Callable[[Any, Any], Any]]:
    named: dict[str, Callable[[Any, Any], Any]] = {}
    for metric in metrics:
        check_function("metrics", metric)
        name = str(getattr(metric, "__name__", type(metric).__name__))
        if name == "loss" or name in named:
            why = "the loss is called so" if name == "loss" else "another metric is called so"
            raise ValueError(f"metrics: `{name}`: {why}; give the function another name")
        named[name] = metric
    return named


def _device(model: Any) -> Any:
    import torch

    return next((tensor.device for tensor in model.parameters()), torch.device("cpu"))


def _moved(part: Any, device: Any) -> Any:
    """Return a part of a batch with its tensors on a device."""
    import torch

    if isinstance(part, torch.Tensor):
        return part.to(device)
    if isinstance(part, Mapping):
        return {name: _moved(value, device) for name, value in part.items()}
    if isinstance(part, list | tuple):
        return [_moved(value, device) for value in part]
    return part
