"""The examples of PyTorch: few lines are changed, and bits do not depend on the processes.

The example of a task: it trains once. The example of an estimator: it leaves a model.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

from .conftest import Place, Script, needs, needs_there

needs_there("torch")

MNIST = Path(__file__).parents[2] / "examples/python/mnist"

TRAIN = MNIST / "train.py"

FLOW = Path(__file__).parents[2] / "examples/python/flow/train.py"

FABRIC = MNIST.parent / "fabric/train.py"

TEXT = MNIST.parent / "text"

IMAGENET = MNIST.parent / "imagenet/train.py"

ESTIMATOR = MNIST.parent / "estimator/fit.py"

#: Says whether the script takes itself for a sandbox: without its variable, and with values of it.
SANDBOXES = """
import os, runpy, sys

found = []
for value in (None, "", "0", "1"):
    if value is not None:
        os.environ["SANDBOX"] = value
    found.append(runpy.run_path(sys.argv[1])["SANDBOX"])
print(found)
"""

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
    # What falls away, or is changed, is no more than that.
    gone = [line for line in plain if line not in lines]
    assert {"optimizer.zero_grad()", "loss.backward()", "scheduler.step()"} <= set(gone)
    assert len(gone) <= 8
    # The model and the loaders are among them, word for word.
    text, before = TRAIN.read_text(), (MNIST / "plain.py").read_text()
    for first, last in (("class Net", "def train("), ("def test(", "    for epoch in ")):
        assert before[before.index(first) : before.index(last)] in text


# S4-07
def test_the_script_reaches_what_it_reached_before_it_was_changed() -> None:
    # Two threads of torch on busy cores wait for each other most of the time.
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, MNIST / "plain.py"],
        capture_output=True,
        text=True,
        check=True,
        env=one_thread,
    )
    before = ast.literal_eval(ended.stdout.splitlines()[-1])["accuracy"]
    after = Script(None, TRAIN).result()["metrics"]["accuracy"]
    assert before >= 0.9 and after >= 0.9


# S1-01, S1-02, S4-04, S4-09, S4-13
def test_alone_and_with_a_process_killed_and_one_added_the_bits_are_the_same(place: Place) -> None:
    alone = Script(None, TRAIN, *ARGUMENTS, fresh=True).result()
    assert alone["metrics"]["accuracy"] > 0.8
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
    assert all(process["metrics"] == alone["metrics"] for process in found)
    assert all(process["history"] == alone["history"] for process in found)
    assert [process["elected"] for process in found].count(True) == 1


# S4-01, S4-14, S4-18, S4-20, S4-25
def test_a_task_trains_once_and_an_unset_variable_is_no_sandbox(
    tmp_path: Path,
) -> None:
    def start(*arguments: str) -> str:
        kept = {name: value for name, value in os.environ.items() if name != "SANDBOX"}
        ended = subprocess.run(
            [sys.executable, *arguments],
            env={**kept, "EBBFLOW_CACHE": str(tmp_path)},
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
    assert start("-c", SANDBOXES, str(FLOW)) == "[False, False, False, True]\n"


# S4-24
def test_a_task_in_two_processes_trains_one_job_and_keeps_one_result(
    place: Place, tmp_path: Path
) -> None:
    def begun(master: str | None, cache: str, gate: str) -> Script:
        keys = {"EBBFLOW_CACHE": str(tmp_path / cache)}
        place.scripts.append(Script(master, FLOW, *ARGUMENTS, gate=gate, keys=keys))
        return place.scripts[-1]

    def ended(script: Script) -> tuple[str, dict[str, Any]]:
        out, said = script.child.communicate()
        assert script.child.returncode == 0, said
        line, found = out.splitlines()[-2:]
        return line, json.loads(found)

    alone = begun(None, "alone", "none").result()
    two = [begun(place.cluster.url, "both", "join") for _ in range(2)]
    for script in two:
        script.arrive()
    place.wait_for_workers("flow", 2)
    for script in two:
        script.go()
    (first, found), (second, other) = (ended(script) for script in two)
    assert found["sha"] == other["sha"] == alone["sha"]
    # The same accuracies, and the path of the same kept model.
    assert first == second and f"model: {tmp_path / 'both'}" in first
    assert len(list((tmp_path / "both").rglob("outputs.json"))) == 1


# S0-14
def test_a_script_of_fabric_models_has_one_line_changed_and_trains() -> None:
    plain, lines = (
        (FABRIC.parent / name).read_text().splitlines() for name in ("plain.py", FABRIC.name)
    )
    changed = [pair for pair in zip(plain, lines, strict=True) if len(set(pair)) > 1]
    assert changed == [
        ("from fabric_model import FabricModel", "from ebbflow.fabric import FabricModel")
    ]
    # `test_fabric_cluster.py` has several processes.
    assert Script(None, FABRIC).result()["metrics"]["accuracy"] > 0.9


def test_reviews_are_learnt_from_files_that_their_program_writes(tmp_path: Path) -> None:
    program = tmp_path / "make_data.py"
    program.write_text((TEXT / "make_data.py").read_text())
    subprocess.run([sys.executable, program], check=True)
    for name in ("train.tsv", "test.tsv"):
        assert (tmp_path / name).read_bytes() == (TEXT / name).read_bytes()
    assert Script(None, TEXT / "train.py").result()["metrics"]["accuracy"] >= 0.97


# S1-17, S2-40
def test_images_are_learnt_from_folders_by_a_loader_with_processes(tmp_path: Path) -> None:
    needs("PIL")
    program = MNIST.parents[1] / "imagenet/make_data.py"
    images = ["--train", "60", "--validation", "20", "--side", "40"]
    subprocess.run([sys.executable, program, "--out", tmp_path, *images], check=True)
    assert Script(None, IMAGENET, str(tmp_path)).result()["metrics"]["accuracy"] >= 0.8


# S2-02, S2-09, S2-26
def test_an_estimator_finds_the_accuracy_and_leaves_a_model(tmp_path: Path) -> None:
    ended = subprocess.run(
        # `test_estimator_cluster.py` has several instances.
        [sys.executable, ESTIMATOR, "--place", tmp_path, "--instances", "1", *ARGUMENTS],
        env={**os.environ, "EBBFLOW_WORKERS_MAX": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.count("; val accuracy: ") >= 3
    said = dict(line.split(": ", 1) for line in ended.stdout.splitlines()[-2:])
    assert float(said["accuracy"]) > 0.8
    with tarfile.open(said["model"]) as tar:
        assert tar.getnames() == ["model.pth"]
