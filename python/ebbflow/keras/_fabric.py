"""The part of ``ebbflow.fabric`` that is for Keras. Everything here is private to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ebbflow._fabric import Part, onnx_path
from ebbflow._measured import Sums
from ebbflow.export import onnx, require_onnx
from ebbflow.keras.compiled import Compiled, check_loss, check_metric, parts
from ebbflow.keras.engine import records_of
from ebbflow.keras.session import join
from ebbflow.session import Batch, Session


class KerasPart(Part):
    """A ``keras.Model``, compiled with its loss, its optimizer and its metrics.

    Raises:
        TypeError: The loss is no mean over records, or a metric does not add up over them.
        ValueError: Keras knows no loss, optimizer or metric of a name.
    """

    def __init__(
        self,
        model: Any,
        loss: Any,
        optimizer: Any,
        metrics: Sequence[Any],
        keras_custom_objects: Mapping[str, Any] | None,
        collate: Callable[[list[Any]], Any] | None,
    ) -> None:
        objects = dict(keras_custom_objects or {})
        loss, optimizer = _meant(loss, objects), _meant(optimizer, objects)
        metrics = [_meant(metric, objects) for metric in metrics]
        check_loss(loss)
        for metric in metrics:
            check_metric(_known(metric))
        self._model = model
        self._collate = collate
        self._data: tuple[Any, Any] = (None, None)
        self._inputs: Any = None
        model.compile(optimizer=optimizer, loss=loss, metrics=metrics, jit_compile=False)
        self._compiled = Compiled(model)

    def prepare(self, train: Any, test: Any, seed: int, to_onnx: bool) -> dict[str, Sums]:
        if to_onnx:
            require_onnx("save_to_onnx=True", self._model)
        self._data = train, test
        first = records_of(train, "train_data", seed, self._collate).load(0, [0])
        metrics = self._compiled.prepare(first)
        self._inputs = parts(first)[0] if to_onnx else None
        return metrics

    def join(self, batch_size: int, loaders: int, **options: Any) -> Session:
        train, test = self._data
        optimizer = self._model.optimizer
        return join(
            self._model, optimizer, train, test, micro=batch_size, collate=self._collate, **options
        )

    def train(self, job: Session, batch: Batch) -> dict[str, Any]:
        outputs: Any = None

        def loss() -> Any:
            nonlocal outputs
            outputs, mean = self._compiled.outcome(batch.data, training=True)
            return mean

        step: Callable[[Any], float] = job.step
        values = {"loss": step(loss)}
        return values | self._compiled.metrics(batch.data, outputs)

    def test(self, batch: Batch) -> dict[str, Any]:
        outputs, loss = self._compiled.outcome(batch.data, training=False)
        return {"loss": float(loss)} | self._compiled.metrics(batch.data, outputs)

    def export(self) -> None:
        onnx(self._model, self._inputs, onnx_path())


def _meant(value: Any, objects: Mapping[str, Any]) -> Any:
    """Return what a user's name stands for, and any other value as it is."""
    found = objects.get(value) if isinstance(value, str) else None
    if found is None:
        return value
    return found() if isinstance(found, type) else found


def _known(metric: Any) -> Any:
    """Return the metric of a name of Keras, unless it depends on the labels which one that is."""
    import keras

    if not isinstance(metric, str) or metric in _BY_LABELS:
        return metric
    return keras.metrics.get(metric)


_BY_LABELS = ("accuracy", "acc", "crossentropy", "ce")
