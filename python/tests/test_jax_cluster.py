"""The example of JAX in several processes of one cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Place, Script

pytest.importorskip("jax")
pytest.importorskip("optax")

TRAIN = Path(__file__).parents[2] / "examples/python/jax/train.py"


def test_alone_and_in_three_processes_with_one_killed_the_bits_are_the_same(place: Place) -> None:
    alone = Script(None, TRAIN, "--epochs", "3").result()
    killed = place.script(TRAIN, "--epochs", "3", gate="30")
    killed.arrive()
    stay = [place.script(TRAIN, "--epochs", "3", gate="join") for _ in range(2)]
    for script in stay:
        script.arrive()
    place.wait_for_workers("jax", 3)
    killed.kill()
    place.wait_for_workers("jax", 2)
    for script in stay:
        script.go()
    found = [script.result() for script in stay]
    assert {process["sha"] for process in found} == {alone["sha"]}
    assert all(process["history"] == alone["history"] for process in found)
    assert [process["elected"] for process in found].count(True) == 1


def test_the_example_reaches_its_number() -> None:
    assert Script(None, TRAIN).result()["metrics"]["accuracy"] >= 0.95
