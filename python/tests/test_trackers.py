"""`ebbflow.trackers`: each with its real library, where that is installed."""

from __future__ import annotations

import base64
import csv
import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import ebbflow
import pytest
from ebbflow import trackers
from ebbflow.callbacks import Callback, follow
from ebbflow.status import Event
from ebbflow.worst import Worst

from .conftest import DIGITS, hide_tensorflow, needs

# TensorBoard imports it for 5 s, and reads and writes files without it.
hide_tensorflow()

RUN = "mine-18bcfe56800"


@pytest.fixture(autouse=True)
def libraries_are_patient_and_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be sent about the use of a library, and W&B's process start on busy cores."""
    monkeypatch.setenv("DO_NOT_TRACK", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "250")
    monkeypatch.setenv("WANDB_X_SERVICE_WAIT", "250")


def events() -> list[Event]:
    """Return the events of a job with two steps, an evaluation, and a lot beside."""
    train: dict[str, Any] = {
        "samples": 8,
        "samples_per_second": 9.5,
        "workers": 2,
        "learning_rate": 0.1,
    }
    kinds: list[dict[str, Any]] = [
        {"event": "state", "state": "running", "reason": ""},
        {"event": "train", "step": 0, "epoch": 0, "loss": 0.75, **train},
        {"event": "train", "step": 1, "epoch": 0, "loss": 0.5, **train},
        {"event": "fleet", "generation": 3, "workers": 1, "reason": "worker `b` left"},
        {"event": "eval", "epoch": 0, "step": 2, "loss": 0.25, "accuracy": 1.0},
        {"event": "eval", "epoch": 0, "step": 2, "set": "other", "loss": None},
    ]
    unix_ms = 1_700_000_000_000
    return [
        Event({**kind, "sequence": at, "unix_ms": unix_ms + at - 1})
        for at, kind in enumerate(kinds, start=1)
    ]


def rewound() -> list[Event]:
    """Return the events of a job that goes back to version 2, and trains two steps again.

    The evaluation of version 2 is told among the steps behind it.
    """
    train: dict[str, Any] = {"samples": 8, "samples_per_second": 9.5, "workers": 2}
    train["learning_rate"] = 0.1
    kinds: list[dict[str, Any]] = [
        *({"event": "train", "step": step, "epoch": 0, "loss": 0.75} | train for step in range(3)),
        {"event": "eval", "epoch": 0, "step": 2, "loss": 0.5},
        {"event": "train", "step": 3, "epoch": 1, "loss": 0.25, **train},
        {"event": "eval", "epoch": 1, "step": 4, "loss": 0.125},
        {"event": "rewind", "version": 2, "era": 1},
        *({"event": "train", "step": step, "epoch": 1, "loss": 0.25} | train for step in (2, 3)),
        {"event": "eval", "epoch": 1, "step": 4, "loss": 0.125},
    ]
    return [
        Event({**kind, "sequence": at, "unix_ms": 1_700_000_000_000 + at})
        for at, kind in enumerate(kinds, start=1)
    ]


# The smallest file of PNG: one black pixel.
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mNgAAAAAgAB5Sfe/AAAAABJRU5ErkJggg=="
)


def worst() -> Worst:
    """Return the worst records of two validation sets, of which one has an image."""
    first = '{"record":7,"file":"a.csv","row":3,"loss":2.5,"label":1,"outputs":[0.5,null]}'
    second = '{"record":9,"file":"a.csv","row":5,"loss":null}'
    other = '{"set":"other","record":1,"file":"b.csv","row":1,"loss":0.5,"text":"a, b"}'
    return Worst([(first, PNG), (second, None), (other, None)], b"")


def record(tracker: trackers.Tracker, heard: list[Event], status: str | None = "succeeded") -> None:
    """Call a tracker. Without a status its process dies before the end."""
    tracker.on_begin("mine")
    for event in heard:
        tracker.on_event(event)
    if status is not None:
        tracker.on_worst(worst(), 2)
        tracker.on_end({"status": status})


def test_scalars_have_the_names_of_their_sets_and_the_updates_so_far() -> None:
    found = [trackers.scalars(event) for event in events()]
    assert found[0] is None and found[3] is None
    assert found[1] is not None and found[1][0] == 1 and found[1][1]["train/loss"] == 0.75
    assert found[4] == (
        2,
        {"validation/loss": 0.25, "validation/accuracy": 1.0, "validation/epoch": 0.0},
    )
    assert found[5] is not None and math.isnan(found[5][1]["other/loss"])


def test_a_value_for_each_class_is_no_scalar() -> None:
    measured = {"event": "eval", "epoch": 0, "step": 2, "precision": [0.5, 1.0], "loss": 0.25}
    found = trackers.scalars(Event({**measured, "sequence": 1, "unix_ms": 0}))
    assert found == (2, {"validation/loss": 0.25, "validation/epoch": 0.0})


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_a_line_for_each_metric(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "mine.csv"
    record(trackers.Csv(path), events())
    found = rows(path)
    assert [row["value"] for row in found if row["metric"] == "train/loss"] == ["0.75", "0.5"]
    assert found[-2] == {
        "sequence": "5",
        "unix_ms": "1700000000004",
        "epoch": "0",
        "step": "2",
        "metric": "validation/accuracy",
        "value": "1.0",
    }
    assert len(found) == 2 * 5 + 2 + 1
    assert (path.parent / "mine.worst.csv").read_text().splitlines() == [
        "set,record,file,row,loss,label,outputs,places,text",
        'validation,7,a.csv,3,2.5,1,"[0.5, null]",,',
        "validation,9,a.csv,5,,,,,",
        'other,1,b.csv,1,0.5,,,,"a, b"',
    ]


def test_csv_of_a_process_that_takes_over_is_whole(tmp_path: Path) -> None:
    whole, path = tmp_path / "whole.csv", tmp_path / "mine.csv"
    record(trackers.Csv(whole), events())
    before = trackers.Csv(path)
    record(before, events()[:3], status=None)
    record(trackers.Csv(path), events())
    # A process that comes back late changes nothing any more.
    before.on_event(events()[4])
    assert path.read_text() == whole.read_text()


def test_csv_has_each_step_once_after_a_rewind(tmp_path: Path) -> None:
    path, heard = tmp_path / "mine.csv", rewound()
    before, tracker = trackers.Csv(path), trackers.Csv(path)
    record(before, heard[:6], status=None)
    record(tracker, heard)
    # A process that comes back late does not touch the file of the other one.
    for event in heard[6:]:
        before.on_event(event)
    steps = [(int(row["sequence"]), int(row["step"])) for row in rows(path)]
    kept = {1: 1, 2: 2, 4: 2, 8: 3, 9: 4, 10: 4}
    assert dict.fromkeys(steps) == dict.fromkeys(kept.items())
    # As of a job to which nothing happened.
    whole = tmp_path / "whole.csv"
    record(trackers.Csv(whole), [event for event in heard if event.sequence in kept])
    assert path.read_text() == whole.read_text()


@pytest.mark.parametrize(
    ("tracker", "extra"),
    [
        (lambda folder: trackers.TensorBoard(folder), "tensorboard"),
        (lambda _: trackers.WandB("project"), "wandb"),
        (lambda _: trackers.MLflow("experiment"), "mlflow"),
    ],
)
def test_a_library_that_is_missing_is_named_before_the_training(
    tracker: Any, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named '{name}'")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'ebbflow\[{extra}\]'"):
        tracker(tmp_path)


def test_tensorboard_shows_each_number_once(tmp_path: Path) -> None:
    reader = needs("tensorboard.backend.event_processing.event_accumulator", "torch")
    record(trackers.TensorBoard(tmp_path), events()[:3], status=None)
    record(trackers.TensorBoard(tmp_path), events())
    found = reader.EventAccumulator(str(tmp_path))
    found.Reload()
    losses = [(scalar.step, scalar.value) for scalar in found.Scalars("train/loss")]
    assert losses == [(1, 0.75), (2, 0.5)]
    (accuracy,) = found.Scalars("validation/accuracy")
    assert (accuracy.step, accuracy.value, accuracy.wall_time) == (2, 1.0, 1_700_000_000.004)


def test_tensorboard_hides_the_points_behind_a_rewind(tmp_path: Path) -> None:
    reader = needs("tensorboard.backend.event_processing.event_accumulator", "torch")
    tracker = trackers.TensorBoard(tmp_path)
    heard = rewound()
    record(tracker, heard[:7], status=None)
    for event in heard[7:]:
        tracker.on_event(event)
    tracker.on_end({"status": "succeeded"})
    found = reader.EventAccumulator(str(tmp_path))
    found.Reload()
    points = [(point.step, point.value, point.wall_time) for point in found.Scalars("train/loss")]
    times = [heard[at].unix_ms / 1e3 for at in (0, 1, 7, 8)]
    assert points == list(zip([1, 2, 3, 4], [0.75, 0.75, 0.25, 0.25], times, strict=True))
    evaluations = found.Scalars("validation/loss")
    assert [(point.step, point.value) for point in evaluations] == [(2, 0.5), (4, 0.125)]


class Hears(Callback):
    """Keeps the worst records."""

    def on_worst(self, worst: Worst, updates: int) -> None:
        self.worst, self.updates = list(worst), updates


def test_the_worst_records_of_a_job_are_those_of_its_results(
    client: ebbflow.Client, tmp_path: Path
) -> None:
    job = client.submit(DIGITS, changes={"epochs": 1, "evaluation.worst": 3})
    heard = Hears()
    status = follow(job, [heard])
    job.fetch(tmp_path / "out")
    assert heard.updates == status.steps_done
    images = [record.pop("image") for record in heard.worst]
    assert [image[:4] for image in images] == [b"\x89PNG"] * 3
    lines = (tmp_path / "out/worst.jsonl").read_text().splitlines()
    assert heard.worst == [json.loads(line) for line in lines]
    assert not client.worst(
        client.submit(DIGITS, changes={"epochs": 1}).wait(progress=False).status.job
    )

    reader = needs("tensorboard.backend.event_processing.event_accumulator", "torch")
    follow(job, [trackers.TensorBoard(tmp_path / "board")])
    boards = [
        reader.EventAccumulator(str(folder)).Reload()
        for folder in (tmp_path / "board", tmp_path / "out/tensorboard")
    ]
    for tag in ("validation/worst", "validation/worst/images"):
        (own,), (other,) = (board.Tensors(tag) for board in boards)
        assert (own.step, own.tensor_proto) == (other.step, other.tensor_proto)


def wandb_lines(folder: Path) -> list[dict[str, Any]]:
    """Return what the program of W&B reads of the offline run in a folder."""
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [json.loads(line) for line in said.splitlines()]


def test_wandb_keeps_an_offline_run_that_its_own_program_reads(tmp_path: Path) -> None:
    needs("wandb")
    tracker = trackers.WandB("project", mode="offline", dir=str(tmp_path))
    record(tracker, events())
    (file,) = tmp_path.glob(f"wandb/offline-run-*-{RUN}/*.wandb")
    found = wandb_lines(tmp_path)
    (run,) = [line["run"] for line in found if line["type"] == "run"]
    assert (run["project"], run["run_id"], run["display_name"]) == ("project", RUN, RUN)
    # The step of W&B is the number of the event.
    history = [line["history"] for line in found if line["type"] == "history"]
    assert [row["step"]["num"] for row in history] == [2, 3, 5, 6]
    items = [row["item"] for row in history]
    assert [(row["step"], row.get("train/loss")) for row in items[:2]] == [(1, 0.75), (2, 0.5)]
    assert (items[2]["step"], items[2]["validation/loss"]) == (2, 0.25)
    assert items[2]["validation/accuracy"] == 1.0 and "train/loss" not in items[2]
    tables = {name: items[3][f"{name}/worst._type"] for name in ("validation", "other")}
    assert set(tables.values()) == {"table-file"}
    # What the run itself has of a table names the kind of an image. The artifact has the image.
    (table,) = file.parent.glob("files/media/table/validation/worst_*.table.json")
    assert json.loads(table.read_text()) == {
        "columns": ["record", "file", "row", "loss", "label", "outputs", "image"],
        "data": [
            [7, "a.csv", 3, 2.5, 1, "[0.5, null]", "Image"],
            [9, "a.csv", 5, None, None, None, None],
        ],
    }
    assert [line["exit"]["exit_code"] for line in found if line["type"] == "exit"] == [0]


def test_wandb_has_a_row_for_a_rewind(tmp_path: Path) -> None:
    needs("wandb")
    tracker = trackers.WandB("project", mode="offline", dir=str(tmp_path))
    record(tracker, rewound(), status=None)
    tracker.on_end({"status": "succeeded"})
    lines = [line for line in wandb_lines(tmp_path) if line["type"] == "history"]
    history = [line["history"]["item"] for line in lines]
    assert [row["step"] for row in history] == [1, 2, 3, 2, 4, 4, 2, 3, 4, 4]
    assert [row.get("rewind/version") for row in history] == [*[None] * 6, 2, *[None] * 3]
    # The rule of the documentation: a row behind the rewind replaces those before it.
    found: dict[int, dict[str, Any]] = {}
    for row in history:
        if "rewind/version" in row:
            found = {step: was for step, was in found.items() if step <= row["rewind/version"]}
        else:
            found[row["step"]] = found.get(row["step"], {}) | row
    losses = {step: row.get("train/loss") for step, row in found.items()}
    assert losses == {1: 0.75, 2: 0.75, 3: 0.25, 4: 0.25}


def test_wandb_says_that_a_job_failed(tmp_path: Path) -> None:
    needs("wandb")
    record(trackers.WandB("project", mode="offline", dir=str(tmp_path)), events(), "failed")
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", "--json", str(file)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(said)["exit_code"] == 1


def test_mlflow_has_each_number_and_each_table_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = needs("mlflow", "sqlalchemy", "alembic")
    # Artifacts are in the current folder.
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/runs.db"
    record(trackers.MLflow("experiment", uri), events()[:3], status=None)
    record(trackers.MLflow("experiment", uri), events())
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("experiment")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == RUN and run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(point.step, point.value) for point in history] == [(1, 0.75), (2, 0.5)]
    assert run.data.metrics["validation/accuracy"] == 1.0
    tables = json.loads(run.data.tags["mlflow.loggedArtifacts"])
    files = [table["path"] for table in tables]
    assert files == ["validation/worst.json", "other/worst.json"]
    (place,) = tmp_path.glob("mlruns/*/*/artifacts")
    table = json.loads((place / files[0]).read_text())
    first, second = (dict(zip(table["columns"], row, strict=True)) for row in table["data"])
    assert (first["record"], first["outputs"], second["image"]) == (7, "[0.5, null]", None)
    assert (place / first["image"]["filepath"]).read_bytes() == PNG
    record(trackers.MLflow("experiment", uri), events(), status="failed")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FAILED"


def test_mlflow_has_a_point_for_a_rewind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = needs("mlflow", "sqlalchemy", "alembic")
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/runs.db"
    heard = rewound()
    # Another process takes the run over behind the rewind.
    record(trackers.MLflow("experiment", uri), heard[:8], status=None)
    record(trackers.MLflow("experiment", uri), heard)
    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("experiment")
    (run,) = client.search_runs([experiment.experiment_id])
    (rewind,) = client.get_metric_history(run.info.run_id, "rewind/version")
    assert (rewind.value, rewind.step, rewind.timestamp) == (2.0, 2, heard[6].unix_ms)
    # The rule of the documentation: later points of larger steps replace earlier ones.
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted(point.step for point in history) == [1, 2, 3, 3, 4, 4]
    valid = [
        point
        for point in history
        if point.step <= rewind.step or point.timestamp > rewind.timestamp
    ]
    losses = sorted((point.step, point.value) for point in valid)
    assert losses == [(1, 0.75), (2, 0.75), (3, 0.25), (4, 0.25)]


class Keeps(Callback):
    """Keeps the events."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)


def test_each_tracker_records_the_events_of_a_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = needs("torch", "wandb", "sqlalchemy", "alembic")
    reader = needs("tensorboard.backend.event_processing.event_accumulator")
    mlflow = needs("mlflow")
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/runs.db"
    heard = Keeps()
    callbacks = [
        trackers.WandB("project", mode="offline", dir=str(tmp_path)),
        trackers.TensorBoard(tmp_path / "board"),
        trackers.MLflow("experiment", uri),
        trackers.Csv(tmp_path / "metrics.csv"),
        heard,
    ]
    torch.manual_seed(7)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(3))
    data = torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
    loss = torch.nn.functional.cross_entropy

    def measure(batch: Any) -> dict[str, Any]:
        outputs = model(batch.x)
        right = (outputs.argmax(1) == batch.y).float().mean()
        return {"loss": loss(outputs, batch.y), "accuracy": right}

    with ebbflow.join(
        model, optimizer, data, data, micro=5, effective=10, epochs=2, callbacks=callbacks
    ) as job:
        for epoch in job.epochs():
            for batch in epoch:
                job.step(loss(model(batch.x), batch.y))
            job.evaluate(measure)

    expected = [
        (event, *found) for event in heard.events if (found := trackers.scalars(event)) is not None
    ]
    assert [event.kind for event, *_ in expected].count("train") == 8
    assert [event.kind for event, *_ in expected].count("eval") == 2
    # Points of each metric: step, value, time.
    points: dict[str, list[tuple[int, float, int]]] = {}
    for event, updates, values in expected:
        for name, value in values.items():
            points.setdefault(name, []).append((updates, value, event.unix_ms))
    assert {"train/loss", "train/learning_rate", "validation/loss", "validation/accuracy"} <= set(
        points
    )

    found_rows = [
        (int(row["sequence"]), int(row["step"]), row["metric"], float(row["value"]))
        for row in rows(tmp_path / "metrics.csv")
    ]
    assert found_rows == [
        (event.sequence, updates, name, value)
        for event, updates, values in expected
        for name, value in values.items()
        if not name.endswith("/epoch")
    ]

    board = reader.EventAccumulator(str(tmp_path / "board")).Reload()
    assert set(board.Tags()["scalars"]) == set(points)
    for name, of_metric in points.items():
        shown = [(point.step, point.value, point.wall_time) for point in board.Scalars(name)]
        assert shown == [
            (step, pytest.approx(value, rel=1e-6), unix_ms / 1e3)
            for step, value, unix_ms in of_metric
        ]

    client = mlflow.MlflowClient(uri)
    experiment = client.get_experiment_by_name("experiment")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and set(run.data.metrics) == set(points)
    for name, of_metric in points.items():
        history = client.get_metric_history(run.info.run_id, name)
        shown = [(point.step, point.value, point.timestamp) for point in history]
        assert sorted(shown) == sorted(of_metric)

    lines = [line["history"] for line in wandb_lines(tmp_path) if line["type"] == "history"]
    assert [line["step"]["num"] for line in lines] == [event.sequence for event, *_ in expected]
    for line, (_, updates, values) in zip(lines, expected, strict=True):
        item = {name: value for name, value in line["item"].items() if name[0] != "_"}
        assert item == {**values, "step": updates}
