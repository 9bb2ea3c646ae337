"""The example of Keras in several processes of one cluster, on each backend."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .conftest import Place, Script

# Keras imports its backend.
os.environ.setdefault("KERAS_BACKEND", "torch")
pytest.importorskip(os.environ["KERAS_BACKEND"])
pytest.importorskip("keras")

TRAIN = Path(__file__).parents[2] / "examples/python/keras/train.py"

BACKENDS = pytest.mark.parametrize("backend", ["torch", "tensorflow"])


@BACKENDS
def test_alone_and_in_three_processes_with_one_killed_the_bits_are_the_same(
    backend: str, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(backend)
    monkeypatch.setenv("KERAS_BACKEND", backend)
    alone = Script(None, TRAIN, "--epochs", "2").result()
    killed = place.script(TRAIN, "--epochs", "2", gate="30")
    killed.arrive()
    stay = [place.script(TRAIN, "--epochs", "2", gate="join") for _ in range(2)]
    for script in stay:
        script.arrive()
    place.wait_for_workers("keras", 3)
    killed.kill()
    place.wait_for_workers("keras", 2)
    for script in stay:
        script.go()
    found = [script.result() for script in stay]
    assert {process["sha"] for process in found} == {alone["sha"]}
    assert all(process["history"] == alone["history"] for process in found)
    assert [process["elected"] for process in found].count(True) == 1


@BACKENDS
def test_the_example_reaches_its_number(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(backend)
    monkeypatch.setenv("KERAS_BACKEND", backend)
    assert Script(None, TRAIN).result()["metrics"]["accuracy"] > 0.92
