"""`ebbflow.elastic` alone. Ids are those of ``docs/behaviours.md``."""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from typing import Any

import pytest

from .conftest import needs

torch = needs("torch")

import ebbflow  # noqa: E402
from ebbflow import elastic, errors  # noqa: E402
from ebbflow.elastic import ElasticBroadcastObject, elastic_allreduce  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

LOSS = nn.CrossEntropyLoss()

#: Settings of the job; 12 batches of 8 records, two epochs.
SETTINGS: dict[str, Any] = {"epochs": 2, "micro": 8, "effective": 16, "seed": 5}


def data(records: int = 96) -> TensorDataset:
    x = torch.randn(records, 6, generator=torch.Generator().manual_seed(3))
    return TensorDataset(x, (x.sum(1) > 0).long())


def network() -> Any:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 2)
    )


def registered() -> tuple[Any, Any]:
    """Register a network and an optimizer."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ElasticBroadcastObject.set_model(model)
    ElasticBroadcastObject.set_optimizer(optimizer)
    return model, optimizer


def backward_outside(train_step: Callable[[Any], Any]) -> ebbflow.Session:
    """Train with a step that gets only the optimizer, as in ElasticDL's loop for PyTorch."""

    def elastic_train(dataset: elastic.Dataset) -> ebbflow.Session:
        model, optimizer = registered()
        for features, labels in dataset:
            optimizer.zero_grad()
            LOSS(model(features), labels).backward()
            train_step(optimizer)
        return dataset.job

    job: ebbflow.Session = elastic.run(elastic_train, data(), **SETTINGS)
    return job


def backward_inside(train_step: Callable[..., Any]) -> ebbflow.Session:
    """Train with a step that computes its gradients, as in ElasticDL's loop for TensorFlow 2."""

    def elastic_train(dataset: elastic.Dataset) -> ebbflow.Session:
        model, optimizer = registered()
        for features, labels in dataset:
            train_step(model, optimizer, features, labels)
        return dataset.job

    job: ebbflow.Session = elastic.run(elastic_train, data(), **SETTINGS)
    return job


@elastic_allreduce
def merge(optimizer: Any) -> None:
    optimizer.step()


@pytest.fixture(scope="module")
def expected() -> str | None:
    """Give the bits of the same training by `ebbflow.join` alone."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with ebbflow.join(model, optimizer, data(), **SETTINGS) as job:
        for epoch in job.epochs():
            for batch in epoch:
                job.step(LOSS(model(batch.x), batch.y))
    return job.model_sha256


# S3-01, S3-02
def test_the_function_gets_leased_batches_of_all_epochs(expected: str) -> None:
    seen: list[tuple[int, list[int]]] = []

    def elastic_train(dataset: elastic.Dataset) -> str:
        model, optimizer = registered()
        for batch in dataset:
            seen.append((batch.epoch, batch.records))
            LOSS(model(batch.x), batch.y).backward()
            merge(optimizer)
        assert dataset.job.model_sha256 == expected
        return "what it returns"

    assert elastic.run(elastic_train, data(), **SETTINGS) == "what it returns"
    for epoch in range(2):
        records = [record for number, batch in seen if number == epoch for record in batch]
        assert sorted(records) == list(range(96))


# S3-04
def test_the_decorator_does_not_assume_what_the_function_does(expected: str) -> None:
    @elastic_allreduce
    def step(model: Any, optimizer: Any, features: Any, labels: Any) -> None:
        LOSS(model(features), labels).backward()
        optimizer.step()

    @elastic_allreduce
    def closure(model: Any, optimizer: Any, features: Any, labels: Any) -> None:
        def compute() -> Any:
            loss = LOSS(model(features), labels)
            loss.backward()
            return loss

        assert optimizer.step(compute).ndim == 0

    found = {backward_outside(merge), backward_inside(step), backward_inside(closure)}
    assert {job.model_sha256 for job in found} == {expected}


# S3-05
def test_what_is_not_registered_is_asked_for() -> None:
    def nothing(dataset: elastic.Dataset) -> None:
        list(dataset)

    def only_model(dataset: elastic.Dataset) -> None:
        ElasticBroadcastObject.set_model(network())
        list(dataset)

    for function, name in [(nothing, "model"), (only_model, "optimizer")]:
        with pytest.raises(errors.SessionError, match=rf"set_{name}\({name}\)"):
            elastic.run(function, data(), **SETTINGS)
    with pytest.raises(errors.SessionError, match="belongs into the function that"):
        ElasticBroadcastObject.set_model(network())
    with pytest.raises(errors.SessionError, match="without iterating"):
        elastic.run(lambda dataset: registered() and None, data(), **SETTINGS)


# S2-24, S3-06, S3-10, S3-12
@pytest.mark.parametrize("name", ["size", "rank", "broadcast_parameters", "report_batch_finished"])
def test_names_that_fall_away_say_what_to_do(name: str) -> None:
    with pytest.raises(errors.UnsupportedError, match=f"has no {name}: .*(remove|do not|elected)"):
        getattr(elastic, name)
    with pytest.raises(AttributeError, match="no attribute 'sise'"):
        _ = elastic.sise


# S3-07
def test_an_optimizer_of_horovod_is_refused_by_name() -> None:
    wrapped = type("SGD", (torch.optim.SGD,), {"__module__": "horovod.torch.optimizer"})

    def elastic_train(dataset: elastic.Dataset) -> None:
        ElasticBroadcastObject.set_optimizer(wrapped(network().parameters(), lr=0.1))

    with pytest.raises(errors.UnsupportedError, match=r"remove hvd\.DistributedOptimizer"):
        elastic.run(elastic_train, data(), **SETTINGS)
    with pytest.raises(errors.UnsupportedError, match="has no DistributedGradientTape"):
        _ = elastic.DistributedGradientTape


# S3-08, S4-11
def test_the_loop_logs_when_it_wants_to() -> None:
    logged = []

    def elastic_train(dataset: elastic.Dataset) -> None:
        model, optimizer = registered()
        for step, (features, labels) in enumerate(dataset):
            loss = LOSS(model(features), labels)
            loss.backward()
            merge(optimizer)
            if step % 20 == 0:
                logged.append((step, loss.item()))

    elastic.run(elastic_train, data(), **SETTINGS)
    assert [step for step, _ in logged] == [0, 20] and logged[1][1] > 0


def fails(times: int, error: Exception) -> Callable[[], None]:
    """Return a function that raises an error so many times."""
    left = [error] * times

    def fail() -> None:
        if left:
            raise left.pop()

    return fail


# S3-09, S3-15, S3-16
def test_retries_have_a_bound_and_a_typed_error_at_the_end() -> None:
    calls = []

    @elastic_allreduce(retries=2, wait_secs=0)
    def never(optimizer: Any) -> None:
        calls.append(1)
        optimizer.step()
        raise TimeoutError("no answer")

    with pytest.raises(errors.AttemptsError, match="never failed at attempt 3 of 3") as raised:
        backward_outside(never)
    assert raised.value.attempts == len(calls) == 3
    assert isinstance(raised.value.__cause__, TimeoutError)


# S3-09, S3-16
def test_without_another_number_a_function_runs_again_five_times() -> None:
    calls = []

    @elastic_allreduce(wait_secs=0)
    def never(optimizer: Any) -> None:
        calls.append(1)
        optimizer.step()
        raise ConnectionError("reset")

    with pytest.raises(errors.AttemptsError, match="never failed at attempt 6 of 6"):
        backward_outside(never)
    assert len(calls) == 6


# S3-16
@pytest.mark.parametrize(
    ("options", "waits"),
    [({}, [1.0] * 5), ({"retries": 2}, [1.0] * 2), ({"wait_secs": 0.25}, [0.25] * 5)],
)
def test_a_function_that_fails_waits_before_it_runs_again(
    options: dict[str, Any], waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    clock = types.SimpleNamespace(sleep=slept.append)
    monkeypatch.setattr("ebbflow.elastic.merge.time", clock)

    @elastic_allreduce(**options)
    def never(optimizer: Any) -> None:
        optimizer.step()
        raise ConnectionError("reset")

    with pytest.raises(errors.AttemptsError):
        backward_outside(never)
    assert slept == waits


# S3-13
def test_a_function_that_fails_runs_again_as_if_it_had_not(
    expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    once, again = fails(1, ConnectionError("reset")), fails(2, TimeoutError("late"))

    @elastic_allreduce(wait_secs=0)
    def outside(optimizer: Any) -> None:
        optimizer.step()
        once()

    @elastic_allreduce(wait_secs=0)
    def inside(model: Any, optimizer: Any, features: Any, labels: Any) -> None:
        # A forward pass draws random numbers and changes running statistics.
        LOSS(model(features), labels).backward()
        optimizer.step()
        again()

    with caplog.at_level(logging.WARNING, "ebbflow"):
        assert backward_outside(outside).model_sha256 == expected
        assert backward_inside(inside).model_sha256 == expected
    assert caplog.text.count("it runs again in 0 s") == 3


# S3-13
def test_gradients_that_were_added_to_are_not_repeated() -> None:
    @elastic_allreduce(wait_secs=0)
    def adds(optimizer: Any) -> None:
        for tensor in optimizer.param_groups[0]["params"]:
            tensor.grad.mul_(0.5)
        raise TimeoutError("late")

    with pytest.raises(errors.AttemptsError, match=r"attempt 1 of 6.*cannot run again"):
        backward_outside(adds)


# S3-14
def test_frameworks_that_are_not_trained_are_refused_by_name() -> None:
    for framework in ("tf_v1", "mxnet"):
        with pytest.raises(errors.UnsupportedError, match=f"framework = '{framework}'"):
            elastic_allreduce(lambda: None, framework)
    with pytest.raises(errors.UnsupportedError, match="loops of TensorFlow 1 are not trained"):
        ElasticBroadcastObject.set_session(None)
    with pytest.raises(ValueError, match="retries = -1"):
        elastic_allreduce(retries=-1)


# S3-12, S3-15, S3-16
def test_a_function_runs_once_for_each_batch_and_its_value_is_kept(
    expected: str,
) -> None:
    values: list[int] = []

    @elastic_allreduce
    def step(optimizer: Any) -> int:
        optimizer.step()
        return len(values)

    def remembered(optimizer: Any) -> None:
        values.append(step(optimizer))

    job = backward_outside(remembered)
    assert values == list(range(24))
    assert job.model_sha256 == expected and job.summary is not None
    assert job.summary["microbatches_applied"] == 24


# S3-15
def test_errors_of_the_function_itself_come_through_at_once() -> None:
    calls = []

    @elastic_allreduce
    def wrong(optimizer: Any) -> None:
        calls.append(1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        backward_outside(wrong)
    assert len(calls) == 1


def test_steps_that_would_lose_gradients_are_refused() -> None:
    def only(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return step

    @elastic_allreduce
    def forgets(optimizer: Any) -> None:
        pass

    def bare(optimizer: Any) -> None:
        optimizer.step()

    @elastic_allreduce
    def other_rate(optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 0.5
        optimizer.step()

    def twice(optimizer: Any) -> None:
        merge(optimizer)
        merge(optimizer)

    for step, expected in [
        (forgets, r"forgets has @elastic_allreduce and returned without a call of optimizer\.step"),
        (bare, "outside of a function with @elastic_allreduce"),
        (other_rate, r"learning rate from \[0\.1\] to \[0\.05\].*set_scheduler"),
        (twice, r"job\.push without a batch"),
    ]:
        with pytest.raises(errors.SessionError, match=expected):
            backward_outside(only(step))


def test_a_batch_without_a_loss_is_refused() -> None:
    def elastic_train(dataset: elastic.Dataset) -> None:
        model, optimizer = registered()
        for features, _ in dataset:
            outputs = model(features)
            outputs.backward(torch.ones_like(outputs))
            merge(optimizer)

    with pytest.raises(errors.SessionError, match="the loss of the batch is not known"):
        elastic.run(elastic_train, data(), **SETTINGS)


def test_the_dataset_is_iterated_once_and_the_function_outside_of_run_is_refused() -> None:
    def twice(dataset: elastic.Dataset) -> None:
        with pytest.raises(errors.SessionError, match="from the first batch on"):
            _ = dataset.job
        with pytest.raises(errors.SessionError, match="before the first batch"):
            merge(None)
        model, optimizer = registered()
        for _ in range(2):
            for features, labels in dataset:
                LOSS(model(features), labels).backward()
                merge(optimizer)

    with pytest.raises(errors.SessionError, match="remove the loop over epochs"):
        elastic.run(twice, data(), **SETTINGS)
    with pytest.raises(errors.SessionError, match="merge belongs into the function"):
        merge(None)


def test_a_scheduler_is_registered_and_torch_is_as_it_was_afterwards() -> None:
    backward = torch.Tensor.backward
    found = []

    def elastic_train(dataset: elastic.Dataset) -> None:
        model, optimizer = registered()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1)
        ElasticBroadcastObject.set_scheduler(scheduler)
        before = optimizer.step
        for features, labels in dataset:
            LOSS(model(features), labels).backward()
            merge(optimizer)
        found.append((dataset.job.model_sha256, optimizer, before))

    elastic.run(elastic_train, data(), **SETTINGS)
    ((sha, optimizer, before),) = found
    assert torch.Tensor.backward is backward and optimizer.step == before
    assert sha != backward_outside(merge).model_sha256


# S1-08
def test_an_evaluation_ends_each_epoch_and_one_process_saves() -> None:
    saved: list[Any] = []

    def measure(model: Any, batch: ebbflow.Batch) -> dict[str, float]:
        return {"loss": LOSS(model(batch.x), batch.y)}

    def elastic_train(dataset: elastic.Dataset) -> ebbflow.Session:
        model, optimizer = registered()
        for features, labels in dataset:
            LOSS(model(features), labels).backward()
            merge(optimizer)
        return dataset.job

    def save(model: Any, job: ebbflow.Session) -> None:
        saved.append((model[0].weight.clone(), job))

    options = {"measure": measure, "save_checkpoint": save} | SETTINGS
    job = elastic.run(elastic_train, data(), data(20), **options)
    assert [entry["epoch"] for entry in job.history] == [0, 1]
    assert len(saved) == 1 and saved[0][1] is job


def test_settings_of_run_are_checked_before_the_function_is_called() -> None:
    def elastic_train(dataset: elastic.Dataset) -> None:
        raise AssertionError

    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"epoch": 3}, TypeError, "no setting `epoch`"),
        ({"scheduler": None}, TypeError, "set_scheduler"),
        ({"measure": len}, ValueError, "belong together"),
    ]
    for options, error, expected in cases:
        with pytest.raises(error, match=expected):
            elastic.run(elastic_train, data(), **options)


# S1-05, S1-06
def test_the_sampler_leaves_records_to_the_leases() -> None:
    source = data()
    sampler = elastic.ElasticDistributedSampler(source)
    sampler.set_epoch(3)
    loader = DataLoader(source, batch_size=8, sampler=sampler)
    assert len(sampler) == 96 and len(loader) == 12
    with pytest.raises(errors.SessionError, match=r"iterate job\.epochs"):
        next(iter(loader))
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    with ebbflow.join(model, optimizer, loader, epochs=2) as job:
        for epoch in job.epochs():
            for batch in epoch:
                seen.append(batch.records)
                job.step(LOSS(model(batch.x), batch.y))
    epochs = [[record for batch in half for record in batch] for half in (seen[:12], seen[12:])]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(96)) != epochs[0] != epochs[1]
    for name in ("num_replicas", "rank", "start_index"):
        with pytest.raises(errors.UnsupportedError, match=f"{name} = 2.*remove it"):
            elastic.ElasticDistributedSampler(source, **{name: 2})


# S1-13, S1-14, S1-15
def test_rendezvous_names_the_job_and_the_master() -> None:
    found = elastic.rendezvous(rdzv_id="mine", rdzv_endpoint="host:4700")
    assert found == {"name": "mine", "master": "http://host:4700"}
    assert (
        elastic.rendezvous(rdzv_id="mine", rdzv_endpoint="https://h:1")["master"] == "https://h:1"
    )
    assert elastic.rendezvous(rdzv_id="mine") == {"name": "mine"}
    with pytest.raises(errors.UnsupportedError, match=r"rdzv_backend = 'etcd'.*ebb master"):
        elastic.rendezvous(rdzv_id="mine", rdzv_backend="etcd")
