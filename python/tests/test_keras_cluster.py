"""The example of Keras in several processes of one cluster, on each backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Place, Script, needs_there

needs_there("keras")

TRAIN = Path(__file__).parents[2] / "examples/python/keras/train.py"

BACKENDS = pytest.mark.parametrize("backend", ["torch", "tensorflow"])


@BACKENDS
def test_alone_and_in_two_processes_after_one_was_killed_the_bits_are_the_same(
    backend: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_there(backend)
    monkeypatch.setenv("KERAS_BACKEND", backend)
    alone = Script(None, TRAIN, "--epochs", "2", fresh=True).result()
    two = place.one_killed_and_two_that_stay("keras", TRAIN, "--epochs", "2")
    assert [process["sha"] for process in two] == [alone["sha"]] * 2
    assert [process["history"] for process in two] == [alone["history"]] * 2
    assert [process["numerics"] for process in two] == [alone["numerics"]] * 2
    assert sorted(process["elected"] for process in two) == [False, True]


@BACKENDS
def test_the_example_reaches_its_number(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_there(backend)
    monkeypatch.setenv("KERAS_BACKEND", backend)
    assert Script(None, TRAIN).result()["metrics"]["accuracy"] > 0.92
