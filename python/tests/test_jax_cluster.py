"""The example of JAX in several processes of one cluster."""

from __future__ import annotations

from pathlib import Path

from .conftest import Place, Script, needs_there

needs_there("jax", "optax")

TRAIN = Path(__file__).parents[2] / "examples/python/jax/train.py"


def test_alone_and_in_two_processes_with_one_killed_the_bits_are_the_same(place: Place) -> None:
    alone = Script(None, TRAIN, "--epochs", "2").result()
    killed = place.script(TRAIN, "--epochs", "2", gate="30")
    killed.arrive()
    stays = place.script(TRAIN, "--epochs", "2", gate="join")
    stays.arrive()
    place.wait_for_workers("jax", 2)
    killed.kill()
    place.wait_for_workers("jax", 1)
    stays.go()
    found = stays.result()
    assert found["sha"] == alone["sha"] and found["history"] == alone["history"]
    assert found["elected"]


def test_the_example_reaches_its_number() -> None:
    assert Script(None, TRAIN).result()["metrics"]["accuracy"] >= 0.95
