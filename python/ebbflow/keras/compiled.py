"""Loss and metrics of a compiled Keras model, as means over the records of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


class Compiled:
    """What ``model.compile`` has set.

    Args:
        model: A compiled model.

    Raises:
        ValueError: It has no loss.
    """

    def __init__(self, model: Any) -> None:
        if not getattr(model, "compiled", False):
            raise ValueError("model: it has no loss; call model.compile(optimizer, loss, metrics)")
        self._model = model
        self._checked = False
        self._outcome = self._graph(self._eager_outcome)
        self._measured = self._graph(self._eager_metrics)

    def prepare(self, batch: Any) -> list[str]:
        """Make all variables with a batch. Returns the names of the metrics.

        Raises:
            TypeError: A metric is no mean over records.
        """
        return list(self.metrics(batch, self._eager_outcome(*parts(batch), False)[0]))

    def outcome(self, batch: Any, training: bool) -> tuple[Any, Any]:
        """Return the outputs for a batch, and its mean loss with the losses of regularizers."""
        x, y = parts(batch)
        outcome: tuple[Any, Any] = self._outcome(x, y, training)
        return outcome

    def loss(self, batch: Any) -> Any:
        """Return the mean loss of a batch in training."""
        return self.outcome(batch, training=True)[1]

    def metrics(self, batch: Any, outputs: Any) -> dict[str, float]:
        """Return the metrics of a batch alone, without its loss.

        Raises:
            TypeError: A metric is no mean over records.
        """
        x, y = parts(batch)
        if self._checked:
            found = self._measured(x, y, outputs)
        else:
            # The first call makes the variables of the metrics, which a graph may not.
            found = self._eager_metrics(x, y, outputs)
            for metric in self._model.metrics:
                check_metric(metric)
            self._checked = True
        return {name: float(value) for name, value in found.items() if name != "loss"}

    def _eager_outcome(self, x: Any, y: Any, training: bool) -> tuple[Any, Any]:
        outputs = self._model(x, training=training)
        return outputs, self._model.compute_loss(x, y, outputs, training=training)

    def _eager_metrics(self, x: Any, y: Any, outputs: Any) -> Any:
        self._model.reset_metrics()
        return self._model.compute_metrics(x, y, outputs)

    def _graph(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that TensorFlow runs as a graph, in a tenth of the time."""
        import keras

        if keras.config.backend() != "tensorflow" or self._model.run_eagerly:
            return function
        import tensorflow as tf

        graph: Callable[..., Any] = tf.function(function)
        return graph


def parts(batch: Any) -> tuple[Any, Any]:
    """Return features and labels of a batch.

    Raises:
        TypeError: It is no pair.
    """
    if not isinstance(batch, Sequence) or len(batch) != 2:
        raise TypeError(
            f"a batch is no pair of features and labels, but {type(batch).__name__}; return "
            "(features, label) for each record, and (features, labels) from a collate function"
        )
    return batch[0], batch[1]


def check_metric(metric: Any) -> None:
    """Check that a metric over all records is the mean of its values over their batches.

    Raises:
        TypeError: It is not.
    """
    import keras

    inner = getattr(metric, "metrics", None)
    if isinstance(metric, keras.metrics.Metric) and inner:
        for each in inner:
            check_metric(each)
        return
    compiled = type(metric).__name__ == "CompileMetrics"
    if isinstance(metric, keras.metrics.Metric) and not compiled:
        plain = isinstance(metric, keras.metrics.Mean)
        if not plain or type(metric).result is not keras.metrics.Mean.result:
            raise TypeError(
                f"metrics: {type(metric).__name__} is no mean over records, so the values of "
                "several processes have no common one; give a function or a metric that is a mean, "
                "such as keras.metrics.SparseCategoricalAccuracy"
            )


def check_loss(loss: Any) -> None:
    """Check that a loss is a mean over records.

    Raises:
        TypeError: It is a sum, or none.
    """
    import keras

    for each in loss.values() if isinstance(loss, Mapping) else [loss]:
        reduction = getattr(each, "reduction", None)
        is_mean = reduction in ("sum_over_batch_size", "mean")
        if isinstance(each, keras.losses.Loss) and not is_mean:
            raise TypeError(
                f"loss: {type(each).__name__} has the reduction {reduction!r}, and gradients of a "
                'job are of the mean over a batch; use "sum_over_batch_size"'
            )
