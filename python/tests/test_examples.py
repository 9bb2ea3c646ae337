"""The examples of PyTorch: few lines are changed, and bits do not depend on the processes.

The example of a task: it trains once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Place, Script

pytest.importorskip("torch")

MNIST = Path(__file__).parents[2] / "examples/python/mnist"

TRAIN = MNIST / "train.py"

FLOW = Path(__file__).parents[2] / "examples/python/flow/train.py"

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


def test_S4_14_S4_18_S4_20_a_task_trains_once_and_an_unset_variable_is_no_sandbox(
    tmp_path: Path,
) -> None:
    def start(*arguments: str, **variables: str) -> str:
        kept = {name: value for name, value in os.environ.items() if name != "SANDBOX"}
        ended = subprocess.run(
            [sys.executable, *arguments],
            env={**kept, "EBBFLOW_CACHE": str(tmp_path), **variables},
            capture_output=True,
            text=True,
            check=True,
        )
        return ended.stdout

    first = start(str(FLOW))
    accuracies = first.partition("accuracies: ")[2].strip().strip("[]").split(", ")
    assert len(accuracies) == 10 and float(accuracies[-1]) >= 0.9
    # The same line, with the same path of the kept model.
    assert start(str(FLOW)) == first
    code = "import runpy, sys; print(runpy.run_path(sys.argv[1])['SANDBOX'])"
    assert start("-c", code, str(FLOW)) == "False\n"
    for value, expected in [("", "False\n"), ("0", "False\n"), ("1", "True\n")]:
        assert start("-c", code, str(FLOW), SANDBOX=value) == expected


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
