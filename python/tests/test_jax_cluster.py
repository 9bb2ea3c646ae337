"""The example of JAX in several processes of one cluster."""

from __future__ import annotations

from pathlib import Path

from .conftest import Place, Script, needs_there

needs_there("jax", "optax")

TRAIN = Path(__file__).parents[2] / "examples/python/jax/train.py"


def test_alone_and_in_two_processes_after_one_was_killed_the_bits_are_the_same(
    place: Place,
) -> None:
    alone = Script(None, TRAIN, "--epochs", "2", fresh=True).result()
    two = place.one_killed_and_two_that_stay("jax", TRAIN, "--epochs", "2")
    assert [process["sha"] for process in two] == [alone["sha"]] * 2
    assert [process["history"] for process in two] == [alone["history"]] * 2
    assert [process["numerics"] for process in two] == [alone["numerics"]] * 2
    assert sorted(process["elected"] for process in two) == [False, True]


def test_the_example_reaches_its_number() -> None:
    assert Script(None, TRAIN).result()["metrics"]["accuracy"] >= 0.95
