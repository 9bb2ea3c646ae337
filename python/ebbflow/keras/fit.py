"""``ebbflow.keras.fit``: a compiled model as a part of a job, without a loop of one's own."""

from __future__ import annotations

import functools
from typing import Any

from ebbflow.keras.compiled import Compiled, check_loss
from ebbflow.keras.engine import records_of
from ebbflow.keras.session import Session, join


def fit(
    model: Any,
    train_data: Any,
    validation_data: Any = None,
    *,
    epochs: int,
    batch_size: int | None = None,
    **options: Any,
) -> Session:
    """Train a compiled model, alone or as a part of the job on a cluster.

    It takes the place of ``model.fit``. Afterwards the model has the final weights in each process.

    Metrics of ``compile`` are measured on ``validation_data``: names, functions, and metrics whose
    variables are sums over records, such as means, ``AUC``, ``Precision`` and ``Recall``. On
    ``train_data`` none are measured, because each of its batches has other weights; pass them as
    ``validation_data`` to measure the model on them.

    Args:
        model: A ``keras.Model`` after ``model.compile(optimizer, loss, metrics)``.
        train_data: Records that are pairs of features and labels: see :func:`join`.
        validation_data: Records on which the model is measured after each epoch; the same kinds.
        epochs: Passes over ``train_data``.
        batch_size: Records of a batch. ``effective`` says those of an update.
        options: Other settings of :func:`join`, except ``worst``.

    Returns:
        The job after its end. ``history`` has the metrics of each epoch under Keras' names.

    Raises:
        TypeError: The model, the data or the loss is of a kind that cannot be trained, or a metric
            of one that does not add up over records.
        ValueError: A setting cannot be kept, or the model is not compiled.
        UntranslatableError: The ps cannot apply the optimizer.
        SessionFailedError: The job has failed or was cancelled.
    """
    if "worst" in options:
        raise TypeError(
            "ebbflow.keras.fit has no `worst`: it knows no losses of records; use "
            "ebbflow.keras.join, with a loop of your own"
        )
    compiled = Compiled(model)
    check_loss(model.loss)
    collate = options.get("collate")
    first = records_of(train_data, "train_data", options.get("seed", 0), collate).load(0, [0])
    metrics = compiled.prepare(first)

    def measure(batch: Any) -> dict[str, Any]:
        outputs, loss = compiled.outcome(batch.data, training=False)
        return compiled.metrics(batch.data, outputs) | {"loss": loss}

    with join(
        model,
        model.optimizer,
        train_data,
        validation_data,
        epochs=epochs,
        micro=batch_size,
        **options,
    ) as job:
        # Evaluations before this process joined have values in callbacks too.
        job._name(metrics)
        for epoch in job.epochs():
            for batch in epoch:
                job.step(functools.partial(compiled.loss, batch.data))
            if validation_data is not None:
                job.evaluate(measure, metrics)
    return job
