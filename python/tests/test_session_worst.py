"""``worst`` of `ebbflow.join`: which records had the largest losses, for results and trackers."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ebbflow._listed import listed

from .conftest import Place, Script, needs, needs_there

torch = needs("torch")

import ebbflow  # noqa: E402
from ebbflow.worst import Worst  # noqa: E402

#: A network that guesses the class of images. Its arguments are the job, and a folder with its own
#: name in it.
SCRIPT = """
import json, sys
from pathlib import Path
import torch, ebbflow
from ebbflow import trackers
from ebbflow.callbacks import Callback
from torch import nn

name, folder, mine = sys.argv[1:]

class Heard(Callback):
    def on_worst(self, worst, updates):
        found = [[record["record"], record["loss"]] for record in worst]
        (Path(folder) / f"{mine}.json").write_text(json.dumps([updates, found]))

generator = torch.Generator().manual_seed(3)
images = torch.rand(60, 1, 6, 6, generator=generator)
labels = (images.sum((1, 2, 3)) > 18).long()
source = torch.utils.data.TensorDataset(images, labels)
torch.manual_seed(7)
model = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def measure(batch):
    outputs = model(batch.x)
    losses = nn.functional.cross_entropy(outputs, batch.y, reduction="none")
    return {"loss": losses.mean(), "losses": losses, "outputs": outputs, "images": batch.x}

calls = [Heard(), trackers.Csv(f"{folder}/{name}.csv"), *globals().get("more", [])]
with ebbflow.join(
    model, optimizer, source, source, epochs=2, micro=8, worst=4, callbacks=calls, name=name
) as job:
    for epoch in job.epochs():
        for batch in epoch:
            job.step(nn.functional.cross_entropy(model(batch.x), batch.y))
        job.evaluate(measure)
with torch.no_grad():
    losses = nn.functional.cross_entropy(model(images), labels, reduction="none")
worst = [{name: value for name, value in record.items() if name != "image"} for record in job.worst]
shown = [record["image"][:4] == b"\\x89PNG" for record in job.worst]
found = {"losses": losses.tolist(), "labels": labels.tolist(), "worst": worst, "shown": shown}
(Path(folder) / f"{mine}.found.json").write_text(json.dumps(found))
"""

#: The same script with a tracker of Weights & Biases.
WITH_WANDB = """
import sys, ebbflow.trackers
more = [ebbflow.trackers.WandB("project", dir=sys.argv[2])]
"""


def batch(records: list[int], y: Any = None) -> Any:
    return SimpleNamespace(records=records, y=y)


def image_of(png: bytes) -> list[Any]:
    """Return the pixels of a PNG file."""
    image = needs("PIL.Image").open(io.BytesIO(png))
    pixels: list[Any] = np.asarray(image).tolist()
    return pixels


def test_the_records_of_a_batch_have_the_order_of_the_master() -> None:
    losses = torch.tensor([1.0, float("nan"), 2.0, float("inf"), 2.0])
    found = listed({"losses": losses}, batch([9, 8, 7, 6, 5]), 4)
    assert [told[0] for told in found] == [1, 3, 4, 2]
    assert [told[2:] for told in found] == [([], [], [], b"")] * 4
    assert len(listed({"losses": losses}, batch([9, 8, 7, 6, 5]), 9)) == 5


def test_labels_and_outputs_are_told_as_far_as_there_are_some() -> None:
    losses = np.array([0.5, 1.5])
    outputs = torch.tensor([[0.25, 0.5], [1.0, 2.0]], dtype=torch.bfloat16)
    (first, second) = listed(
        {"losses": losses, "outputs": outputs}, batch([3, 4], torch.tensor([6, 7])), 2
    )
    assert first == (1, 1.5, [7], [], [1.0, 2.0], b"")
    assert second == (0, 0.5, [6], [], [0.25, 0.5], b"")
    given = {"losses": losses, "labels": [[0.5, 1.0], [2.0, 3.0]], "outputs": {"a": outputs}}
    assert listed(given, batch([3, 4]), 1) == [(1, 1.5, [], [2.0, 3.0], [], b"")]
    # Labels of a batch that are no array.
    assert listed({"losses": losses}, batch([3, 4], {"a": 1}), 1) == [(1, 1.5, [], [], [], b"")]


def test_images_are_small_files_of_png() -> None:
    def shown(images: Any) -> Any:
        return image_of(listed({"losses": [1.0], "images": images}, batch([0]), 1)[0][5])

    grey = [[0, 128], [255, 7]]
    assert shown(np.array([grey], dtype=np.uint8)) == grey
    assert shown(torch.tensor([[grey]]) / 255) == grey
    assert shown(np.array([grey], dtype=np.float64)[..., None] / 255) == grey
    red = np.zeros((1, 3, 4, 5), dtype=np.uint8)
    red[:, 0] = 200
    assert shown(red) == [[[200, 0, 0]] * 5] * 4
    assert shown(np.full((1, 2, 2), 3.0)) == [[255, 255]] * 2
    noise = np.random.default_rng(1).integers(0, 256, (1, 300, 200, 3), dtype=np.uint8)
    # Bytes that do not compress become 64 pixels.
    assert np.shape(shown(noise)) == (60, 40, 3)
    assert np.shape(shown(noise * 0)) == (100, 67, 3)


def test_what_is_missing_is_named() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({}, '"losses": losses'),
        ({"losses": 0.5}, r"expected 2 numbers, found the shape \(\)"),
        ({"losses": ["a", "b"]}, "found the shape None"),
        ({"losses": [1.0, 2.0], "images": np.zeros((2, 3))}, r"found the shape \(2, 3\)"),
        ({"losses": [1.0, 2.0], "images": np.zeros((1, 3, 3))}, "expected 2 images"),
    ]
    for found, expected in cases:
        with pytest.raises(TypeError, match=expected):
            listed(found, batch([0, 1]), 1)


def test_a_list_needs_records_that_are_measured_and_their_losses() -> None:
    source = torch.utils.data.TensorDataset(torch.zeros(8, 2), torch.zeros(8, 1))
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings: dict[str, Any] = {"epochs": 1, "micro": 4, "worst": 3}
    with pytest.raises(ValueError, match="worst = 3 lists records of eval_data"):
        ebbflow.join(model, optimizer, source, **settings)
    with (
        pytest.raises(TypeError, match="let the function return the loss of each record"),
        ebbflow.join(model, optimizer, source, source, **settings) as job,
    ):
        for epoch in job.epochs():
            for x, _ in epoch:
                job.step(model(x).mean())
            job.evaluate(lambda batch: {"loss": model(batch.x).mean()})
    with pytest.raises(ValueError, match="at most 1000 records"):
        ebbflow.join(model, optimizer, source, source, **settings | {"worst": 1001})


# S4-12
def test_two_processes_list_the_records_that_one_alone_lists(place: Place, tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    alone = Script(None, path, "alone", str(tmp_path), "alone").result()
    two = [place.script(path, "two", str(tmp_path), name, gate="join") for name in ("a", "b")]
    for process in two:
        process.arrive()
    place.wait_for_workers("two", 2)
    for process in two:
        process.go()
    assert [process.result()["sha"] for process in two] == [alone["sha"]] * 2
    found = json.loads((tmp_path / "alone.found.json").read_text())
    for name in ("a", "b"):
        assert json.loads((tmp_path / f"{name}.found.json").read_text()) == found

    # The model has the final weights, so it has these losses.
    order = sorted(range(60), key=lambda record: -found["losses"][record])[:4]
    worst = found["worst"]
    assert [record["record"] for record in worst] == order
    for record in worst:
        assert record["loss"] == pytest.approx(found["losses"][record["record"]], rel=1e-5)
        assert record["label"] == found["labels"][record["record"]]
        assert len(record["outputs"]) == 3 and "file" not in record
    assert found["shown"] == [True] * 4

    # The callbacks of one process heard them, after the 16 updates, and its table is whole.
    heard = [tmp_path / f"{name}.json" for name in ("a", "b")]
    (calls,) = [json.loads(path.read_text()) for path in heard if path.exists()]
    assert calls == [16, [[record["record"], record["loss"]] for record in worst]]
    for name in ("alone", "two"):
        with (tmp_path / f"{name}.worst.csv").open(newline="") as file:
            assert [int(row["record"]) for row in csv.DictReader(file)] == order
    kept: Worst = place.client.worst("two")
    assert [record["record"] for record in kept] == order
    assert all(record["image"].startswith(b"\x89PNG") for record in kept)


# S4-03, S4-12
def test_a_loop_leaves_a_run_and_a_table_with_images_in_wandb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_there("wandb", "PIL")
    for name, value in [
        ("DO_NOT_TRACK", "true"),
        ("WANDB_MODE", "offline"),
        ("WANDB_ERROR_REPORTING", "false"),
        ("WANDB_INIT_TIMEOUT", "250"),
        ("WANDB_X_SERVICE_WAIT", "250"),
    ]:
        monkeypatch.setenv(name, value)
    path = tmp_path / "script.py"
    path.write_text(WITH_WANDB + SCRIPT)
    Script(None, path, "mine", str(tmp_path), "mine").result()
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = [json.loads(line) for line in said.splitlines()]
    items = [line["history"]["item"] for line in found if line["type"] == "history"]
    assert sum("train/loss" in row for row in items) == 16
    assert sum("validation/loss" in row for row in items) == 2
    (table,) = file.parent.glob("files/media/table/validation/worst_*.table.json")
    content = json.loads(table.read_text())
    assert content["columns"] == ["record", "row", "loss", "label", "outputs", "image"]
    worst = json.loads((tmp_path / "mine.found.json").read_text())["worst"]
    assert [row[0] for row in content["data"]] == [record["record"] for record in worst]
    assert {row[-1] for row in content["data"]} == {"Image"}
