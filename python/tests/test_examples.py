"""The examples of PyTorch: few lines are changed, and bits do not depend on the processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Place, Script

pytest.importorskip("torch")

MNIST = Path(__file__).parents[2] / "examples/python/mnist"

TRAIN = MNIST / "train.py"

FABRIC = MNIST.parent / "fabric/train.py"

#: A short training.
ARGUMENTS = ("--epochs", "3")


def test_few_lines_of_the_script_are_changed_and_all_are_marked() -> None:
    plain = [line.strip() for line in (MNIST / "plain.py").read_text().splitlines()]
    lines = [line.strip() for line in TRAIN.read_text().splitlines()]
    changed = [line for line in lines if line.endswith("  # changed")]
    assert 0 < len(changed) <= 8
    # Every other line is the plain script's, in its order.
    rest = iter(plain)
    for line in lines:
        assert line in changed or line in rest, f"not marked as changed: {line}"
    # The model and the loaders are among them, word for word.
    text, before = TRAIN.read_text(), (MNIST / "plain.py").read_text()
    first, last = before.index("class Net"), before.index("    model = Net()")
    assert before[first:last] in text


def test_alone_and_in_several_processes_the_bits_are_the_same(place: Place) -> None:
    alone = Script(None, TRAIN, *ARGUMENTS).result()
    assert alone["metrics"]["accuracy"] > 0.8
    scripts = [place.script(TRAIN, *ARGUMENTS, gate="join") for _ in range(3)]
    for script in scripts:
        script.arrive()
    place.wait_for_workers("script", 3)
    for script in scripts:
        script.go()
    found = [script.result() for script in scripts]
    assert {process["sha"] for process in found} == {alone["sha"]}
    assert all(process["metrics"] == alone["metrics"] for process in found)
    assert all(process["history"] == alone["history"] for process in found)
    assert [process["elected"] for process in found].count(True) == 1


def test_with_a_process_killed_and_one_added_the_bits_are_the_same(place: Place) -> None:
    alone = Script(None, TRAIN, *ARGUMENTS).result()
    killed = place.script(TRAIN, *ARGUMENTS, gate="30")
    # In the second epoch, with a batch in its hands.
    killed.arrive()
    stays = place.script(TRAIN, *ARGUMENTS, gate="join")
    stays.arrive()
    place.wait_for_workers("script", 2)
    killed.kill()
    place.wait_for_workers("script", 1)
    added = place.script(TRAIN, *ARGUMENTS, gate="join")
    added.arrive()
    place.wait_for_workers("script", 2)
    for script in (stays, added):
        script.go()
    found = [script.result() for script in (stays, added)]
    assert {process["sha"] for process in found} == {alone["sha"]}
    assert all(process["history"] == alone["history"] for process in found)
    assert [process["elected"] for process in found].count(True) == 1


def test_s0_14_a_script_of_fabric_models_has_one_line_changed_and_trains(place: Place) -> None:
    lines = [line for line in FABRIC.read_text().splitlines() if "ebbflow" in line]
    assert len(lines) == 1 and lines[0].endswith("# was: from fabric_model import FabricModel")
    alone = Script(None, FABRIC).result()
    assert alone["metrics"]["accuracy"] > 0.9
    scripts = [place.script(FABRIC, gate="join") for _ in range(2)]
    for script in scripts:
        script.arrive()
    place.wait_for_workers("train", 2)
    for script in scripts:
        script.go()
    assert {script.result()["sha"] for script in scripts} == {alone["sha"]}
