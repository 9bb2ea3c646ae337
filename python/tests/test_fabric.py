"""`ebbflow.fabric.FabricModel` alone. Ids at tests are those of ``docs/behaviours.md``."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
import math
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .conftest import needs

torch = needs("torch")

from ebbflow import errors  # noqa: E402
from ebbflow._fabric import batches, fleet_of, limits, measured, shown  # noqa: E402
from ebbflow.fabric import FabricModel, LoggerCallback, _Driver, _Told  # noqa: E402
from ebbflow.status import Event  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import IterableDataset, TensorDataset  # noqa: E402

RECORDS, TESTED = 100, 30

LOSS = nn.CrossEntropyLoss()


def records(number: int, seed: int) -> TensorDataset:
    x = torch.randn(number, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x.sum(1) > 0).long())


def datasets() -> tuple[Any, Any]:
    return records(RECORDS, 1), records(TESTED, 2)


def network() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))


def accuracy(outputs: Any, labels: Any) -> Any:
    return (outputs.argmax(1) == labels).float().mean()


class Confidence:
    """A callable object, with a name that no event of a job has."""

    def __call__(self, outputs: Any, labels: Any) -> float:
        return float(outputs.softmax(1).amax(1).mean())


class Logger(LoggerCallback):
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def log_train_metrics(self, *values: Any) -> None:
        self.calls.append(("train", *values))

    def log_test_metrics(self, *values: Any) -> None:
        self.calls.append(("test", *values))

    def on_train_begin(self) -> None:
        self.calls.append(("begin",))

    def on_train_end(self) -> None:
        self.calls.append(("end",))

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == kind]


def fabric(model: Any = None, **options: Any) -> FabricModel:
    model = network() if model is None else model
    given: dict[str, Any] = {
        "datasets_function": datasets,
        "loss_function": LOSS,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.3),
    }
    return FabricModel(model, **(given | options))


def trained(epochs: int, batch_size: int, **options: Any) -> FabricModel:
    """Train without processes that load records."""
    of_train = ("engines_number", "validation_freq", "effective_batch_size")
    train = {name: options.pop(name) for name in of_train if name in options}
    made = fabric(**options)
    made.train(epochs, batch_size, num_dataloader_threads=0, **train)
    return made


# S0-02, S0-20, S0-21, S0-22, S0-23, S0-33
def test_two_edits_train_a_model_with_the_defaults(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = network()
    before = accuracy(model(datasets()[1].tensors[0]), datasets()[1].tensors[1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    FabricModel(model, datasets, nn.functional.cross_entropy, optimizer).train(5, 20)
    x, y = datasets()[1].tensors
    assert accuracy(model(x), y) > max(0.8, before)
    # The logger of the driver that is there without another one.
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 * (5 + 1)
    assert lines[0].startswith("train epoch=0 iteration=1 workers=1 loss=")
    assert lines[-1].startswith("test epoch=4 loss=")


# S0-02, S0-33
def test_both_calls_have_the_arguments_of_the_product_in_their_order() -> None:
    def found(function: Any) -> dict[str, Any]:
        parameters = list(inspect.signature(function).parameters.values())
        parameters = [one for one in parameters if one.kind is not one.KEYWORD_ONLY]
        assert {one.kind for one in parameters} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}
        return {one.name: one.default for one in parameters}

    needed = inspect.Parameter.empty
    of_model = {
        "model": needed,
        "datasets_function": needed,
        "loss_function": needed,
        "optimizer": needed,
        "metrics": None,
        "worker_logger_callback": None,
        "driver_logger_callback": None,
        "save_to_onnx": False,
        "keras_custom_objects": None,
        "fn_batch_collate": None,
    }
    of_train = {
        "epoch_number": needed,
        "batch_size": needed,
        "engines_number": None,
        "num_dataloader_threads": 4,
        "validation_freq": 1,
        "checkpoint_freq": 1,
        "effective_batch_size": None,
    }
    # Equal dictionaries may have another order.
    assert list(found(FabricModel).items()) == list(of_model.items())
    assert list(found(fabric().train).items()) == list(of_train.items())


# S0-20, S0-28
def test_a_model_of_another_kind_is_refused_by_name() -> None:
    keras = type("Model", (), {"__module__": "tf_keras.src.engine.training"})
    functional = type("Functional", (keras,), {})
    optimizer = torch.optim.SGD(network().parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"Functional is a model of Keras 2.*make it with Keras 3"):
        FabricModel(functional(), datasets, LOSS, optimizer)
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module or a keras.Model, found func"):
        FabricModel(lambda x: x, datasets, LOSS, optimizer)
    with pytest.raises(TypeError, match="keras_custom_objects"):
        fabric(keras_custom_objects={"Mine": object})


# S0-21, S0-40
def test_data_sets_are_a_pair_of_map_style_ones() -> None:
    class Stream(IterableDataset[Any]):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            return iter([1])

    good = records(8, 1)
    wrong: Any
    for wrong, error, expected in [
        (good, TypeError, "expected a pair.*found TensorDataset"),
        ((good, good, good), TypeError, "expected a pair"),
        ((good, iter([1])), TypeError, "the test data set, list_iterator, has no __len__"),
        ((Stream(), good), TypeError, "the training data set, Stream, has no __len__"),
        (([], good), ValueError, "the training data set has no records, and .*; check its path"),
    ]:
        with pytest.raises(error, match=expected):
            trained(1, 4, datasets_function=lambda wrong=wrong: wrong)
    with pytest.raises(TypeError, match=r"datasets_function: expected a function.*TensorDataset"):
        fabric(datasets_function=good)


# S0-22, S0-23
def test_the_loss_is_a_function_and_the_optimizer_an_instance() -> None:
    with pytest.raises(TypeError, match=r"loss_function: expected a function.*'cross_entropy'"):
        fabric(loss_function="cross_entropy")
    with pytest.raises(TypeError, match=r"optimizer: expected an instance of torch.optim.*'adam'"):
        fabric(optimizer="adam")
    model = network()
    with pytest.raises(errors.UntranslatableError, match="LBFGS"):
        trained(1, 10, model=model, optimizer=torch.optim.LBFGS(model.parameters()))


# S0-24, S0-49
def test_metrics_have_names_and_are_measured_in_training_and_tests() -> None:
    worker, driver = Logger(), Logger()
    model = network()
    made = trained(
        2,
        10,
        model=model,
        metrics=[accuracy, Confidence()],
        worker_logger_callback=worker,
        driver_logger_callback=driver,
    )
    assert {tuple(metrics) for metrics, *_ in worker.of("train")} == {
        ("loss", "accuracy", "Confidence")
    }
    assert {frozenset(metrics) for metrics, *_ in driver.of("test")} == {
        frozenset({"loss", "accuracy", "Confidence"})
    }
    # Of the final weights, over all test data.
    x, y = datasets()[1].tensors
    found = driver.of("test")[-1][0]
    with torch.no_grad():
        assert found["loss"] == pytest.approx(float(LOSS(model(x), y)), abs=1e-5)
        assert found["accuracy"] == pytest.approx(float(accuracy(model(x), y)), abs=1e-6)
        assert found["Confidence"] == pytest.approx(Confidence()(model(x), y), abs=1e-5)
    assert made.job is not None and made.job.metrics["Confidence"] == found["Confidence"]


def test_a_value_for_each_class_is_shown_beside_single_values() -> None:
    assert shown({"loss": 0.25, "f1": [0.5, 1.0]}) == "loss=0.2500 f1=[0.5, 1.0]"
    assert measured([0.5, 1.0]) == [0.5, 1.0] and math.isnan(measured(None))


# S0-24
def test_metrics_with_one_name_are_refused() -> None:
    def loss(outputs: Any, labels: Any) -> float:
        return 0.0

    for wrong, error, expected in [
        ([accuracy, accuracy], ValueError, "`accuracy`: another metric is called so"),
        ([loss], ValueError, "`loss`: the loss is called so"),
        (["accuracy"], TypeError, "metrics: expected a function.*'accuracy'"),
    ]:
        with pytest.raises(error, match=expected):
            fabric(metrics=wrong)
    assert "partial" in vars(fabric(metrics=[functools.partial(accuracy)])._part)["_metrics"]


# S0-24
def test_the_driver_is_told_that_a_batch_has_a_loss_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = Logger()
    with caplog.at_level(logging.WARNING, "ebbflow.fabric"):
        trained(1, 50, metrics=[accuracy], driver_logger_callback=driver)
    assert "log_train_metrics hears of the loss alone" in caplog.text
    assert all(list(metrics) == ["loss"] for metrics, *_ in driver.of("train"))


# S0-25, S0-31, S0-45, S0-47, S0-49, S0-50
def test_a_worker_hears_of_its_steps() -> None:
    worker, losses = Logger(), list[float]()

    def loss(outputs: Any, labels: Any) -> Any:
        value = LOSS(outputs, labels)
        losses.append(float(value.detach()))
        return value

    trained(2, 30, loss_function=loss, worker_logger_callback=worker)
    train, test = worker.of("train"), worker.of("test")
    # 100 records are batches of 30, 30, 30 and 10.
    assert [call[1:] for call in train] == [(i, (i - 1) // 4, 1) for i in range(1, 9)]
    assert [call[1:] for call in test] == [(1, 0), (2, 1)]
    heard = [metrics["loss"] for kind, metrics, *_ in worker.calls[1:-1] if kind != "end"]
    assert heard == pytest.approx(losses)
    assert worker.calls[0] == ("begin",) and worker.calls[-1] == ("end",)


# S0-26, S0-46, S0-50
def test_the_driver_hears_averages_of_the_epoch() -> None:
    worker, driver = Logger(), Logger()
    trained(2, 30, worker_logger_callback=worker, driver_logger_callback=driver)
    sizes = [30, 30, 30, 10] * 2
    losses = [metrics["loss"] for metrics, *_ in worker.of("train")]
    heard = driver.of("train")
    assert [call[1:] for call in heard] == [(i, (i - 1) // 4, 1) for i in range(1, 9)]
    for at, (metrics, *_) in enumerate(heard):
        begin = at // 4 * 4
        weighted = zip(losses[begin : at + 1], sizes[begin : at + 1], strict=True)
        expected = sum(loss * size for loss, size in weighted) / sum(sizes[begin : at + 1])
        assert metrics["loss"] == pytest.approx(expected, abs=1e-6)
    assert driver.calls[0] == ("begin",) and driver.calls[-1] == ("end",)


# S0-46
@pytest.mark.parametrize("version", [0, 2, 4, 6])
def test_the_driver_hears_the_same_averages_after_a_rewind(version: int) -> None:
    def train(steps: range) -> list[Event]:
        return [
            Event(
                {"event": "train", "step": step, "epoch": step // 4, "loss": 1 / (step + 3)}
                | {"samples": 10 - step % 4, "workers": 2}
            )
            for step in steps
        ]

    def heard(events: list[Event]) -> list[tuple[Any, ...]]:
        logger = Logger()
        driver = _Driver(logger, _Told(3, 1), 40, 10, 10)
        for event in events:
            driver.on_event(event)
        return logger.of("train")

    whole = heard(train(range(12)))
    assert [call[1:3] for call in whole] == [(step + 1, step // 4) for step in range(12)]
    # It goes back to version 0, or into the first epoch, to its end, or into the second one.
    rewind = Event({"event": "rewind", "version": version, "era": 1})
    found = heard([*train(range(7)), rewind, *train(range(version, 12))])
    assert found == [*whole[:7], *whole[version:]]
    # The same once more.
    assert heard([*train(range(7)), rewind, rewind, *train(range(version, 12))]) == found


# S0-32, S0-46
def test_the_iteration_of_the_driver_counts_batches_of_all_workers() -> None:
    driver = Logger()
    trained(2, 10, engines_number=4, driver_logger_callback=driver)
    # An update has 4 batches, the last one of an epoch 2.
    assert [call[1] for call in driver.of("train")] == [4, 8, 10, 14, 18, 20]


# S0-30, S0-49
def test_the_driver_hears_of_tests_with_iteration_0() -> None:
    driver = Logger()
    trained(3, 50, driver_logger_callback=driver)
    assert [call[1:] for call in driver.of("test")] == [(0, 0), (0, 1), (0, 2)]
    # After the batches of its epoch.
    kinds = [call[0] for call in driver.calls]
    assert kinds == ["begin", *["train", "train", "test"] * 3, "end"]


# S0-43
def test_another_logger_replaces_the_default_one(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "ebbflow.fabric"):
        trained(1, 50)
        default = caplog.text
        caplog.clear()
        assert capsys.readouterr().out.count("\n") == 3
        assert "iteration=2" in default
        trained(1, 50, worker_logger_callback=Logger(), driver_logger_callback=Logger())
    assert capsys.readouterr().out == "" and caplog.text == ""


# S0-44
def test_one_class_is_a_logger_of_both_and_needs_its_methods() -> None:
    both = Logger()
    trained(1, 50, worker_logger_callback=both, driver_logger_callback=both)
    assert [call[0] for call in both.calls].count("begin") == 2

    class Half:
        def log_train_metrics(self, *_: Any) -> None: ...

    with pytest.raises(TypeError, match="driver_logger_callback: Half has no log_test_metrics"):
        fabric(driver_logger_callback=Half())


# S0-29, S0-42
def test_a_collate_function_makes_the_batches() -> None:
    seen = []

    def collate(batch: list[Any]) -> tuple[Any, Any]:
        seen.append(len(batch))
        assert all(isinstance(record, tuple) and len(record) == 2 for record in batch)
        return torch.stack([x for x, _ in batch]), torch.stack([y for _, y in batch])

    trained(1, 40, fn_batch_collate=collate)
    assert seen == [40, 40, 20, TESTED]
    with pytest.raises(TypeError, match="no pair of features and labels, but Tensor"):
        trained(1, 40, fn_batch_collate=lambda batch: torch.stack([x for x, _ in batch]))


# S0-41
def test_features_and_labels_may_be_dictionaries_arrays_and_scalars() -> None:
    class Named:
        def __len__(self) -> int:
            return 20

        def __getitem__(self, record: int) -> Any:
            features = {"dense": torch.full((3,), record / 20).numpy(), "id": record % 4}
            return features, {"price": record / 20}

    class Net(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.ids = nn.Embedding(4, 2)
            self.out = nn.Linear(5, 1)

        def forward(self, features: Any) -> Any:
            return self.out(torch.cat([features["dense"], self.ids(features["id"])], 1))

    def loss(outputs: Any, labels: Any) -> Any:
        return nn.functional.mse_loss(outputs[:, 0], labels["price"].float())

    model, driver = Net(), Logger()
    trained(
        8,
        5,
        model=model,
        datasets_function=lambda: (Named(), Named()),
        loss_function=loss,
        driver_logger_callback=driver,
    )
    tests = [metrics["loss"] for metrics, *_ in driver.of("test")]
    assert tests[-1] < tests[0]


# S0-31, S0-32, S0-36, S0-37, S0-38
@pytest.mark.parametrize(
    ("batch_size", "engines", "effective", "expected"),
    [
        (32, None, None, (1, 32)),
        (32, 4, None, (4, 128)),
        (32, None, 128, (4, 128)),
        (32, None, 100, (4, 128)),
        (32, None, 8, (1, 32)),
        (32, 2, 128, (4, 128)),
        (32, 8, 128, (8, 128)),
        (32, 8, 100, (8, 128)),
        (1, 3, None, (3, 3)),
    ],
)
def test_sizes_of_batches(
    batch_size: int, engines: int | None, effective: int | None, expected: tuple[int, int]
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert batches(batch_size, engines, effective) == expected
    rounded = effective is not None and effective % batch_size != 0
    assert len(caught) == rounded
    if rounded:
        assert f"effective_batch_size = {effective} is no multiple" in str(caught[0].message)


# S0-32
def test_without_numbers_an_update_has_a_batch_of_each_process_of_the_fleet() -> None:
    assert batches(32, None, None, 4) == (4, 128)
    assert batches(32, 2, None, 4) == (2, 64)
    assert batches(32, None, 64, 4) == (2, 64)
    assert fleet_of({"EBBFLOW_MASTER": "x", "EBBFLOW_WORKERS": "4"}) == 4
    # Started by hand, and alone.
    assert fleet_of({"EBBFLOW_MASTER": "x"}) is fleet_of({"EBBFLOW_WORKERS": "4"}) is None
    for text in ("0", "many", "1025"):
        with pytest.raises(ValueError, match=f"EBBFLOW_WORKERS = '{text}': expected a number"):
            fleet_of({"EBBFLOW_MASTER": "x", "EBBFLOW_WORKERS": text})


# S0-36
def test_an_update_has_the_effective_batch() -> None:
    made = trained(1, 10, effective_batch_size=50)
    assert made.job is not None and made.job.summary is not None
    assert made.job.summary["steps"] == 2
    assert made.job.summary["microbatches_applied"] == 10


# S0-30, S0-33, S0-34, S0-35
def test_numbers_are_checked() -> None:
    wrong: Any
    for wrong, error, expected in [
        ({"epoch_number": 0}, ValueError, "epoch_number = 0: expected at least 1"),
        ({"epoch_number": 1.5}, TypeError, "epoch_number: expected an integer, found 1.5"),
        ({"batch_size": True}, TypeError, "batch_size: expected an integer, found True"),
        ({"engines_number": 0}, ValueError, "engines_number = 0"),
        ({"num_dataloader_threads": -1}, ValueError, "num_dataloader_threads = -1"),
        ({"validation_freq": 0}, ValueError, "validation_freq = 0"),
        ({"checkpoint_freq": -1}, ValueError, "checkpoint_freq = -1"),
        ({"effective_batch_size": "64"}, TypeError, "effective_batch_size: expected an integer"),
    ]:
        with pytest.raises(error, match=expected):
            fabric().train(**({"epoch_number": 1, "batch_size": 8} | wrong))


# S0-33
@pytest.mark.parametrize("number", [0, 2])
def test_so_many_processes_load_the_records(number: int) -> None:
    class Named:
        """Records with the process that loads them as their label."""

        def __len__(self) -> int:
            return 40

        def __getitem__(self, record: int) -> Any:
            return torch.zeros(6), os.getpid()

    model, trained_by, tested_by = network(), set[int](), set[int]()

    def loss(outputs: Any, labels: Any) -> Any:
        (trained_by if model.training else tested_by).update(labels.tolist())
        return LOSS(outputs, labels * 0)

    made = fabric(model, datasets_function=lambda: (Named(), Named()), loss_function=loss)
    made.train(1, 5, num_dataloader_threads=number)
    if number == 0:
        assert trained_by == tested_by == {os.getpid()}
    else:
        assert len(trained_by) == number and 1 <= len(tested_by) <= number
        assert not {os.getpid()} & (trained_by | tested_by) and not trained_by & tested_by


# S0-34
def test_loggers_hear_of_every_nth_test_and_of_the_last_one() -> None:
    worker, driver = Logger(), Logger()
    trained(5, 50, validation_freq=2, worker_logger_callback=worker, driver_logger_callback=driver)
    assert [call[2] for call in driver.of("test")] == [1, 3, 4]
    assert [call[2] for call in worker.of("test")] == [1, 3, 4]


# S0-35
@pytest.mark.parametrize(("freq", "saved"), [(2, [4, 8]), (0, [])])
def test_checkpoints_are_saved_every_so_many_epochs(
    freq: int, saved: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EBBFLOW_CHECKPOINTS", str(tmp_path))

    def versions() -> list[int]:
        manifests = tmp_path.glob("saved/v*/manifest.json")
        return sorted(int(path.parent.name[1:]) for path in manifests)

    class Waits(Logger):
        """Lets the first checkpoint be written before the next one is due."""

        def log_train_metrics(self, *values: Any) -> None:
            while values[2] == 3 and saved and versions() != [4]:
                time.sleep(0.01)

    made = fabric(worker_logger_callback=Waits())
    made.name = "saved"
    made.train(5, 50, num_dataloader_threads=0, checkpoint_freq=freq)
    assert versions() == saved


# S0-07, S0-09
def test_variables_limit_the_time_of_pulls_that_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"EDT_PULL_WEIGHT_TIME_OUT": "2.5", "EDT_PULL_FAILED_LIMITS": "3"}
    assert limits(given) == {"pull_timeout": "2500ms", "pull_attempts_max": 3}
    assert limits({}) == {}
    for name, text in [
        ("EDT_PULL_WEIGHT_TIME_OUT", "soon"),
        ("EDT_PULL_WEIGHT_TIME_OUT", "0"),
        ("EDT_PULL_WEIGHT_TIME_OUT", "nan"),
        ("EDT_PULL_FAILED_LIMITS", "0"),
        ("EDT_PULL_FAILED_LIMITS", "1.5"),
    ]:
        with pytest.raises(ValueError, match=f"{name} = '{text}': expected"):
            limits({name: text})
    monkeypatch.setenv("EDT_PULL_FAILED_LIMITS", "many")
    with pytest.raises(ValueError, match="EDT_PULL_FAILED_LIMITS = 'many'"):
        trained(1, 50)
    monkeypatch.setenv("EDT_PULL_FAILED_LIMITS", "7")
    assert trained(1, 50).job is not None


def test_the_job_is_called_like_the_script_and_has_a_seed() -> None:
    def once(seed: int) -> str | None:
        made = fabric()
        made.name, made.seed = "mine", seed
        made.train(1, 10, num_dataloader_threads=0)
        assert made.job is not None and made.job.summary is not None
        assert made.job.summary["job"].startswith("mine-")
        return made.job.model_sha256

    assert once(1) == once(1) != once(2)
    assert fabric().name


def test_a_loss_that_is_no_number_reaches_nobody_as_one() -> None:
    driver = Logger()
    with pytest.raises(errors.SessionFailedError, match="is NaN"):
        trained(
            1, 50, loss_function=lambda o, y: LOSS(o, y) * math.nan, driver_logger_callback=driver
        )
    assert driver.of("train") == [] and driver.calls[-1] == ("end",)


# S0-27
def test_without_its_packages_onnx_is_refused_before_the_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = importlib.util.find_spec
    hidden = {"onnx", "onnxscript"}

    def found(name: str, package: str | None = None) -> Any:
        return None if name in hidden else find(name, package)

    monkeypatch.setattr("importlib.util.find_spec", found)
    worker = Logger()
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'ebbflow\[onnx\]'"):
        trained(1, 50, save_to_onnx=True, worker_logger_callback=worker)
    monkeypatch.delattr(torch.export.Dim, "DYNAMIC", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with pytest.raises(RuntimeError, match=r"needs torch 2\.6 or later, found 2"):
        trained(1, 50, save_to_onnx=True, worker_logger_callback=worker)
    assert worker.calls == []


# S0-27
@pytest.mark.usefixtures("onnx_is_there")
def test_models_of_other_inputs_are_refused_before_the_training() -> None:
    class Named:
        def __len__(self) -> int:
            return 20

        def __getitem__(self, record: int) -> Any:
            return {"x": torch.zeros(6)}, 1

    worker = Logger()
    with pytest.raises(TypeError, match="the features of a batch are dict"):
        trained(
            1,
            5,
            datasets_function=lambda: (Named(), Named()),
            save_to_onnx=True,
            worker_logger_callback=worker,
        )
    assert worker.calls == []


@pytest.fixture
def onnx_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing of ONNX be missing."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)


# S0-27
def test_the_final_model_is_saved_as_onnx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnxruntime = needs("onnxruntime", "onnx", "onnxscript")
    monkeypatch.setenv("RESULT_DIR", str(tmp_path))
    model = network()
    trained(2, 50, model=model, save_to_onnx=True)
    assert model.training
    x = datasets()[1].tensors[0]
    runner = onnxruntime.InferenceSession(
        str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"]
    )
    (outputs,) = runner.run(None, {runner.get_inputs()[0].name: x.numpy()})
    assert outputs == pytest.approx(model(x).detach().numpy(), abs=1e-5)
