"""`ebbflow.elastic` with loops of TensorFlow 2 alone: ``tf.GradientTape`` and models of Keras."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from .conftest import keras_on, needs

# `test_keras.py` runs this file in a process with that backend.
keras_on("tensorflow")

needs("tensorflow")
keras = needs("keras")

import ebbflow.keras  # noqa: E402
from ebbflow import elastic, errors  # noqa: E402
from ebbflow.elastic import ElasticBroadcastObject, elastic_allreduce  # noqa: E402
from ebbflow.elastic.library import library_of  # noqa: E402

# After `ebbflow.keras`, which sets the threads of TensorFlow.
import tensorflow as tf  # noqa: E402  # isort: skip

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

#: Settings of the job: 6 batches of 8 records.
SETTINGS: dict[str, Any] = {"epochs": 1, "micro": 8, "effective": 16, "seed": 5}


def data() -> tuple[Any, Any]:
    x = np.random.default_rng(3).normal(size=(48, 6)).astype(np.float32)
    return x, (x.sum(1) > 0).astype(np.int64)


def network() -> Any:
    keras.utils.set_random_seed(7)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((6,)),
            layers.Dense(8, activation="tanh", name="hidden"),
            layers.BatchNormalization(name="normal"),
            layers.Dropout(0.3, name="drop"),
            layers.Dense(2, name="out"),
        ],
        name="network",
    )


def trained(step: Callable[..., Any]) -> str | None:
    """Train with ``step(model, optimizer, features, labels)``. Returns the hash of the model."""

    def elastic_train(dataset: elastic.Dataset) -> str | None:
        model, optimizer = network(), keras.optimizers.SGD(0.1)
        ElasticBroadcastObject.set_model(model)
        ElasticBroadcastObject.set_optimizer(optimizer)
        for features, labels in dataset:
            step(model, optimizer, features, labels)
        return dataset.job.model_sha256

    gradient = tf.GradientTape.gradient
    found: str | None = elastic.run(elastic_train, data(), **SETTINGS)
    assert tf.GradientTape.gradient is gradient
    return found


def loss_of(model: Any, features: Any, labels: Any) -> Any:
    return LOSS(labels, model(features, training=True))


def gradients(model: Any, features: Any, labels: Any) -> list[tuple[Any, Any]]:
    with tf.GradientTape() as tape:
        loss = loss_of(model, features, labels)
    variables = model.trainable_variables
    return list(zip(tape.gradient(loss, variables), variables, strict=True))


@pytest.fixture(scope="module")
def expected() -> str | None:
    """Give the bits of the same training by `ebbflow.keras.join` alone."""
    model = network()
    with ebbflow.keras.join(model, keras.optimizers.SGD(0.1), data(), **SETTINGS) as job:
        for epoch in job.epochs():
            for batch in epoch:
                job.step(functools.partial(loss_of, model, batch.x, batch.y))
    return job.model_sha256


# S3-04, S3-14
def test_gradients_of_a_tape_reach_the_job_wherever_the_tape_is(expected: str) -> None:
    @elastic_allreduce
    def inside(model: Any, optimizer: Any, features: Any, labels: Any) -> None:
        optimizer.apply_gradients(gradients(model, features, labels))

    @elastic_allreduce(framework="tf_v2")
    def applied(optimizer: Any, found: list[tuple[Any, Any]]) -> None:
        optimizer.apply([gradient for gradient, _ in found], [variable for _, variable in found])

    def outside(model: Any, optimizer: Any, features: Any, labels: Any) -> None:
        applied(optimizer, gradients(model, features, labels))

    assert trained(inside) == trained(outside) == expected


# S3-13
def test_a_function_that_fails_runs_again_as_if_it_had_not(
    expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    left: list[Exception] = [TimeoutError("late"), ConnectionError("reset")]

    @elastic_allreduce(wait_secs=0)
    def again(model: Any, optimizer: Any, features: Any, labels: Any) -> None:
        # A call of the model draws random numbers and changes moving statistics.
        optimizer.apply_gradients(gradients(model, features, labels))
        if left:
            raise left.pop()

    with caplog.at_level(logging.WARNING, "ebbflow"):
        assert trained(again) == expected
    assert caplog.text.count("it runs again in 0 s") == 2


@elastic_allreduce
def forgets(model: Any, optimizer: Any, features: Any, labels: Any) -> None:
    pass


def bare(model: Any, optimizer: Any, features: Any, labels: Any) -> None:
    optimizer.apply_gradients(gradients(model, features, labels))


@elastic_allreduce
def in_graph(model: Any, optimizer: Any, features: Any, labels: Any) -> None:
    tf.function(bare)(model, optimizer, features, labels)


@elastic_allreduce
def of_each_record(model: Any, optimizer: Any, features: Any, labels: Any) -> None:
    with tf.GradientTape() as tape:
        losses = tf.abs(model(features, training=True))
    variables = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(losses, variables), variables, strict=True))


@elastic_allreduce
def of_another_model(model: Any, optimizer: Any, features: Any, labels: Any) -> None:
    optimizer.apply_gradients(gradients(network(), features, labels))


@elastic_allreduce
def other_rate(model: Any, optimizer: Any, features: Any, labels: Any) -> None:
    optimizer.learning_rate = 0.5
    bare(model, optimizer, features, labels)


@elastic_allreduce
def in_two_calls(model: Any, optimizer: Any, features: Any, labels: Any) -> None:
    pairs = list(gradients(model, features, labels))
    optimizer.apply_gradients(pairs[:2])
    optimizer.apply_gradients(pairs[2:])


def distributed(tape: Any) -> Any:
    """Return what ``hvd.DistributedGradientTape`` makes of a tape: its class is below the tape's.

    Horovod calls the tape's method first, and merges what it returned.
    """

    def gradient(self: Any, target: Any, sources: Any) -> Any:
        return tf.GradientTape.gradient(self, target, sources)

    body: dict[str, Any] = {"__module__": "horovod.tensorflow", "gradient": gradient}
    made: Any = type("GradientTape", (type(tape),), body)()
    made._tape = tape._tape
    return made


@elastic_allreduce
def of_horovod(model: Any, optimizer: Any, features: Any, labels: Any) -> None:
    with tf.GradientTape() as tape:
        loss = loss_of(model, features, labels)
    variables = model.trainable_variables
    merged = distributed(tape).gradient(loss, variables)
    optimizer.apply_gradients(zip(merged, variables, strict=True))


# S3-07
def test_a_tape_of_horovod_is_refused_by_name() -> None:
    gradient = tf.GradientTape.gradient
    with pytest.raises(errors.UnsupportedError, match=r"remove hvd\.DistributedGradientTape"):
        trained(of_horovod)
    assert tf.GradientTape.gradient is gradient


@elastic_allreduce(framework="torch")
def of_torch(model: Any, optimizer: Any, features: Any, labels: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (forgets, r"returned without a call of optimizer\.apply_gradients"),
        (bare, "outside of a function with @elastic_allreduce"),
        (in_graph, r"in a tf\.function.*decorate only the function that computes the loss"),
        (of_each_record, r"call tape\.gradient\(\.\.\) of the mean loss over the batch"),
        (of_another_model, r"6 variables that are no trainable ones of the registered model"),
        (in_two_calls, "is called twice for one batch"),
        (other_rate, "changed the learning rate.*LearningRateSchedule"),
        (of_torch, "has framework = 'torch', and the registered model is one of 'tf_v2'"),
    ],
)
def test_steps_that_would_lose_gradients_are_refused(step: Any, said: str) -> None:
    with pytest.raises(errors.SessionError, match=f"(?s){said}"):
        trained(step)


def test_a_loop_of_keras_on_another_backend_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = network()
    monkeypatch.setattr(keras.config, "backend", lambda: "torch")
    with pytest.raises(errors.UnsupportedError, match="the backend is torch; set KERAS_BACKEND"):
        library_of(model)
