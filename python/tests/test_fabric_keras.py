"""`ebbflow.fabric.FabricModel` with Keras models. Ids are those of ``docs/behaviours.md``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from .conftest import keras_on, needs

BACKEND = keras_on("torch", "tensorflow")

needs(BACKEND)
keras = needs("keras")

from ebbflow import errors  # noqa: E402
from ebbflow.fabric import FabricModel, LoggerCallback  # noqa: E402

RECORDS, TESTED = 100, 30

NAMES = {"loss", "accuracy", "confidence", "two", "iou"}


class Data:
    """Map-style records."""

    def __init__(self, number: int, seed: int) -> None:
        self.x = np.random.default_rng(seed).normal(size=(number, 6)).astype(np.float32)
        self.y = (self.x.sum(1) > 0).astype(np.int64) + (self.x[:, 0] > 1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, record: int) -> Any:
        return self.x[record], self.y[record]


def datasets() -> tuple[Any, Any]:
    return Data(RECORDS, 1), Data(TESTED, 2)


def network() -> Any:
    keras.utils.set_random_seed(7)
    layers = [keras.layers.Dense(16, activation="relu", name="hidden")]
    return keras.Sequential(
        [keras.Input((6,)), *layers, keras.layers.Dense(3, name="out")], name="network"
    )


def confidence(labels: Any, outputs: Any) -> Any:
    return keras.ops.max(keras.ops.softmax(outputs), axis=-1)


def from_logits(labels: Any, outputs: Any) -> Any:
    return keras.losses.sparse_categorical_crossentropy(labels, outputs, from_logits=True)


class Logger(LoggerCallback):
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def log_train_metrics(self, *values: Any) -> None:
        self.calls.append(("train", *values))

    def log_test_metrics(self, *values: Any) -> None:
        self.calls.append(("test", *values))

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == kind]


def fabric(model: Any = None, **options: Any) -> FabricModel:
    given: dict[str, Any] = {
        "datasets_function": datasets,
        "loss_function": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "optimizer": keras.optimizers.SGD(0.3),
    }
    return FabricModel(network() if model is None else model, **(given | options))


# S0-20, S0-24, S0-46, S0-47, S0-49
def test_a_keras_model_trains_and_metrics_are_those_of_keras() -> None:
    worker, driver, model = Logger(), Logger(), network()
    # The last one is no mean over records.
    two = keras.metrics.SparseTopKCategoricalAccuracy(2, "two")
    iou = keras.metrics.MeanIoU(3, "iou", sparse_y_pred=False)
    made = fabric(
        model,
        metrics=["accuracy", confidence, two, iou],
        worker_logger_callback=worker,
        driver_logger_callback=driver,
    )
    made.train(4, 10, engines_number=2)
    # Workers hear of each batch, the driver of the mean loss so far, after each update.
    assert {frozenset(call[0]) for call in worker.of("train")} == {frozenset(NAMES)}
    assert [call[1:] for call in worker.of("train")] == [
        (i, (i - 1) // 10, 1) for i in range(1, 41)
    ]
    assert [call[1] for call in driver.of("train")] == list(range(2, 41, 2))
    # Over all test data.
    tests = driver.of("test")
    assert [call[1:] for call in tests] == [(0, 0), (0, 1), (0, 2), (0, 3)]
    test = datasets()[1]
    own = model.evaluate(test.x, test.y, verbose=0, return_dict=True)
    assert set(tests[-1][0]) == set(own) == NAMES
    for name, value in own.items():
        assert tests[-1][0][name] == pytest.approx(value, abs=1e-5), name
    assert own["accuracy"] > 0.7
    assert made.job is not None and made.job.metrics["confidence"] == tests[-1][0]["confidence"]


# S0-22, S0-23, S0-24
def test_losses_optimizers_and_metrics_may_be_names() -> None:
    model = keras.Sequential([keras.layers.Dense(3), keras.layers.Softmax()])
    driver = Logger()
    fabric(
        model,
        loss_function="sparse_categorical_crossentropy",
        optimizer="adam",
        metrics=["sparse_categorical_accuracy"],
        driver_logger_callback=driver,
    ).train(1, 50)
    (tested,) = driver.of("test")
    assert set(tested[0]) == {"loss", "sparse_categorical_accuracy"}
    with pytest.raises(ValueError, match="no_such_loss"):
        fabric(loss_function="no_such_loss").train(1, 50)
    with pytest.raises(errors.UntranslatableError, match="Nadam is no optimizer that the ps have"):
        fabric(optimizer="nadam").train(1, 50)


# S0-28
def test_names_may_stand_for_objects_of_the_user() -> None:
    objects = {"mine": from_logits, "confidence": confidence}
    driver = Logger()
    fabric(
        loss_function="mine",
        metrics=["confidence"],
        keras_custom_objects=objects,
        driver_logger_callback=driver,
    ).train(1, 50)
    (tested,) = driver.of("test")
    assert set(tested[0]) == {"loss", "confidence"}
    with pytest.raises(ValueError, match="mine"):
        fabric(loss_function="mine").train(1, 50)


# S0-29, S0-42
def test_a_collate_function_makes_the_batches() -> None:
    seen = []

    def collate(batch: list[Any]) -> tuple[Any, Any]:
        seen.append(len(batch))
        return np.stack([x for x, _ in batch]), np.stack([y for _, y in batch])

    fabric(fn_batch_collate=collate).train(1, 40)
    # One record makes the variables of the metrics.
    assert seen == [1, 40, 40, 20, TESTED]
    with pytest.raises(TypeError, match="no pair of features and labels, but ndarray"):
        fabric(fn_batch_collate=lambda batch: np.stack([x for x, _ in batch])).train(1, 40)


# S0-24
def test_metrics_that_do_not_add_up_and_losses_that_are_no_means_are_refused() -> None:
    class Mine(keras.metrics.Metric):  # type: ignore[misc,name-defined]
        pass

    with pytest.raises(TypeError, match="nobody knows whether the variables of Mine are sums"):
        fabric(metrics=[Mine()])
    total = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    with pytest.raises(TypeError, match="has the reduction 'sum'"):
        fabric(loss_function=total)


# S0-27
def test_the_final_model_is_saved_as_onnx_on_the_backend_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, model = Logger(), network()
    made = fabric(model, save_to_onnx=True, worker_logger_callback=worker)
    monkeypatch.setenv("RESULT_DIR", str(tmp_path))
    if BACKEND != "torch":
        with pytest.raises(errors.ExportError, match=r"with KERAS_BACKEND=torch"):
            made.train(1, 50)
        assert worker.calls == []
        return
    onnxruntime = needs("onnxruntime", "onnx", "onnxscript")
    made.train(1, 50)
    runner = onnxruntime.InferenceSession(
        str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"]
    )
    x = datasets()[1].x
    (found,) = runner.run(None, {"x": x})
    assert found == pytest.approx(model.predict(x, verbose=0), abs=1e-5)


def test_the_same_script_gives_the_same_bits() -> None:
    def once(seed: int) -> str | None:
        made = fabric(optimizer=keras.optimizers.Adam(0.01))
        made.seed = seed
        made.train(2, 10, effective_batch_size=20)
        assert made.job is not None
        return made.job.model_sha256

    assert once(1) == once(1) != once(2)
