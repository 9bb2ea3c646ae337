"""Callbacks that record the metrics of a job: as CSV, in TensorBoard, Weights & Biases and MLflow.

    with ebbflow.join(..., callbacks=[trackers.Csv("metrics.csv")]) as job:

A process that is elected later records the job again from its first event on. Each tracker leaves
one record of the job then, not two. Libraries are imported when a tracker is made.
"""

from __future__ import annotations

import csv
import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ebbflow.callbacks import Callback
from ebbflow.status import Event

__all__ = ["Csv", "MLflow", "TensorBoard", "WandB"]

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

    def on_begin(self, job: str) -> None:
        self._job = job

    def on_event(self, event: Event) -> None:
        if self._run is None:
            # The master noted the time of the first event, so each process makes this name.
            self._run = f"{self._job}-{event.unix_ms:x}"
            self.open(self._run)
        found = scalars(event)
        if found is not None:
            self.record(event, *found)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        if self._run is not None:
            self.close(str(summary["status"]))

    def open(self, run: str) -> None:
        """Begin a run, or take it over from another process."""

    def record(self, event: Event, updates: int, values: dict[str, float]) -> None:
        """Record the metrics of an event."""

    def close(self, status: str) -> None:
        """End the run of a job that ended as ``succeeded``, ``failed`` or ``cancelled``."""


class Csv(Tracker):
    """A CSV file with a line for each metric of an event.

    The columns are ``sequence`` (the event's number), ``unix_ms``, ``epoch``, ``step`` (updates so
    far), ``metric`` (such as ``train/loss``) and ``value``. A file that is there is replaced.

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
        self._file = self._path.open("w", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._writer.writerow(["sequence", "unix_ms", "epoch", "step", "metric", "value"])

    def record(self, event: Event, updates: int, values: dict[str, float]) -> None:
        """Write the lines of an event."""
        for name, value in values.items():
            if not name.endswith("/epoch"):
                place = [event.sequence, event.unix_ms, event["epoch"], updates]
                self._writer.writerow([*place, name, repr(value)])
        self._file.flush()

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

    def close(self, status: str) -> None:
        """Close the file."""
        self._writer.close()


class WandB(Tracker):
    """A run of Weights & Biases.

    Its step is the event's number, and ``step`` has the updates so far. A process that takes a run
    over resumes it: what the service has is not recorded again.

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

    def close(self, status: str) -> None:
        """Finish the run, with exit code 1 if the job did not succeed."""
        self._wandb.finish(exit_code=0 if status == "succeeded" else 1)


class MLflow(Tracker):
    """A run of MLflow.

    The tag ``ebbflow.sequence`` of the run has the number of the last event that is recorded, so
    that a process that takes the run over goes on behind it.

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
        if event.sequence <= self._recorded:
            return
        kinds = self._library.entities
        metrics = [
            kinds.Metric(name, value, event.unix_ms, updates) for name, value in values.items()
        ]
        tag = kinds.RunTag("ebbflow.sequence", str(event.sequence))
        self._client.log_batch(self._id, metrics=metrics, tags=[tag])

    def close(self, status: str) -> None:
        """End the run."""
        states = {"succeeded": "FINISHED", "cancelled": "KILLED"}
        self._client.set_terminated(self._id, states.get(status, "FAILED"))


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
