"""`ebbflow.flow`. Ids are those of ``docs/behaviours.md``."""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Optional

import pytest
from ebbflow import errors
from ebbflow.flow import Parameters, Resources, task, workflow
from ebbflow.flow import resources as machine
from ebbflow.flow.cache import folder


@dataclasses.dataclass(frozen=True)
class Hyperparameters(Parameters):
    batch_size: int = 128
    epochs: int = 10
    learning_rate: float = 0.01
    backend: str = "gloo"
    layers: tuple[int, ...] = (64, 10)
    limit: Optional[int] = None  # noqa: UP045


class Outputs(NamedTuple):
    epoch_accuracies: list[float]
    model_state: Path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a cache of its own."""
    monkeypatch.setenv("EBBFLOW_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


CALLS: list[Any] = []


@pytest.fixture(autouse=True)
def calls() -> list[Any]:
    """Give an empty list of calls, to which the tasks of this file add."""
    CALLS.clear()
    return CALLS


def trained(hp: Hyperparameters, out: Path) -> Outputs:
    """Stand for a training that takes a while."""
    CALLS.append(hp)
    model = out / f"model-{len(CALLS)}.pt"
    model.write_bytes(f"weights of {hp.epochs} epochs".encode())
    return Outputs([0.5 + epoch / 100 for epoch in range(hp.epochs)], model)


def entries(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*") if path.is_file())


# S4-02
def test_hyperparameters_have_defaults_and_become_json_and_back() -> None:
    hp = Hyperparameters(epochs=3, learning_rate=0.1)
    assert json.loads(hp.to_json())["learning_rate"] == 0.1
    assert Hyperparameters.from_json(hp.to_json()) == hp
    assert Hyperparameters.from_json('{"epochs": 3}') == Hyperparameters(epochs=3)
    assert Hyperparameters.from_json('{"learning_rate": 1}').learning_rate == 1.0
    for text, error, expected in [
        ('{"epoch": 3}', ValueError, "Hyperparameters: no field `epoch`; there are batch_size"),
        ('{"epochs": "3"}', TypeError, r"Hyperparameters\.epochs: expected int, found str"),
        ('{"layers": [1, "x"]}', TypeError, r"layers: expected int, found str \('x'\)"),
        ("[]", TypeError, "expected Hyperparameters, found list"),
        ("{", ValueError, "Expecting"),
    ]:
        with pytest.raises(error, match=expected):
            Hyperparameters.from_json(text)
    with pytest.raises(ValueError, match=r"learning_rate: nan is no number"):
        Hyperparameters(learning_rate=float("nan")).to_json()
    wrong: Any = "3"
    with pytest.raises(TypeError, match=r"epochs: expected int, found str"):
        Hyperparameters(epochs=wrong).to_json()


# S4-14, S4-22, S4-23
def test_a_task_is_called_locally_and_has_typed_outputs(tmp_path: Path) -> None:
    @task
    def train(hp: Hyperparameters, out: Path) -> Outputs:
        """Train a model."""
        return trained(hp, out)

    @workflow
    def training(out: Path, hp: Hyperparameters = Hyperparameters(epochs=4)) -> Outputs:
        return train(hp=hp, out=out)

    accuracies, model = training(tmp_path)
    assert len(accuracies) == 4 and model.read_bytes() == b"weights of 4 epochs"
    assert training(tmp_path, hp=Hyperparameters(epochs=2)).epoch_accuracies == [0.5, 0.51]
    assert train.name.endswith(".train") and train.__doc__ == "Train a model."


# S4-22
def test_values_of_other_types_are_refused_with_their_place() -> None:
    @task
    def train(hp: Hyperparameters, rates: dict[str, float]) -> list[float]:
        return [0.5, "high"]  # type: ignore[list-item]

    wrong: Any
    for wrong, expected in [
        (({"epochs": 3}, {}), r"argument `hp` of .*: expected Hyperparameters, found dict"),
        ((Hyperparameters(), {"a": True}), r"`rates` of .*\['a'\]: expected float, found bool"),
        ((Hyperparameters(), {"a": 1}), r"result of .*\[1\]: expected float, found str"),
        ((Hyperparameters(),), "missing a required argument: 'rates'"),
    ]:
        with pytest.raises(TypeError, match=expected):
            train(*wrong)


def test_types_that_cannot_be_kept_are_refused_by_name() -> None:
    @task
    def no_type(hp) -> None: ...  # type: ignore[no-untyped-def]  # noqa: ANN001

    @task
    def no_result(hp: int): ...  # type: ignore[no-untyped-def]  # noqa: ANN202

    @task
    def open_end(*hp: int) -> None: ...

    @task
    def unknown(hp: set[int]) -> None: ...

    @task
    def bare(hp: list) -> None: ...  # type: ignore[type-arg]

    given: Any
    for given, expected in [
        (no_type, "give the argument `hp` a type"),
        (no_result, "give its result a type"),
        (open_end, "`hp` is none that a caller can name"),
        (unknown, r"`hp` of .*: values of set\[int\] cannot be compared and kept"),
        (bare, "values of list cannot be compared"),
    ]:
        with pytest.raises(TypeError, match=expected):
            given(3)


# S4-19
def test_a_task_is_retried_and_ends_with_a_typed_error(
    calls: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    @task(retries=2)
    def passes(good_at: int) -> int:
        calls.append(good_at)
        if len(calls) < good_at:
            raise ConnectionError("reset")
        return len(calls)

    with caplog.at_level(logging.WARNING, "ebbflow"):
        assert passes(3) == 3
    assert "failed at attempt 2 of 3: ConnectionError('reset'); it runs again" in caplog.text
    calls.clear()
    with pytest.raises(errors.AttemptsError, match="failed at attempt 3 of 3") as raised:
        passes(4)
    assert raised.value.attempts == len(calls) == 3
    assert isinstance(raised.value.__cause__, ConnectionError)


# S4-19
def test_a_task_without_retries_raises_its_own_error(calls: list[Any]) -> None:
    @task
    def fails() -> None:
        calls.append(1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert len(calls) == 1
    with pytest.raises(ValueError, match="retries = -1"):
        task(retries=-1)


def keep(hp: Hyperparameters, out: Path) -> Outputs:
    """Train in the current folder."""
    return trained(hp, Path())


kept = task(keep, cache=True, cache_version="1.2")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a file as input of a task, in the current folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "data.csv"
    path.write_text("1,2")
    return path


# S4-20
def test_equal_inputs_give_the_kept_result(calls: list[Any], source: Path, cache: Path) -> None:
    first = kept(Hyperparameters(epochs=2), source)
    # An equal file elsewhere, an int for a float: the same inputs.
    other = source.with_name("copy.csv")
    other.write_text("1,2")
    rate: Any = 0.01
    again = kept(out=other, hp=Hyperparameters(epochs=2, learning_rate=rate))
    assert again == first and len(calls) == 1
    # The file that the task wrote may go; the kept one stays, and cannot be written.
    (source.parent / "model-1.pt").unlink()
    assert first.model_state.is_relative_to(cache)
    assert first.model_state.read_bytes() == b"weights of 2 epochs"
    assert first.model_state.stat().st_mode & 0o222 == 0


# S4-20
def test_other_inputs_versions_types_and_tasks_are_computed(calls: list[Any], source: Path) -> None:
    def versioned(version: str) -> Any:
        return task(cache=True, cache_version=version)(keep)

    hp = Hyperparameters(epochs=1)
    kept(hp, source)
    kept(Hyperparameters(epochs=2), source)
    versioned("1.3")(hp, source)
    source.write_text("1,3")
    kept(hp, source)
    assert len(calls) == 4

    @task(cache=True, cache_version="1.2")
    def renamed(hp: Hyperparameters, out: Path) -> Outputs:
        return trained(hp, Path())

    renamed(hp, source)
    versioned("1.2")(hp, source)
    assert len(calls) == 5
    for options in ({"cache": True}, {"cache_version": "1"}):
        with pytest.raises(ValueError, match="cache and cache_version belong together"):
            task(**options)


# S4-20
def test_a_result_of_other_types_is_not_read(calls: list[Any]) -> None:
    def both(kind: Any) -> Any:
        def count() -> Any:
            calls.append(1)
            return kind(len(calls))

        count.__annotations__["return"] = kind
        return task(cache=True, cache_version="1")(count)()

    assert [both(int), both(float), both(int), both(float)] == [1, 2.0, 1, 2.0]
    assert len(calls) == 2


@pytest.mark.parametrize("damage", ["outputs.json", "0-model-1.pt", "missing"])
def test_a_damaged_entry_is_computed_again_and_replaced(
    calls: list[Any], source: Path, cache: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    found = kept(Hyperparameters(epochs=1), source)
    name = "0-model-1.pt" if damage == "missing" else damage
    broken = found.model_state.with_name(name)
    broken.chmod(0o644)
    if damage == "missing":
        broken.unlink()
    else:
        broken.write_text("{")
    with caplog.at_level(logging.WARNING, "ebbflow"):
        again = kept(Hyperparameters(epochs=1), source)
    assert "is damaged" in caplog.text and len(calls) == 2
    assert again.model_state.read_bytes() == b"weights of 1 epochs"
    assert kept(Hyperparameters(epochs=1), source) == again and len(calls) == 2
    # Nothing else is left in the folder.
    assert [path.name for path in entries(cache)] == ["0-model-2.pt", "outputs.json"]


def test_of_two_writers_the_first_one_wins(calls: list[Any], cache: Path) -> None:
    inner: list[Any] = []

    @task(cache=True, cache_version="1")
    def number() -> float:
        calls.append(1)
        mine = len(calls) / 2
        if mine == 0.5:
            # Another process writes its result while this one computes.
            inner.append(number())
        return mine

    assert number() == inner[0] == 1.0 and number() == 1.0
    assert len(calls) == 2 and len(entries(cache)) == 1


def test_a_write_that_fails_leaves_nothing(cache: Path) -> None:
    @task(cache=True, cache_version="1")
    def lost() -> Path:
        return Path("no such file")

    with pytest.raises(FileNotFoundError, match="no such file"):
        lost()
    assert entries(cache) == []


def test_the_cache_lies_where_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("EBBFLOW_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert folder() == Path("/caches/ebbflow/flow")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert folder() == Path("/home/me/.cache/ebbflow/flow")


SCRIPT = """
from ebbflow.flow import task

@task(cache=True, cache_version="1")
def double(number: int) -> int:
    print("computed")
    return 2 * number

if __name__ == "__main__":
    print(double(21))
"""


def test_a_script_finds_its_results_when_it_is_started_again(tmp_path: Path) -> None:
    path = tmp_path / "doubling.py"
    path.write_text(SCRIPT)

    def start(*arguments: str) -> list[str]:
        ended = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return ended.stdout.split()

    assert start("doubling.py") == ["computed", "42"]
    assert start(str(path)) == ["42"]
    assert start("-c", "import doubling; print(doubling.double(21))") == ["42"]


def on_a_machine(monkeypatch: pytest.MonkeyPatch, **there: int) -> None:
    for name, value in there.items():

        def of(value: int = value) -> int:
            return value

        monkeypatch.setitem(machine._THERE, name, of)


# S4-17, S4-21
def test_a_task_starts_only_where_its_resources_are(
    monkeypatch: pytest.MonkeyPatch, calls: list[Any]
) -> None:
    on_a_machine(monkeypatch, cpu=2, mem=8 << 30, gpu=0, storage=10**9, ephemeral_storage=10**9)

    def started(**wanted: Any) -> None:
        @task(requests=Resources(**wanted))
        def work() -> None:
            calls.append(wanted)

        work()

    small = {"gpu": "0", "mem": "100Mi", "storage": "500Mi", "ephemeral_storage": "500Mi"}
    for wanted in ({}, small, {"cpu": 2, "mem": "8Gi", "storage": "1G"}, {"cpu": "1500m"}):
        started(**wanted)
    assert len(calls) == 4
    with pytest.raises(errors.ResourcesError, match=r"mem = 30Gi \(there is 8589934592\), gpu = 2"):
        started(gpu=2, mem="30Gi", storage="500Mi")
    assert len(calls) == 4


# S4-17
@pytest.mark.parametrize("value", ["30GB", "-1", "lots", "1.5.2"])
def test_what_is_no_quantity_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=f"mem = '{value}': expected a quantity"):
        Resources(mem=value)


def test_the_machine_is_asked_for_what_is_requested() -> None:
    here: dict[str, Callable[[], int]] = machine._THERE
    assert set(here) == {field.name for field in dataclasses.fields(Resources)}
    for name in ("cpu", "mem", "storage", "ephemeral_storage"):
        assert here[name]() > 0
    with pytest.raises(errors.ResourcesError, match="cpu = 100000"):
        Resources(cpu=100_000).check("mine")


@pytest.mark.parametrize("name", ["limits", "container_image", "task_config", "timeout", "colour"])
def test_arguments_that_mean_nothing_here_are_refused_by_name(name: str) -> None:
    with pytest.raises(errors.UnsupportedError, match=f"`{name}` is not kept: .*(remove|requests)"):
        task(**{name: 1})  # type: ignore[call-overload]
