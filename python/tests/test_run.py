"""A whole job in this process."""

from __future__ import annotations

import hashlib
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import ebbflow
import numpy as np
import pytest
from ebbflow import errors

from .conftest import DIGITS, needs

SHORT = {"epochs": 2}


def digits() -> dict[str, Any]:
    """Return the example's job as a dictionary, with absolute paths."""
    folder = DIGITS.parent
    return {
        "name": "digits",
        **SHORT,
        "seed": 13,
        "model": {
            "builtin": "mlp",
            "options": {"hidden": [128]},
            "loss": "cross_entropy",
            "metrics": ["accuracy"],
        },
        "data": {
            "format": "idx",
            "train": {
                "features": [folder / "images.idx3.gz"],
                "labels": [str(folder / "labels.idx1.gz")],
            },
            "validation_fraction": 0.2,
            "normalize": {"scale": 16, "mean": 0.305, "std": 0.376},
        },
        "batch": {"micro": np.int64(16), "effective": 64},
        "optimizer": {"kind": "adam", "learning_rate": 0.02, "schedule": {"kind": "cosine"}},
    }


def test_a_job_leaves_metrics_and_weights_in_memory() -> None:
    result = ebbflow.run(DIGITS, changes=SHORT, progress=False)
    assert result.status.state == "succeeded"
    assert result.out is None
    assert hashlib.sha256(result.weights()).hexdigest() == result.model_sha256

    train = result.metrics.arrays("train")
    assert train["step"].tolist() == list(range(result.status.steps))
    assert train["loss"].dtype == np.float64
    assert len(result.metrics.rows("eval")) == 2
    assert result.final == {
        name: value
        for name, value in result.metrics.rows("eval")[-1].items()
        if name in ("accuracy", "loss")
    }

    weights = result.state_dict()
    assert {name: array.shape for name, array in weights.items()} == {
        "0.weight": (128, 64),
        "0.bias": (128,),
        "2.weight": (10, 128),
        "2.bias": (10,),
    }
    assert all(array.dtype == np.float32 and array.flags.writeable for array in weights.values())


def test_the_metrics_of_a_job_are_drawn() -> None:
    matplotlib = needs("matplotlib")
    matplotlib.use("agg")
    result = ebbflow.run(DIGITS, changes=SHORT, progress=False)
    losses, others = result.plot().axes
    drawn = {line.get_label(): line for axis in (losses, others) for line in axis.lines}
    assert list(drawn) == ["training", "validation", "accuracy"]
    train, evaluation = result.metrics.arrays("train"), result.metrics.arrays("eval")
    assert len(train["step"]) == result.status["steps_done"] and len(evaluation["step"]) == 2
    for label, table, name in [
        ("training", train, "loss"),
        ("validation", evaluation, "loss"),
        ("accuracy", evaluation, "accuracy"),
    ]:
        x, y = drawn[label].get_data()
        assert x.tolist() == table["step"].tolist() and y.tolist() == table[name].tolist()
    assert losses.get_title() == result.status.job


def test_a_dictionary_a_file_and_any_fleet_train_the_same_bits() -> None:
    results = [
        ebbflow.run(DIGITS, changes=SHORT, progress=False),
        ebbflow.run(digits(), progress=False),
        ebbflow.run(digits(), workers=3, ps=1, progress=False),
    ]
    assert len({result.model_sha256 for result in results}) == 1


def test_a_folder_has_the_files_of_the_program_and_is_read_again(tmp_path: Path) -> None:
    result = ebbflow.run(DIGITS, changes=SHORT, out=tmp_path, progress=False)
    assert {"metrics.jsonl", "model.safetensors", "summary.json"} <= {
        path.name for path in tmp_path.iterdir()
    }
    read = ebbflow.Result.read(tmp_path)
    assert read.model_sha256 == result.model_sha256
    assert read.final == result.final
    assert read.metrics.rows("eval") == [
        {name: value for name, value in row.items() if name not in ("sequence", "unix_ms")}
        for row in result.metrics.rows("eval")
    ]
    assert np.array_equal(read.state_dict()["0.bias"], result.state_dict()["0.bias"])
    assert read.weights() == result.weights()


def test_each_event_is_seen_in_order_and_an_exception_in_it_ends_the_job() -> None:
    seen: list[ebbflow.Event] = []
    ebbflow.run(DIGITS, changes=SHORT, progress=False, on_event=seen.append)
    numbers = [event.sequence for event in seen]
    assert numbers == sorted(set(numbers))
    assert {"state", "train", "eval"} <= {event.kind for event in seen}
    assert seen[-1].kind == "state"

    def stop(event: ebbflow.Event) -> None:
        if event.kind == "train":
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        ebbflow.run(DIGITS, changes={"epochs": 1_000_000}, progress=False, on_event=stop)


def test_another_job_runs_while_an_event_is_handled() -> None:
    def nested(event: ebbflow.Event) -> None:
        if event.kind == "eval":
            ebbflow.run(DIGITS, changes={"epochs": 1}, progress=False)

    assert ebbflow.run(DIGITS, changes={"epochs": 1}, progress=False, on_event=nested).metrics


def test_a_wrong_job_is_explained() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"epoch": 3}, "did you mean `epochs`"),
        ({"epochs": 0}, "epochs"),
        ({"model.builtin": "mpl"}, "no network `mpl`"),
        ({"data.train.labels": ["none.gz"]}, "1 of 2 data files cannot be read"),
        ({"seed": None}, "None .* has no counterpart in a job file"),
    ]
    for changes, message in wrong:
        with pytest.raises(errors.InvalidJobError, match=message):
            ebbflow.run(DIGITS, changes=changes, progress=False)
    with pytest.raises(errors.InvalidJobError, match=r"job file no/job\.toml: No such file"):
        ebbflow.run("no/job.toml")
    with pytest.raises(errors.InvalidJobError, match=r"no \[checkpoint\] section"):
        ebbflow.run(DIGITS, resume=True)
    with pytest.raises(errors.InvalidJobError, match="resume='again'"):
        ebbflow.run(DIGITS, resume="again")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="workers=0: expected at least 1"):
        ebbflow.run(DIGITS, workers=0)
    with pytest.raises(errors.InvalidJobError, match="device"):
        ebbflow.run(DIGITS, device="abacus")
    with pytest.raises(errors.InvalidJobError, match=r"<dict>.*unknown field `nam`"):
        ebbflow.run({"nam": "x"})


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(errors.OutputError, match="choose a folder"):
        ebbflow.run(DIGITS, out=tmp_path / "file")


def test_a_device_that_is_not_there_is_named_before_the_folder_is_made(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(errors.ClusterError, match="CUDA"):
        ebbflow.run(DIGITS, device="cuda:0", out=out)
    assert not out.exists()


def test_a_job_that_fails_raises_with_its_result_unless_it_is_not_to_be_checked(
    tmp_path: Path,
) -> None:
    job: dict[str, Any] = {
        "name": "bad",
        "epochs": 1,
        "model": {"builtin": "linear", "loss": "mse"},
        "data": {"format": "csv", "train": {"features": [tmp_path / "x.csv"]}},
        "batch": {"micro": 1},
        "optimizer": {"kind": "sgd", "learning_rate": 0.1},
    }
    (tmp_path / "x.csv").write_text("a,b\n1,no number\n3,4\n")
    with pytest.raises(errors.JobFailedError, match="no number") as raised:
        ebbflow.run(job, progress=False)
    assert raised.value.result.status.state == "failed"
    with pytest.raises(ebbflow.Error, match="without a model"):
        raised.value.result.state_dict()
    assert ebbflow.run(job, progress=False, check=False).model_sha256 is None
    # The step before the bad record was trained.
    (tmp_path / "x.csv").write_text("a,b\n1,2\n3,no number\n")
    left = ebbflow.run(job, progress=False, check=False, changes={"data.shuffle": "none"})
    assert left.status.state == "failed"
    assert set(left.state_dict()) == {"weight", "bias"}


INTERRUPTED = """
import sys, ebbflow
begun = []
def say(event):
    if event.kind == "train" and not begun:
        begun.append(event)
        print("it trains", flush=True)
try:
    ebbflow.run(sys.argv[1], changes={"epochs": 1_000_000}, progress=False, on_event=say)
except KeyboardInterrupt:
    print("interrupted", flush=True)
print(ebbflow.run(sys.argv[1], changes={"epochs": 1}, progress=False).status.state)
"""


def test_ctrl_c_is_a_keyboard_interrupt_and_the_next_job_runs() -> None:
    command = [sys.executable, "-c", INTERRUPTED, str(DIGITS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "it trains\n"
        child.send_signal(signal.SIGINT)
        assert child.stdout.read() == "interrupted\nsucceeded\n"
    assert child.returncode == 0


def test_importing_the_package_imports_no_other_one() -> None:
    code = "import sys, ebbflow; print({'numpy', 'torch', 'asyncio'} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "set()\n"
