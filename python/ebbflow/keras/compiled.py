"""Loss and metrics of a compiled Keras model, for the records of a batch and over several batches.

The loss is a mean over records. Metrics are means too, or have variables that are sums over records
(``ebbflow._measured``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ebbflow._measured import Counted, Given, Keras, Sums, plain


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
        self._outcome = self._graph(self._eager_outcome)
        self._measured = self._graph(self._eager_metrics)

    def prepare(self, batch: Any) -> dict[str, Sums]:
        """Make all variables with a batch. Returns the metrics, by the names that Keras gives them.

        Raises:
            TypeError: A metric does not add up over records.
        """
        x, y = parts(batch)
        # The first call makes the variables of the metrics, which a graph may not.
        self._eager_metrics(x, y, self._eager_outcome(x, y, False)[0])
        named = [pair for metric in self._model.metrics for pair in _named(metric)]
        return {name: _sums(name, metric) for name, metric in named if name != "loss"}

    def outcome(self, batch: Any, training: bool) -> tuple[Any, Any]:
        """Return the outputs for a batch, and its mean loss with the losses of regularizers."""
        x, y = parts(batch)
        outcome: tuple[Any, Any] = self._outcome(x, y, training)
        return outcome

    def loss(self, batch: Any) -> Any:
        """Return the mean loss of a batch in training."""
        return self.outcome(batch, training=True)[1]

    def metrics(self, batch: Any, outputs: Any) -> dict[str, Any]:
        """Return the metrics of a batch alone, without its loss. :meth:`prepare` was called before.

        Until the next call the variables of the metrics are those of this batch.
        """
        x, y = parts(batch)
        found = self._measured(x, y, outputs)
        return {name: plain(value) for name, value in found.items() if name != "loss"}

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
    """Check that a metric is a function, a name, or one whose variables are sums over records.

    Raises:
        TypeError: It is not.
    """
    import keras

    if isinstance(metric, keras.metrics.Metric):
        Keras(metric.name, metric)


def _named(metric: Any) -> Iterator[tuple[str, Any]]:
    """Yield a metric of a model with its name. That of ``compile`` stands for several."""
    if type(metric).__name__ == "CompileMetrics":
        yield from zip(metric.result(), metric.metrics, strict=True)
    else:
        yield metric.name, metric


def _sums(name: str, metric: Any) -> Sums:
    """Return what a metric of a model adds up.

    Raises:
        TypeError: It does not add up over records.
    """
    import keras

    is_mean = isinstance(metric, keras.metrics.Mean)
    if is_mean and type(metric).result is keras.metrics.Mean.result:
        return Given(name)
    return Counted(name, metric)


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
