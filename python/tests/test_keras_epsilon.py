"""Updates of `ebbflow.keras` where epsilon decides, beside those of Keras."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from .conftest import keras_on, needs

BACKEND = keras_on("torch", "tensorflow")

needs(BACKEND)
keras = needs("keras")

import ebbflow.keras  # noqa: E402


def mean_of(model: Any, batch: ebbflow.Batch) -> Callable[[], Any]:
    return lambda: keras.ops.mean(model(batch.x, training=True))


#: Keras has an update of its own for each backend. These have every setting at least once.
EVERYWHERE: list[tuple[str, dict[str, Any]]] = [
    ("Adam", {"epsilon": 1e-3, "beta_2": 0.9}),
    ("AdamW", {"weight_decay": 0.1, "amsgrad": True}),
    ("RMSprop", {"momentum": 0.5, "centered": True}),
]

#: The same settings in other company.
ON_ONE: list[tuple[str, dict[str, Any]]] = [
    ("Adam", {}),
    ("Adam", {"amsgrad": True}),
    ("AdamW", {"weight_decay": 0.1}),
    ("RMSprop", {}),
    ("RMSprop", {"epsilon": 1e-3, "rho": 0.8}),
    ("RMSprop", {"momentum": 0.5}),
]


@pytest.mark.parametrize(
    ("name", "settings"), EVERYWHERE if BACKEND == "tensorflow" else EVERYWHERE + ON_ONE
)
def test_100_updates_equal_those_of_keras_where_epsilon_decides(
    name: str, settings: dict[str, Any]
) -> None:
    def slope() -> Any:
        dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name="out")
        return keras.Sequential([keras.Input((6,)), dense], name="slope")

    def optimizer() -> Any:
        return getattr(keras.optimizers, name)(learning_rate=0.01, **settings)

    # The loss is linear, so gradients are means of records, whatever the weights are. Those of the
    # last columns are so small that the place of epsilon decides.
    x = 1 + np.random.default_rng(5).normal(size=(96, 6))
    x = (x * 10.0 ** -np.arange(6)).astype(np.float32)
    y = np.zeros(96, np.float32)
    model, own = slope(), slope()
    steps: dict[int, list[int]] = {}
    with ebbflow.keras.join(
        model, optimizer(), (x, y), epochs=17, micro=8, effective=16, seed=5
    ) as job:
        for epoch in job.epochs():
            for batch in epoch:
                steps.setdefault(batch.step, []).extend(batch.records)
                job.step(mean_of(model, batch))
    own.compile(optimizer(), lambda _, outputs: outputs, run_eagerly=True)
    assert len(steps) == 102
    for step in sorted(steps):
        own.train_on_batch(x[steps[step]], y[steps[step]])
    (ours,), (theirs,) = model.get_weights(), own.get_weights()
    print(BACKEND, name, settings, np.abs(ours / theirs - 1).max())
    np.testing.assert_allclose(ours, theirs, rtol=5e-5)
