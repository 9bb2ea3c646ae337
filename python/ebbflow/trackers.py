"""Callbacks that record the metrics of a job: as CSV, in TensorBoard, Weights & Biases and MLflow.

    with ebbflow.join(..., callbacks=[trackers.Csv("metrics.csv")]) as job:

A process that is elected later records the job again from its first event on. Each tracker leaves
one record of the job then, not two. A job that goes back to a checkpoint trains some steps again:
``Csv`` and ``TensorBoard`` drop what they recorded of these, ``WandB`` and ``MLflow`` note it.
Libraries are imported when a tracker is made. They record the worst records of a loop, too, and
with ``ebbflow.callbacks.follow`` those of a job file.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ebbflow.callbacks import Callback
from ebbflow.status import Event
from ebbflow.worst import Worst

__all__ = ["Csv", "MLflow", "TensorBoard", "WandB"]

#: What a rewind is called in libraries that remove nothing. Its value is the version.
_REWIND = "rewind/version"

#: What an event says beside its metrics.
_PLACE = ("event", "sequence", "unix_ms", "epoch", "step", "set")


def scalars(event: Event) -> tuple[int, dict[str, float]] | None:
    """Return the number of updates so far, and the metrics by name.

    ``train/loss`` and others of a step, ``validation/accuracy`` and others of an evaluation. The
    name of a named validation set takes the place of ``validation``. Values that are no numbers are
    left out. ``None`` for other events.
    """
    if event.kind not in ("train", "eval"):
        return None
    group = "train" if event.kind == "train" else event.get("set", "validation")
    # A step has the number of the updates before it, an evaluation that of all.
    updates = int(event["step"]) + (event.kind == "train")
    values = {
        f"{group}/{name}": float("nan") if value is None else float(value)
        for name, value in event.items()
        # Metrics of torchmetrics may be lists, such as one value for each class.
        if name not in _PLACE and (value is None or isinstance(value, int | float))
    }
    return updates, values | {f"{group}/epoch": float(event["epoch"])}


class Tracker(Callback):
    """What the trackers share. A run's name is the same in each process that records it."""

    def __init__(self) -> None:
        self._job = ""
        self._run: str | None = None
        self._newest: Event | None = None

    def on_begin(self, job: str) -> None:
        self._job = job

    def on_event(self, event: Event) -> None:
        if self._run is None:
            # The master noted the time of the first event, so each process makes this name.
            self._run = f"{self._job}-{event.unix_ms:x}"
            self.open(self._run)
        self._newest = event
        if event.kind == "rewind":
            self.rewind(event, int(event["version"]))
        found = scalars(event)
        if found is not None:
            self.record(event, *found)

    def on_worst(self, worst: Worst, updates: int) -> None:
        if self._newest is not None:
            self.tables(self._newest, updates, worst)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        if self._run is not None:
            self.close(str(summary["status"]))

    def open(self, run: str) -> None:
        """Begin a run, or take it over from another process."""

    def record(self, event: Event, updates: int, values: dict[str, float]) -> None:
        """Record the metrics of an event."""

    def rewind(self, event: Event, version: int) -> None:
        """Record that the job goes back to a version.

        The events with more than ``version`` updates, of the second value of :func:`scalars`, come
        again.
        """

    def tables(self, event: Event, updates: int, worst: Worst) -> None:
        """Record the worst records, of which the newest event is ``event``."""

    def close(self, status: str) -> None:
        """End the run of a job that ended as ``succeeded``, ``failed`` or ``cancelled``."""


#: The columns of a CSV file.
_COLUMNS = ["sequence", "unix_ms", "epoch", "step", "metric", "value"]


class Csv(Tracker):
    """A CSV file with a line for each metric of an event.

    The columns are ``sequence`` (the event's number), ``unix_ms``, ``epoch``, ``step`` (updates so
    far), ``metric`` (such as ``train/loss``) and ``value``. A file that is there is replaced. When
    the job goes back to a checkpoint, the lines of the steps that come again leave the file.

    The worst records are in a file beside it, such as ``metrics.worst.csv``, without images.

    Args:
        path: The file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._path = Path(path)
        self._file: Any = None
        self._writer: Any = None

    def open(self, run: str) -> None:
        """Begin the file anew."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # With another inode, so that a process that was elected before writes into its own file.
        self._path.unlink(missing_ok=True)
        self._file = self._path.open("w+", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._writer.writerow(_COLUMNS)

    def record(self, event: Event, updates: int, values: dict[str, float]) -> None:
        """Write the lines of an event."""
        for name, value in values.items():
            if not name.endswith("/epoch"):
                place = [event.sequence, event.unix_ms, event["epoch"], updates]
                self._writer.writerow([*place, name, repr(value)])
        self._file.flush()

    def rewind(self, event: Event, version: int) -> None:
        """Remove the lines of what comes again.

        It writes into the file itself: a file in its place would be that of a process that was
        elected later. Evaluations of an epoch stand among steps of the next one, so it filters.
        """
        self._file.seek(0)
        header, *rows = csv.reader(self._file)
        step = _COLUMNS.index("step")
        self._file.seek(0)
        self._file.truncate()
        self._writer.writerows([header, *(row for row in rows if int(row[step]) <= version)])
        self._file.flush()

    def tables(self, event: Event, updates: int, worst: Worst) -> None:
        """Write a line for each of the worst records."""
        path = self._path.with_suffix(f".worst{self._path.suffix}")
        with path.open("w", newline="", encoding="utf-8") as file:
            names = ["set", "record", "file", "row", "loss", "label", "outputs", "places", "text"]
            writer = csv.DictWriter(
                file, names, restval="", extrasaction="ignore", lineterminator="\n"
            )
            writer.writeheader()
            for name, columns, rows in worst.tables():
                writer.writerows(
                    {"set": name, **dict(zip(columns, row, strict=True))} for row in rows
                )

    def close(self, status: str) -> None:
        """Close the file."""
        self._file.close()


class TensorBoard(Tracker):
    """Event files of TensorBoard, by ``torch.utils.tensorboard`` or else by ``tensorboardX``.

    Args:
        folder: Folder of the run, which belongs to this job alone.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        self._library = _library("TensorBoard", "torch.utils.tensorboard", "tensorboardX")
        self._folder = os.fspath(folder)
        self._writer: Any = None

    def open(self, run: str) -> None:
        """Begin a file. TensorBoard hides what another process has written before."""
        self._writer = self._library.SummaryWriter(self._folder, purge_step=0)

    def record(self, event: Event, updates: int, values: dict[str, float]) -> None:
        """Write the scalars of an event."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, updates, walltime=event.unix_ms / 1e3)
        self._writer.flush()

    def rewind(self, event: Event, version: int) -> None:
        """Let TensorBoard hide the points of what comes again.

        It is what ``purge_step`` writes, but in the same file. TensorBoard reads files in the order
        of their names, and these have whole seconds.
        """
        proto = self._proto("event")
        start = proto.SessionLog(status=proto.SessionLog.START)
        purge = proto.Event(step=version + 1, session_log=start)
        self._writer.file_writer.add_event(purge, version + 1, walltime=event.unix_ms / 1e3)
        self._writer.flush()

    def tables(self, event: Event, updates: int, worst: Worst) -> None:
        """Write tables and images as ``ebb run`` and ``ebb fetch`` do."""
        summary = self._proto("summary").Summary.FromString(worst.summary)
        self._writer.file_writer.add_summary(summary, updates, walltime=event.unix_ms / 1e3)
        self._writer.flush()

    def _proto(self, name: str) -> Any:
        """Return a module of the library's messages."""
        own = self._library.__name__ == "tensorboardX"
        protos = "tensorboardX.proto" if own else "tensorboard.compat.proto"
        return importlib.import_module(f"{protos}.{name}_pb2")

    def close(self, status: str) -> None:
        """Close the file."""
        self._writer.close()


class WandB(Tracker):
    """A run of Weights & Biases.

    Its step is the event's number, and ``step`` has the updates so far. A process that takes a run
    over resumes it: what the service has is not recorded again. A row with ``rewind/version`` says
    that the job went back: rows before it with a larger ``step`` are replaced by rows after it.

    Args:
        project: The project.
        options: Further arguments of ``wandb.init``, such as ``entity``, ``mode="offline"`` or
            ``dir``.
    """

    def __init__(self, project: str, **options: Any) -> None:
        super().__init__()
        self._library = _library("wandb", "wandb")
        self._options = {"project": project, "resume": "allow"} | options
        self._wandb: Any = None

    def open(self, run: str) -> None:
        """Begin or resume the run."""
        self._wandb = self._library.init(**({"id": run, "name": run} | self._options))
        self._wandb.define_metric("step")
        self._wandb.define_metric("*", step_metric="step")

    def record(self, event: Event, updates: int, values: dict[str, float]) -> None:
        """Log the metrics of an event."""
        self._wandb.log(values | {"step": updates}, step=event.sequence)

    def rewind(self, event: Event, version: int) -> None:
        """Log the rewind. W&B removes no row of a run."""
        self._wandb.log({_REWIND: version, "step": version}, step=event.sequence)

    def tables(self, event: Event, updates: int, worst: Worst) -> None:
        """Log a table of each validation set. Images need Pillow."""
        found: dict[str, Any] = {"step": updates}
        for name, columns, rows in worst.tables():
            if "image" in columns:
                at = columns.index("image")
                rows = [[*row[:at], self._image(row[at]), *row[at + 1 :]] for row in rows]
            found[f"{name}/worst"] = self._library.Table(columns=columns, data=rows)
        self._wandb.log(found, step=event.sequence)

    def _image(self, png: bytes | None) -> Any:
        try:
            from PIL import Image
        except ImportError:
            return None
        return None if png is None else self._library.Image(Image.open(io.BytesIO(png)))

    def close(self, status: str) -> None:
        """Finish the run, with exit code 1 if the job did not succeed."""
        self._wandb.finish(exit_code=0 if status == "succeeded" else 1)


class MLflow(Tracker):
    """A run of MLflow.

    The tag ``ebbflow.sequence`` of the run has the number of the last event that is recorded, so
    that a process that takes the run over goes on behind it. A point of the metric
    ``rewind/version`` says that the job went back to that step: points of larger steps with an
    earlier timestamp are replaced by those with a later one.

    Args:
        experiment: Name of the experiment, which is made if it is not there.
        tracking_uri: Where MLflow keeps its runs. Default: the variable ``MLFLOW_TRACKING_URI``.
    """

    def __init__(self, experiment: str, tracking_uri: str | None = None) -> None:
        super().__init__()
        self._library = _library("mlflow", "mlflow")
        self._experiment = experiment
        self._tracking_uri = tracking_uri
        self._client: Any = None
        self._id = ""
        self._recorded = 0

    def open(self, run: str) -> None:
        """Begin the run, or find the one that another process began."""
        self._client = self._library.MlflowClient(self._tracking_uri)
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = (
            self._client.create_experiment(self._experiment)
            if found is None
            else found.experiment_id
        )
        runs = self._client.search_runs([experiment], f"tags.`ebbflow.run` = '{run}'")
        if runs:
            self._id = runs[0].info.run_id
            self._recorded = int(runs[0].data.tags.get("ebbflow.sequence", 0))
            return
        made = self._client.create_run(experiment, run_name=run, tags={"ebbflow.run": run})
        self._id = made.info.run_id

    def record(self, event: Event, updates: int, values: dict[str, float]) -> None:
        """Log the metrics of an event, unless another process has."""
        self._log(event, updates, values)

    def rewind(self, event: Event, version: int) -> None:
        """Log the rewind. MLflow removes no point of a metric."""
        self._log(event, version, {_REWIND: float(version)})

    def _log(self, event: Event, updates: int, values: dict[str, float]) -> None:
        if event.sequence <= self._recorded:
            return
        kinds = self._library.entities
        metrics = [
            kinds.Metric(name, value, event.unix_ms, updates) for name, value in values.items()
        ]
        tag = kinds.RunTag("ebbflow.sequence", str(event.sequence))
        self._client.log_batch(self._id, metrics=metrics, tags=[tag])

    def tables(self, event: Event, updates: int, worst: Worst) -> None:
        """Log tables in the form of ``mlflow.log_table``, which needs pandas."""
        logged = []
        for name, columns, rows in worst.tables():
            file, place = f"{name}/worst.json", f"table_images/{name}/worst"
            if "image" in columns:
                at = columns.index("image")
                images = [row[at] for row in rows]
                self._log_images(images, place)
                rows = [
                    [*row[:at], _shown(image, f"{place}/{number}.png"), *row[at + 1 :]]
                    for number, (row, image) in enumerate(zip(rows, images, strict=True))
                ]
            self._client.log_dict(self._id, {"columns": columns, "data": rows}, file)
            logged.append({"path": file, "type": "table"})
        # The page of the run shows what this tag names as a table.
        self._client.set_tag(self._id, "mlflow.loggedArtifacts", json.dumps(logged))

    def _log_images(self, images: list[bytes | None], place: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for number, image in enumerate(images):
                if image is not None:
                    Path(folder, f"{number}.png").write_bytes(image)
            self._client.log_artifacts(self._id, folder, place)

    def close(self, status: str) -> None:
        """End the run."""
        states = {"succeeded": "FINISHED", "cancelled": "KILLED"}
        self._client.set_terminated(self._id, states.get(status, "FAILED"))


def _shown(image: bytes | None, path: str) -> dict[str, str] | None:
    """Return what stands for an image in a table of MLflow."""
    if image is None:
        return None
    return {"type": "image", "filepath": path, "compressed_filepath": path}


#: The extra of this package that installs a library.
_EXTRAS = {"torch.utils.tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


def _library(what: str, *names: str) -> Any:
    """Import the first library that is there."""
    for name in names:
        try:
            return importlib.import_module(name)
        except ImportError as error:
            reason = error
    raise ModuleNotFoundError(
        f"the tracker for {what} needs a package that is not there ({reason}): pip install "
        f"'ebbflow[{_EXTRAS[names[0]]}]'"
    )
