"""The example of Keras in several processes of one cluster, on each backend."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Place, Script, needs_there

needs_there("keras")

TRAIN = Path(__file__).parents[2] / "examples/python/keras/train.py"

BACKENDS = pytest.mark.parametrize("backend", ["torch", "tensorflow"])


@BACKENDS
def test_alone_and_in_two_processes_with_one_killed_the_bits_are_the_same(
    backend: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_there(backend)
    monkeypatch.setenv("KERAS_BACKEND", backend)
    alone = Script(None, TRAIN, "--epochs", "2").result()
    killed = place.script(TRAIN, "--epochs", "2", gate="30")
    killed.arrive()
    stays = place.script(TRAIN, "--epochs", "2", gate="join")
    stays.arrive()
    place.wait_for_workers("keras", 2)
    killed.kill()
    place.wait_for_workers("keras", 1)
    stays.go()
    found = stays.result()
    assert found["sha"] == alone["sha"] and found["history"] == alone["history"]
    assert found["elected"]


@BACKENDS
def test_the_example_reaches_its_number(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_there(backend)
    monkeypatch.setenv("KERAS_BACKEND", backend)
    assert Script(None, TRAIN).result()["metrics"]["accuracy"] > 0.92
