"""`ebbflow.keras` alone, on the backend that ``KERAS_BACKEND`` names; else on torch."""

from __future__ import annotations

import faulthandler
import os
import signal
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from .conftest import keras_on, needs, needs_there

BACKEND = keras_on("torch", "tensorflow")

needs(BACKEND)
keras = needs("keras")

import ebbflow.keras  # noqa: E402
from ebbflow import _weights, errors  # noqa: E402
from ebbflow.keras import threads  # noqa: E402
from ebbflow.keras.engine import engine_of  # noqa: E402
from ebbflow.keras.optimizers import optimizer_settings  # noqa: E402
from ebbflow.keras.variables import Roles  # noqa: E402

#: For tests that do not depend on the backend of this process.
ON_TORCH = pytest.mark.skipif(BACKEND == "tensorflow", reason="it runs with the tests on torch")

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
LAYERS = keras.layers
OPTIMIZERS = keras.optimizers


def data(records: int = 96) -> tuple[Any, Any]:
    x = np.random.default_rng(3).normal(size=(records, 6)).astype(np.float32)
    return x, ((x.sum(1) > 0).astype(np.int64) + (x[:, 0] > 1))


def network(*more: Any) -> Any:
    """Return a model whose variables have the same paths each time."""
    keras.utils.set_random_seed(7)
    layers = [LAYERS.Dense(16, activation="tanh", name="hidden"), *more]
    return keras.Sequential(
        [keras.Input((6,)), *layers, LAYERS.Dense(3, name="out")], name="network"
    )


def loss_of(model: Any, batch: ebbflow.Batch) -> Callable[[], Any]:
    return lambda: LOSS(batch.y, model(batch.x, training=True))


def trained(model: Any, optimizer: Any, **options: Any) -> tuple[ebbflow.keras.Session, list[Any]]:
    """Train to the end; returns the job and (step, records) of each batch."""
    seen = []
    given: dict[str, Any] = {"epochs": 3, "micro": 8, "effective": 16, "seed": 5} | options
    source = given.pop("train_data", None) or data()
    with ebbflow.keras.join(model, optimizer, source, **given) as job:
        for epoch in job.epochs():
            for batch in epoch:
                seen.append((batch.step, batch.records))
                job.step(loss_of(model, batch))
    return job, seen


def plain(model: Any, optimizer: Any, seen: list[Any]) -> None:
    """Train with Keras alone, on the batches that a job had."""
    x, y = data()
    model.compile(optimizer, LOSS, run_eagerly=True)
    steps: dict[int, list[int]] = {}
    for step, records in seen:
        steps.setdefault(step, []).extend(records)
    for step in sorted(steps):
        model.train_on_batch(x[steps[step]], y[steps[step]])


def values(model: Any) -> list[Any]:
    return [keras.ops.convert_to_numpy(variable) for variable in model.weights]


def difference(one: Any, other: Any) -> float:
    """Return the largest distance of two models' variables, relative to their size."""
    pairs = zip(values(one), values(other), strict=True)
    norm = np.linalg.norm
    return max(float(norm(a - b) / max(norm(b), 1e-9)) for a, b in pairs)


def decay(rate: float) -> Any:
    return OPTIMIZERS.schedules.ExponentialDecay(rate, decay_steps=4, decay_rate=0.5)


#: Optimizers of which Keras has an update of its own for each backend. One case of each.
EVERYWHERE: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"learning_rate": 0.05, "momentum": 0.9, "nesterov": True}),
    ("SGD", {"learning_rate": "decay"}),
    # An epsilon in another place would be seen.
    ("Adam", {"learning_rate": 0.01, "beta_1": 0.8, "epsilon": 1e-3}),
    ("AdamW", {"learning_rate": "decay", "epsilon": 1e-3}),
    ("RMSprop", {"learning_rate": 0.01, "centered": True, "epsilon": 1e-3}),
    ("Adagrad", {"learning_rate": 0.1}),
    ("Adadelta", {"learning_rate": 1.0}),
]

#: What the ps apply to the gradients of any backend.
ON_ONE: list[tuple[str, dict[str, Any]]] = [
    ("SGD", {"learning_rate": 0.1}),
    ("SGD", {"learning_rate": 0.05, "momentum": 0.9}),
    ("SGD", {"learning_rate": 0.1, "weight_decay": 0.1}),
    ("SGD", {"learning_rate": 0.1, "global_clipnorm": 0.5}),
    ("Adam", {"learning_rate": 0.01}),
    ("Adam", {"learning_rate": 0.01, "amsgrad": True, "epsilon": 1e-3}),
    ("Adam", {"learning_rate": 0.01, "weight_decay": 0.1}),
    ("AdamW", {"learning_rate": 0.01}),
    ("RMSprop", {"learning_rate": 0.01}),
    ("RMSprop", {"learning_rate": "decay", "rho": 0.8, "epsilon": 1e-3}),
    ("RMSprop", {"learning_rate": 0.01, "momentum": 0.5, "epsilon": 1e-3}),
    ("Adagrad", {"learning_rate": 0.1, "initial_accumulator_value": 0.0}),
    ("Ftrl", {"learning_rate": 0.1}),
    (
        "Ftrl",
        {
            "learning_rate": 0.1,
            "beta": 0.5,
            "l1_regularization_strength": 0.01,
            "l2_regularization_strength": 0.1,
        },
    ),
    ("Lamb", {"learning_rate": 0.01}),
]


@pytest.mark.parametrize(
    ("name", "settings"), EVERYWHERE if BACKEND == "tensorflow" else EVERYWHERE + ON_ONE
)
def test_an_optimizer_gives_the_weights_of_keras(name: str, settings: dict[str, Any]) -> None:
    def made() -> Any:
        rate = settings["learning_rate"]
        given = settings | {"learning_rate": decay(0.05) if rate == "decay" else rate}
        return getattr(OPTIMIZERS, name)(**given)

    model, own = network(), network()
    job, seen = trained(model, made())
    assert len(seen) == 36 and job.summary is not None
    plain(own, made(), seen)
    found = difference(model, own)
    print(f"{BACKEND} {name} {settings}: {found:.1e}")
    assert found < 1e-5
    assert difference(model, network()) > 0.01


class Scaled(OPTIMIZERS.Adam):  # type: ignore[misc,name-defined]
    pass


@ON_TORCH
def test_optimizers_that_the_ps_do_not_have_are_refused_by_name() -> None:
    cosine = OPTIMIZERS.schedules.CosineDecay(0.1, 10)
    cases: list[tuple[Any, str]] = [
        (OPTIMIZERS.RMSprop(weight_decay=0.1), "weight_decay = 0.1 shrinks"),
        (OPTIMIZERS.RMSprop(cosine, momentum=0.9), "momentum = 0.9 with a schedule"),
        (OPTIMIZERS.Nadam(), "Nadam is no optimizer that the ps have"),
        (OPTIMIZERS.LossScaleOptimizer(OPTIMIZERS.SGD()), "LossScaleOptimizer is no optimizer"),
        (Scaled(), "Scaled is a subclass of Adam"),
        ("adam", "expected an instance of keras.optimizers, found 'adam'"),
        (OPTIMIZERS.Adam(use_ema=True), "use_ema = True: the ps keep no averages"),
        (OPTIMIZERS.Adam(gradient_accumulation_steps=2), "use `effective` of join"),
        (OPTIMIZERS.Adam(loss_scale_factor=2.0), "loss_scale_factor = 2.0"),
        (OPTIMIZERS.Adam(clipnorm=1.0), "clipnorm = 1.0: .*use global_clipnorm"),
        (OPTIMIZERS.Adam(clipvalue=1.0), "clipvalue = 1.0"),
        (OPTIMIZERS.SGD(0.1, momentum=0.9, weight_decay=0.1), "weight_decay = 0.1 shrinks"),
        (OPTIMIZERS.Adagrad(weight_decay=0.1), "weight_decay = 0.1 shrinks"),
        (OPTIMIZERS.SGD(cosine, momentum=0.9), "momentum = 0.9 with a schedule"),
        (OPTIMIZERS.Ftrl(learning_rate_power=-0.4), "learning_rate_power = -0.4"),
        (OPTIMIZERS.Ftrl(l2_shrinkage_regularization_strength=0.1), "no setting l2_shrinkage"),
        (OPTIMIZERS.Lamb(global_clipnorm=1.0), "Lamb: the ps do not clip"),
        (OPTIMIZERS.SGD(0.0), "needs a learning rate above 0"),
        (OPTIMIZERS.SGD(Rising()), "Rising changes the rate more than 65536 times"),
        (OPTIMIZERS.SGD(Rising(0.0)), "its schedule is never above 0"),
    ]
    for optimizer, expected in cases:
        with pytest.raises(errors.UntranslatableError, match=expected):
            optimizer_settings(optimizer, 70_000 if "65536" in expected else 3)
    excluding = OPTIMIZERS.AdamW()
    excluding.exclude_from_weight_decay(var_names=["bias"])
    with pytest.raises(errors.UntranslatableError, match="exclude_from_weight_decay"):
        optimizer_settings(excluding, 3)
    used, model = OPTIMIZERS.SGD(), network()
    used.apply([keras.ops.zeros(v.shape) for v in model.weights], model.trainable_variables)
    with pytest.raises(errors.UntranslatableError, match="was applied before"):
        optimizer_settings(used, 3)


class Rising(OPTIMIZERS.schedules.LearningRateSchedule):  # type: ignore[misc,name-defined]
    """Another rate in each step."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def __call__(self, step: int) -> float:
        return (1.0 + step) * self.factor

    def get_config(self) -> dict[str, float]:
        return {"factor": self.factor}


@ON_TORCH
def test_a_schedule_becomes_a_table() -> None:
    optimizer = OPTIMIZERS.SGD(OPTIMIZERS.schedules.PiecewiseConstantDecay([1, 3], [0.5, 1.0, 0.0]))
    settings = optimizer_settings(optimizer, 9)
    assert settings["learning_rate"] == 1.0
    assert settings["schedule"]["table"] == [(0, 0.5), (2, 1.0), (4, 0.0)]
    constant = OPTIMIZERS.SGD(OPTIMIZERS.schedules.PiecewiseConstantDecay([20], [0.5, 1.0]))
    assert optimizer_settings(constant, 9) == {
        "kind": "sgd",
        "learning_rate": 0.5,
        "weight_decay": 0.0,
    }


def test_moving_statistics_are_state_and_move_as_in_keras() -> None:
    def made() -> Any:
        return network(LAYERS.BatchNormalization(name="norm"))

    model, own = made(), made()
    assert [path for path, _ in Roles(model).states] == [
        "network/norm/moving_mean",
        "network/norm/moving_variance",
    ]
    _, seen = trained(model, OPTIMIZERS.SGD(0.1), micro=16, effective=16)
    plain(own, OPTIMIZERS.SGD(0.1), seen)
    assert difference(model, own) < 1e-5
    model.get_layer("norm").trainable = False
    assert Roles(model).states == []


def test_noise_belongs_to_a_batch_and_the_bits_are_the_same_again() -> None:
    def made() -> Any:
        layers = LAYERS.Dropout(0.5, name="drop"), LAYERS.GaussianNoise(0.1, seed=3, name="noise")
        return network(*layers)

    jobs = [trained(made(), OPTIMIZERS.Adam(0.01))[0] for _ in range(2)]
    assert jobs[0].model_sha256 == jobs[1].model_sha256 is not None
    other, _ = trained(made(), OPTIMIZERS.Adam(0.01), seed=6)
    assert other.model_sha256 != jobs[0].model_sha256
    seen: dict[tuple[int, int], bytes] = {}
    drop = LAYERS.Dropout(0.5)
    for _ in range(2):
        model = made()
        with ebbflow.keras.join(model, OPTIMIZERS.SGD(1e-30), data(), epochs=2, micro=8) as job:
            for epoch in job.epochs():
                for batch in epoch:
                    one = np.ones((4, 6), np.float32)
                    # Of the model, of a layer of its own, and of no generator at all.
                    drawn = [
                        model(one, training=True),
                        drop(one, training=True)[:0],
                        keras.random.normal((4,)),
                    ]
                    bits = b"".join(keras.ops.convert_to_numpy(part).tobytes() for part in drawn)
                    assert seen.setdefault((epoch.number, batch.step), bits) == bits
                    job.step(loss_of(model, batch))
    assert len(set(seen.values())) == len(seen) == 24


class Counting(LAYERS.Layer):  # type: ignore[misc,name-defined]
    """A layer that keeps the mean of what it has seen."""

    def build(self, _: Any) -> None:
        self.seen = self.add_weight(name="seen", shape=(), trainable=False, initializer="zeros")

    def call(self, x: Any) -> Any:
        self.seen.assign(self.seen * 0.5 + keras.ops.mean(x * x))
        return x


def test_a_loop_tells_the_device_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(network(), (), None)
    assert engine.device() == ("cpu", 0)
    facts, results = engine.numerics(1)
    monkeypatch.setenv("EBBFLOW_DEVICE", "cuda:2")
    if BACKEND == "tensorflow":
        import tensorflow as tf

        place = "/job:localhost/replica:0/task:0/device:GPU:0"
        monkeypatch.setattr(type(engine), "_place", lambda _: place)
        monkeypatch.setattr(tf.config, "get_visible_devices", lambda _: ["a GPU"])
        details = {"device_name": "A100"}
        monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda _: details)
        assert engine.device() == ("cuda:2", 0), "its memory is not known"
        assert engine.numerics(1) == (facts.replace("CPU, ", "CPU, A100, "), results)
    else:
        import torch

        monkeypatch.setattr(type(engine), "cuda", lambda _: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
        memory = types.SimpleNamespace(total_memory=7)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: memory)
        assert engine.device() == ("cuda:2", 7)
        assert engine.numerics(1) == (f"{facts}, A100, CUDA {torch.version.cuda}", results)


def test_only_named_state_may_be_written() -> None:
    with pytest.raises(errors.WrittenError, match=r"`network/count/seen`.*state=\["):
        trained(network(Counting(name="count")), OPTIMIZERS.SGD(0.1))
    model = network(Counting(name="count"))
    trained(model, OPTIMIZERS.SGD(0.1), state=["network/count/seen"])
    assert float(model.get_layer("count").seen) > 0.1
    with pytest.raises(ValueError, match="`network/nothing` is the path of no weight"):
        trained(network(), OPTIMIZERS.SGD(0.1), state=["network/nothing"])


def test_frozen_layers_stay_and_are_exported() -> None:
    model = network()
    model.get_layer("hidden").trainable = False
    before = values(model)
    job, _ = trained(model, OPTIMIZERS.SGD(0.1))
    after = values(model)
    assert [(a == b).all() for a, b in zip(before, after, strict=True)] == [
        True,
        True,
        False,
        False,
    ]
    assert [path for path, _ in Roles(model).constants] == [
        "network/hidden/kernel",
        "network/hidden/bias",
    ]
    # Unfrozen, it trains again.
    model.get_layer("hidden").trainable = True
    trained(model, OPTIMIZERS.SGD(0.1))
    assert not (values(model)[0] == before[0]).all()
    assert job.elected


def test_models_that_cannot_be_trained_are_refused() -> None:
    def layered(**options: Any) -> Any:
        return keras.Sequential([keras.Input((6,)), LAYERS.Dense(3, name="out", **options)])

    twice = keras.Sequential([keras.Input((6,)), LAYERS.Dense(3, name="same")], name="same")
    frozen = network()
    frozen.trainable = False
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda x: x, TypeError, "expected a keras.Model, found function"),
        (keras.Sequential([LAYERS.Dense(3)]), ValueError, r"no variables yet; call it"),
        (frozen, ValueError, "nothing to train"),
        (layered(dtype="float16"), ValueError, "out/kernel` is float16; only float32"),
        (layered(bias_constraint="non_neg"), ValueError, "out/bias` has a constraint"),
    ]
    assert Roles(twice).parameters
    for model, error, expected in cases:
        with pytest.raises(error, match=expected):
            ebbflow.keras.join(model, OPTIMIZERS.SGD(), data(), epochs=1, micro=8)


def test_what_the_loop_may_not_do_is_refused() -> None:
    model, optimizer = network(), OPTIMIZERS.SGD(0.1)
    x, y = data()
    with ebbflow.keras.join(model, optimizer, (x, y), epochs=1, micro=8) as job:
        with pytest.raises(errors.SessionError, match="without a batch"):
            job.step(lambda: 0.0)
        with pytest.raises(errors.SessionError, match=r"call job.step\(function\)"):
            job.push(0.5)
    with (
        pytest.raises(TypeError, match=r"expected a function.*found float"),
        ebbflow.keras.join(model, optimizer, (x, y), epochs=1, micro=8) as job,
    ):
        for epoch in job.epochs():
            for _ in epoch:
                job.step(0.5)  # type: ignore[arg-type]
    each = keras.losses.sparse_categorical_crossentropy
    for wrong, expected in [
        (lambda: 0.5, r"found float$"),
        (lambda: each(y[:8], model(x[:8])), r"of shape \(8,\)"),
    ]:
        with (
            pytest.raises(TypeError, match=f"a tensor of one element.*{expected}"),
            ebbflow.keras.join(model, optimizer, (x, y), epochs=1, micro=8) as job,
        ):
            for epoch in job.epochs():
                for _ in epoch:
                    job.step(wrong)
    with (
        pytest.raises(errors.WrittenError, match="the loop"),
        ebbflow.keras.join(model, optimizer, (x, y), epochs=1, micro=8) as job,
    ):
        model.compile(optimizer, LOSS, run_eagerly=True)
        for epoch in job.epochs():
            for batch in epoch:
                model.train_on_batch(batch.x, batch.y)
                job.step(lambda: LOSS(y, model(x, training=True)))
    for name in ("scheduler", "scheduler_every"):
        option: dict[str, Any] = {name: 1}
        with pytest.raises(TypeError, match=f"has no `{name}`"):
            ebbflow.keras.join(model, OPTIMIZERS.SGD(), (x, y), epochs=1, micro=8, **option)
    if BACKEND == "tensorflow":
        with pytest.raises(ValueError, match="threads = 2: TensorFlow computes with one thread"):
            ebbflow.keras.join(model, OPTIMIZERS.SGD(), (x, y), epochs=1, micro=8, threads=2)
    else:
        with pytest.raises(TypeError, match=r"Sequential is a Keras model; call ebbflow.keras"):
            ebbflow.join(model, OPTIMIZERS.SGD(), (x, y), epochs=1, micro=8)


class Items:
    """Records with a dictionary of features."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, record: int) -> Any:
        return {"a": np.array([record], "f"), "b": np.array([record % 3], "f")}, record % 2


class Batches(keras.utils.PyDataset):  # type: ignore[misc,name-defined]
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return data(8)


def test_records_are_arrays_items_and_what_a_function_makes_of_them() -> None:
    def two() -> Any:
        one, other = keras.Input((1,), name="a"), keras.Input((1,), name="b")
        out = LAYERS.Dense(2)(LAYERS.Concatenate()([one, other]))
        return keras.Model({"a": one, "b": other}, out)

    def collate(records: list[Any]) -> Any:
        assert all(len(record) == 2 for record in records)
        x = {name: np.stack([record[0][name] for record in records]) for name in ("a", "b")}
        return x, np.array([record[1] for record in records])

    items = Items()
    columns = {"a": np.arange(24, dtype="f")[:, None], "b": np.zeros((24, 1), "f")}, [0, 1] * 12
    sources: list[tuple[Any, Any]] = [(items, None), (items, collate), (columns, None)]
    for source, function in sources:
        model, counted = two(), 0
        with ebbflow.keras.join(
            model, OPTIMIZERS.SGD(0.01), source, epochs=1, micro=8, collate=function
        ) as job:
            for epoch in job.epochs():
                for batch in epoch:
                    counted += len(batch)
                    x, _ = batch
                    assert x["a"][:, 0].tolist() == batch.records
                    job.step(loss_of(model, batch))
        assert counted == 24
    with pytest.raises(TypeError, match="Batches has batches, and a job leases records"):
        ebbflow.keras.join(network(), OPTIMIZERS.SGD(), Batches(), epochs=1, micro=8)
    with pytest.raises(TypeError, match="no __len__"):
        ebbflow.keras.join(network(), OPTIMIZERS.SGD(), iter([1]), epochs=1, micro=8)


@pytest.mark.skipif(BACKEND != "torch", reason="loaders are of torch")
def test_a_loader_of_torch_keeps_its_batches() -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    x, y = data()
    loader = DataLoader(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), batch_size=16)
    one, other = network(), network()
    _, seen = trained(one, OPTIMIZERS.SGD(0.1), train_data=loader, micro=None, effective=None)
    assert {len(records) for _, records in seen} == {16}
    assert seen[0][1] == list(range(16))
    plain(other, OPTIMIZERS.SGD(0.1), seen)
    assert difference(one, other) < 1e-5


def test_fit_trains_a_compiled_model_and_measures_as_keras_does() -> None:
    def mine(labels: Any, outputs: Any) -> Any:
        return keras.ops.max(outputs, axis=-1)

    model = network(LAYERS.Dropout(0.2), LAYERS.Dense(8, kernel_regularizer="l2", name="more"))
    metrics = ["accuracy", mine, keras.metrics.SparseTopKCategoricalAccuracy(2, name="two")]
    model.compile(OPTIMIZERS.Adam(0.01), LOSS, metrics=metrics)
    test = data(300)
    job = ebbflow.keras.fit(model, data(), test, epochs=4, batch_size=8, effective=16, seed=1)
    assert [row["epoch"] for row in job.history] == [0, 1, 2, 3]
    own = model.evaluate(*test, verbose=0, return_dict=True)
    assert set(job.metrics) == set(own) == {"loss", "accuracy", "mine", "two"}
    for name, value in own.items():
        assert job.metrics[name] == pytest.approx(value, abs=1e-5), name
    assert job.history[-1] == job.metrics | {"epoch": 3, "step": 24}
    assert job.metrics["loss"] < job.history[0]["loss"]


def test_fit_measures_metrics_that_are_no_means_over_all_validation_data() -> None:
    def labelled(records: int) -> tuple[Any, Any]:
        x, y = data(records)
        return x, (y > 0).astype(np.float32)[:, None]

    keras.utils.set_random_seed(7)
    layers = [LAYERS.Dense(8, "tanh", name="hidden"), LAYERS.Dense(1, "sigmoid", name="out")]
    model = keras.Sequential([keras.Input((6,)), *layers], name="network")
    kinds = keras.metrics
    metrics = [kinds.AUC(), kinds.Precision(name="p"), "accuracy", kinds.RootMeanSquaredError()]
    model.compile(OPTIMIZERS.SGD(0.1), "binary_crossentropy", metrics=metrics)
    # Two parts of an evaluation, so values of parts are not those of the whole.
    test = labelled(1100)
    job = ebbflow.keras.fit(model, labelled(96), test, epochs=2, batch_size=32, seed=1)
    own = model.evaluate(*test, batch_size=1100, verbose=0, return_dict=True)
    assert (
        set(job.metrics) == set(own) == {"loss", "auc", "p", "accuracy", "root_mean_squared_error"}
    )
    for name, value in own.items():
        assert job.metrics[name] == pytest.approx(value, abs=1e-5), name
    assert job.history[-1] == job.metrics | {"epoch": 1, "step": 6}
    assert job.history[0]["auc"] != job.metrics["auc"]


class Largest(keras.metrics.Metric):  # type: ignore[misc,name-defined]
    """The largest output, which is no sum."""

    def update_state(self, *_: Any, **__: Any) -> None:
        pass

    def result(self) -> Any:
        return keras.ops.zeros(())


def test_fit_makes_the_variables_of_a_model_and_refuses_what_does_not_add_up() -> None:
    model = keras.Sequential([LAYERS.Dense(3)])
    model.compile(OPTIMIZERS.SGD(0.1), LOSS)
    job = ebbflow.keras.fit(model, data(), epochs=1, batch_size=8)
    assert job.summary is not None and job.summary["steps"] == 12
    with pytest.raises(ValueError, match=r"has no loss; call model.compile"):
        ebbflow.keras.fit(network(), data(), epochs=1, batch_size=8)
    total = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    for loss, metrics, expected in [
        (total, [], "SparseCategoricalCrossentropy has the reduction 'sum'"),
        ("mse", [Largest(name="mine")], r"'mine'\]: nobody knows whether .* of Largest are sums"),
    ]:
        model = network()
        model.compile(OPTIMIZERS.SGD(0.1), loss, metrics=metrics)
        x, _ = data()
        with pytest.raises(TypeError, match=expected):
            ebbflow.keras.fit(model, (x, x[:, :3] > 0), epochs=1, batch_size=8)
    model = network()
    model.compile(OPTIMIZERS.SGD(0.1), LOSS)
    source = ebbflow.data.source("x.csv", format="csv")
    with pytest.raises(TypeError, match=r"only loops of ebbflow\.keras\.join take ebbflow\.data"):
        ebbflow.keras.fit(model, source, epochs=1, batch_size=8)
    loader = types.SimpleNamespace(dataset=source)
    with pytest.raises(TypeError, match=r"SimpleNamespace would read .* itself as train_data"):
        ebbflow.keras.fit(model, loader, epochs=1, batch_size=8)
    with pytest.raises(TypeError, match="no pair of features and labels"):
        model = network()
        model.compile(OPTIMIZERS.SGD(0.1), LOSS)
        ebbflow.keras.fit(model, {"x": data()[0]}, epochs=1, batch_size=8)


LATE = """
import tensorflow
tensorflow.ones(8) + 1
import ebbflow.keras
from ebbflow.keras import threads
threads.check()
"""


@ON_TORCH
def test_a_package_that_comes_too_late_for_one_thread_says_so() -> None:
    needs_there("tensorflow")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TF_")}
    ended = subprocess.run([sys.executable, "-c", LATE], env=kept, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "import ebbflow.keras (or ebbflow.fabric) before" in ended.stderr


def test_variables_that_were_set_before_are_never_too_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun = types.SimpleNamespace(_context=types.SimpleNamespace(_initialized=True))
    monkeypatch.setitem(sys.modules, "tensorflow.python.eager.context", begun)
    monkeypatch.setattr(threads, "_too_late", False)
    for name in ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "TF_DETERMINISTIC_OPS"):
        monkeypatch.setenv(name, "1")
    threads.use_one_thread()
    threads.check()
    monkeypatch.setenv("TF_NUM_INTEROP_THREADS", "2")
    threads.use_one_thread()
    with pytest.raises(ValueError, match="TF_NUM_INTRAOP_THREADS=1 TF_NUM_INTEROP_THREADS=1"):
        threads.check()


@ON_TORCH
def test_other_backends_are_refused() -> None:
    needs_there("jax")
    code = "import ebbflow.keras, keras; ebbflow.keras.join(keras.Sequential(), 0, 0, epochs=1)"
    environment = os.environ | {"KERAS_BACKEND": "jax"}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 1 and "the backend of Keras is jax" in ended.stderr


#: What runs on TensorFlow, where `test_elastic_keras.py` runs alone. Of two files, the tests that
#: compute with a model.
ON_TENSORFLOW = [
    "test_elastic_keras.py",
    "test_keras.py",
    "test_keras_epsilon.py",
    "test_keras_shards.py::"
    "test_without_shuffle_records_keep_their_order_and_evaluation_reads_shards_too",
    "test_fabric_keras.py::test_a_keras_model_trains_and_metrics_are_those_of_keras",
    "test_fabric_keras.py::test_the_same_script_gives_the_same_bits",
    "test_fabric_keras.py::test_the_final_model_is_saved_as_onnx_on_the_backend_torch",
]


@ON_TORCH
def test_what_needs_tensorflow_passes_in_a_process_with_that_backend(tmp_path: Path) -> None:
    needs_there("tensorflow")
    # Each test of the other process has limits of its own. One process imports TensorFlow once.
    signal.alarm(0)
    faulthandler.cancel_dump_traceback_later()
    folder, report = Path(__file__).parent, tmp_path / "report.xml"
    tests = [str(folder / test) for test in ON_TENSORFLOW]
    options = ["-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=folder.parents[1],
        env=os.environ | {"KERAS_BACKEND": "tensorflow"},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout[-6000:]
    # A process that skipped them all would end well too.
    cases = list(ElementTree.parse(report).iter("testcase"))
    passed = [case.get("classname", "") for case in cases if case.find("skipped") is None]
    # A file that is skipped as a whole has its name there.
    skipped = [
        f"{case.get('classname')} {case.get('name')}"
        for case in cases
        if case.find("skipped") is not None
    ]
    for file in ("test_elastic_keras", "test_keras_epsilon"):
        assert any(name.endswith(file) for name in passed), ended.stdout[-6000:]
        assert not any(file in name for name in skipped), skipped


def result_of(model: Any) -> ebbflow.Result:
    """Return the result of a job that left the weights of a model."""
    pairs = zip(model.weights, values(model), strict=True)
    tensors = {
        str(variable.path): ("F32", array.shape, memoryview(array.tobytes()))
        for variable, array in pairs
    }
    content = _weights.to_bytes(tensors, {})
    return ebbflow.Result(ebbflow.Status({}), ebbflow.Metrics([]), None, lambda: content)


def test_plain_keras_reads_a_trained_model_and_its_weights(tmp_path: Path) -> None:
    model = network(LAYERS.BatchNormalization(name="normal"))
    trained(model, OPTIMIZERS.Adam(0.01), epochs=1)
    x, _ = data()
    expected = model.predict(x, verbose=0)
    whole = ebbflow.export.keras(model, tmp_path / "of/network.keras")
    weights = ebbflow.export.keras(model, tmp_path / "of/network.weights.h5")
    assert sorted(tmp_path.glob("of/*")) == [whole, weights]
    assert np.array_equal(keras.saving.load_model(whole).predict(x, verbose=0), expected)
    fresh = network(LAYERS.BatchNormalization(name="normal"))
    fresh.load_weights(weights)
    assert np.array_equal(fresh.predict(x, verbose=0), expected)
    # The results of a job, such as those that were fetched, into a model that is made again.
    again = network(LAYERS.BatchNormalization(name="normal"))
    ebbflow.export.keras(again, whole, result_of(model))
    assert np.array_equal(again.predict(x, verbose=0), expected)
    assert np.array_equal(keras.saving.load_model(whole).predict(x, verbose=0), expected)


def of_two_inputs(by_name: bool) -> Any:
    """Return a model that takes two inputs, in a list or by name."""
    keras.utils.set_random_seed(7)
    one, other = keras.Input((4,), name="one"), keras.Input((4,), name="other")
    hidden = LAYERS.Dropout(0.5)(LAYERS.Dense(4, activation="tanh")(one))
    outputs = LAYERS.Subtract()([hidden, other])
    return keras.Model({"one": one, "other": other} if by_name else [one, other], outputs)


#: Reads the files of models with two inputs, and writes ONNX files of them.
WRITES_ONNX = """
import sys
import ebbflow.keras
import keras, numpy as np

folder, given = sys.argv[1], dict(np.load(sys.argv[1] + "/inputs.npz"))
for name, inputs in (("list", [given["one"], given["other"]]), ("dict", given)):
    model = keras.saving.load_model(f"{folder}/{name}.keras")
    ebbflow.export.onnx(model, inputs, f"{folder}/{name}.onnx")
"""


def test_a_model_with_several_inputs_computes_the_same_as_onnx(tmp_path: Path) -> None:
    onnxruntime = needs("onnxruntime", "onnx", "onnxscript")
    drawn = np.random.default_rng(5)
    one, other = (drawn.normal(size=(5, 4)).astype(np.float32) for _ in range(2))
    # In another order than that of the model.
    by_name = {"other": other, "one": one}
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        ("list", [one, other], {"x_0": one, "x_1": other}),
        ("dict", by_name, by_name),
    ]
    models = {name: of_two_inputs(name == "dict") for name, _, _ in cases}
    if BACKEND == "tensorflow":
        # The way that the refusal names.
        needs_there("torch")
        np.savez(tmp_path / "inputs.npz", one=one, other=other)
        for name, inputs, _ in cases:
            with pytest.raises(errors.ExportError, match="in a process with KERAS_BACKEND=torch"):
                ebbflow.export.onnx(models[name], inputs, tmp_path / f"{name}.onnx")
            ebbflow.export.keras(models[name], tmp_path / f"{name}.keras")
        ended = subprocess.run(
            [sys.executable, "-c", WRITES_ONNX, tmp_path],
            env=os.environ | {"KERAS_BACKEND": "torch"},
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, ended.stderr
    else:
        for name, inputs, _ in cases:
            ebbflow.export.onnx(models[name], inputs, tmp_path / f"{name}.onnx")
    for name, inputs, fed in cases:
        runner = onnxruntime.InferenceSession(
            str(tmp_path / f"{name}.onnx"), providers=["CPUExecutionProvider"]
        )
        (found,) = runner.run(None, fed)
        expected = keras.ops.convert_to_numpy(models[name](inputs, training=False))
        assert found == pytest.approx(expected, abs=1e-5), name


def test_what_is_no_model_of_keras_or_of_this_job_is_not_written(tmp_path: Path) -> None:
    model, path = network(), tmp_path / "network.keras"
    before = values(model)
    for other in (network(LAYERS.BatchNormalization(name="normal")), network(LAYERS.Dense(4))):
        with pytest.raises(errors.ExportError, match="make the model as the script of the job"):
            ebbflow.export.keras(model, path, result_of(other))
    assert all(map(np.array_equal, values(model), before))
    with pytest.raises(ValueError, match=r"expected a name that ends in \.keras or \.weights\.h5"):
        ebbflow.export.keras(model, tmp_path / "network.h5")
    with pytest.raises(TypeError, match=r"expected a keras\.Model, found int"):
        ebbflow.export.keras(3, path)
    assert list(tmp_path.iterdir()) == []
