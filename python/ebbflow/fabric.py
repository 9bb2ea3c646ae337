"""``FabricModel``: the two calls of IBM's elastic distributed training, on a session.

A script written for ``fabric_model`` changes its import line:

    from ebbflow.fabric import FabricModel

The arguments, the loggers and their numbers are those of that product. What cannot be done yet is
refused by name. ``docs/migrate-from-fabric.md`` has the differences.
"""

from __future__ import annotations

import logging
import math
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ebbflow._fabric import (
    Part,
    batches,
    check_function,
    checked_logger,
    fleet_of,
    limits,
    measured,
    number,
    pair,
    shown,
    whole,
)
from ebbflow._fabric_torch import TorchPart
from ebbflow._measured import Sums
from ebbflow.callbacks import Callback
from ebbflow.keras._fabric import KerasPart
from ebbflow.session import Batch, Session
from ebbflow.status import Event
from ebbflow.tensors import is_keras

__all__ = ["FabricModel", "LoggerCallback"]

_LOG = logging.getLogger("ebbflow.fabric")


class LoggerCallback:
    """What hears the numbers of a training. Override any of its methods.

    One class works as a logger of the driver and of workers. Epochs count from 0.
    """

    def log_train_metrics(
        self, metrics: dict[str, float], iteration: int, epoch: int, workers: int
    ) -> None:
        """Hear the numbers after a batch.

        Args:
            metrics: Values by name. In the driver ``loss``, its mean over the epoch so far. In a
                worker ``loss`` and the metrics of its batch.
            iteration: Batches so far: of all workers in the driver, of this one in a worker.
            epoch: The epoch.
            workers: Number of processes that train now.
        """

    def log_test_metrics(self, metrics: dict[str, float], iteration: int, epoch: int) -> None:
        """Hear the numbers of a test.

        Args:
            metrics: Values by name. In the driver those over all test data, in a worker those of
                the part that it has just measured. A metric with a value for each class has a list.
            iteration: 0 in the driver. In a worker the parts that it has measured so far.
            epoch: The epoch.
        """

    def on_train_begin(self) -> None:
        """Hear that the training begins."""

    def on_train_end(self) -> None:
        """Hear that the training has ended."""


class _Printer(LoggerCallback):
    """The logger of the driver without another one: a line for each call."""

    def log_train_metrics(
        self, metrics: dict[str, float], iteration: int, epoch: int, workers: int
    ) -> None:
        print(f"train epoch={epoch} iteration={iteration} workers={workers} {shown(metrics)}")

    def log_test_metrics(self, metrics: dict[str, float], iteration: int, epoch: int) -> None:
        print(f"test epoch={epoch} {shown(metrics)}")


class _Quiet(LoggerCallback):
    """The logger of a worker without another one: lines of ``logging``, level INFO."""

    def log_train_metrics(
        self, metrics: dict[str, float], iteration: int, epoch: int, workers: int
    ) -> None:
        _LOG.info("train epoch=%d iteration=%d %s", epoch, iteration, shown(metrics))

    def log_test_metrics(self, metrics: dict[str, float], iteration: int, epoch: int) -> None:
        _LOG.info("test epoch=%d iteration=%d %s", epoch, iteration, shown(metrics))


class FabricModel:
    """A model with all that its training needs.

    Args:
        model: A ``torch.nn.Module`` or a ``keras.Model``. After ``train`` it has the final weights.
        datasets_function: Takes nothing, and returns the training and the test data set. Both have
            ``__len__`` and a ``__getitem__`` that returns features and label: each a scalar, an
            array, or a dictionary of these.
        loss_function: ``loss_function(outputs, labels)`` returns the mean loss over a batch. Of a
            Keras model what ``compile`` takes: a loss, a name, or a function of labels and outputs.
        optimizer: An optimizer of ``torch.optim`` over the model's parameters. Of a Keras model an
            optimizer of ``keras.optimizers``, or its name.
        metrics: Functions or callable objects ``metric(outputs, labels)`` that return a mean over a
            batch. Their names are those of the functions or classes. Of a Keras model what
            ``compile`` takes, as far as their variables are sums over records, such as means,
            ``AUC`` and ``Precision``. Workers hear those of each batch alone.
        worker_logger_callback: Hears the numbers of each worker, in that worker.
        driver_logger_callback: Hears the numbers of the whole job, in one elected process.
        save_to_onnx: Write the final model to ``model.onnx``, in the folder that the variable
            ``RESULT_DIR`` names, or in the current one. A Keras model needs the backend torch.
        keras_custom_objects: With a Keras model, what names in the loss, the optimizer and the
            metrics stand for.
        fn_batch_collate: Makes a batch, ``(features, labels)``, of a list of records.

    Attributes:
        name: Name of the job. Default: that of the script.
        seed: Seed of everything random.
        job: The session of the last ``train``: its metrics and numbers.

    Raises:
        TypeError: An argument is of a kind that cannot be trained. The message names it.
        ValueError: Two metrics have one name, or one is called ``loss``.
    """

    def __init__(
        self,
        model: Any,
        datasets_function: Callable[[], tuple[Any, Any]],
        loss_function: Callable[[Any, Any], Any],
        optimizer: Any,
        metrics: Sequence[Callable[[Any, Any], Any]] | None = None,
        worker_logger_callback: LoggerCallback | None = None,
        driver_logger_callback: LoggerCallback | None = None,
        save_to_onnx: bool = False,
        keras_custom_objects: Mapping[str, Any] | None = None,
        fn_batch_collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        part = KerasPart if is_keras(model) else TorchPart
        self._part = part(
            model, loss_function, optimizer, metrics or (), keras_custom_objects, fn_batch_collate
        )
        check_function("datasets_function", datasets_function)
        if fn_batch_collate is not None:
            check_function("fn_batch_collate", fn_batch_collate)
        self.name = re.sub(r"[^A-Za-z0-9._-]", "-", Path(sys.argv[0]).stem).strip(".")[:54]
        self.name = self.name or "script"
        self.seed = 0
        self.job: Session | None = None
        self._datasets = datasets_function
        self._worker = checked_logger("worker_logger_callback", worker_logger_callback) or _Quiet()
        self._driver = (
            checked_logger("driver_logger_callback", driver_logger_callback) or _Printer()
        )
        self._onnx = bool(save_to_onnx)

    def train(
        self,
        epoch_number: int,
        batch_size: int,
        engines_number: int | None = None,
        num_dataloader_threads: int = 4,
        validation_freq: int = 1,
        checkpoint_freq: int = 1,
        effective_batch_size: int | None = None,
    ) -> None:
        """Train the model, alone or as a part of the job on a cluster: see ``ebbflow.join``.

        Args:
            epoch_number: Passes over the training data.
            batch_size: Records of a batch, on one device.
            engines_number: Most devices that train at a time. Default: what
                ``effective_batch_size`` needs. Without both the processes of the fleet, each with
                one device: ``--workers`` of ``ebb run`` and ``ebb submit``, which processes get as
                the variable ``EBBFLOW_WORKERS``. 1 where nobody knows the fleet, as for processes
                that were started by hand. The number belongs to the job: it does not change with
                the fleet.
            num_dataloader_threads: Processes that load records, for each data set. 0: none. With a
                Keras model there are none.
            validation_freq: Epochs between two tests of which the loggers hear. They also hear of
                the last one.
            checkpoint_freq: Epochs between two checkpoints, in the folder or at the URL that the
                variable ``EBBFLOW_CHECKPOINTS`` names. 0, or without the variable: none.
            effective_batch_size: Records of an update, over all devices. Default: ``batch_size``
                times ``engines_number``. It is rounded up to a multiple of ``batch_size``.

        Raises:
            TypeError: A number is no integer, or the data are of a kind that cannot be trained.
            ValueError: A number is too small, or a variable of EDT is no such number.
            ModuleNotFoundError: ``save_to_onnx`` needs a package that is not there.
            RuntimeError: ``save_to_onnx`` needs a newer torch.
            ExportError: The model cannot be written as ONNX after its training, or Keras has
                another backend than torch.
            SessionFailedError: The job has failed or was cancelled.
        """
        whole("epoch_number", epoch_number, 1)
        whole("num_dataloader_threads", num_dataloader_threads, 0)
        whole("validation_freq", validation_freq, 1)
        whole("checkpoint_freq", checkpoint_freq, 0)
        fleet = fleet_of(os.environ)
        engines, effective = batches(batch_size, engines_number, effective_batch_size, fleet)
        master = os.environ.get("EBBFLOW_MASTER")
        if master is not None and engines_number is effective_batch_size is fleet is None:
            _LOG.warning(
                "train got neither engines_number nor effective_batch_size, and the variable "
                "EBBFLOW_WORKERS does not say the number of processes, so an update has one batch, "
                "and one process trains at a time; pass engines_number"
            )
        train, test = pair(self._datasets())
        metrics = self._part.prepare(train, test, self.seed, self._onnx)
        if metrics and not isinstance(self._driver, _Printer):
            _LOG.warning(
                "driver_logger_callback: log_train_metrics hears of the loss alone, because the "
                "events of a job have no other number of a batch; log_test_metrics, and the "
                "loggers of workers, hear of %s too",
                ", ".join(metrics),
            )
        told = _Told(epoch_number, validation_freq)
        driver = _Driver(self._driver, told, len(train), batch_size, effective)
        checkpoints = os.environ.get("EBBFLOW_CHECKPOINTS") if checkpoint_freq > 0 else None
        with self._part.join(
            batch_size,
            num_dataloader_threads,
            epochs=epoch_number,
            effective=effective,
            seed=self.seed,
            workers=engines,
            checkpoints=checkpoints,
            checkpoint_every=max(1, checkpoint_freq),
            limits=limits(os.environ),
            callbacks=[driver],
            name=self.name,
        ) as self.job:
            _Loop(self._part, self._worker, self.job, told, metrics).run()
        if self._onnx and self.job.elected:
            self._part.export()


class _Told:
    """Of which epochs' tests the loggers hear."""

    def __init__(self, epochs: int, every: int) -> None:
        self._epochs = epochs
        self._every = every

    def __contains__(self, epoch: int) -> bool:
        return (epoch + 1) % self._every == 0 or epoch + 1 == self._epochs


class _Loop:
    """The training loop of one process."""

    def __init__(
        self,
        part: Part,
        logger: LoggerCallback,
        job: Session,
        told: _Told,
        metrics: dict[str, Sums],
    ) -> None:
        self._part = part
        self._metrics = metrics
        self._logger = logger
        self._job = job
        self._told = told
        self._trained = 0
        self._tested = 0

    def run(self) -> None:
        self._logger.on_train_begin()
        # The driver may hear of evaluations before this process joined.
        self._job._name(self._metrics)
        for epoch in self._job.epochs():
            for batch in epoch:
                values = self._part.train(self._job, batch)
                self._trained += 1
                workers = self._job.workers
                self._logger.log_train_metrics(values, self._trained, epoch.number, workers)
            self._job.evaluate(self._test, self._metrics)
        self._logger.on_train_end()

    def _test(self, batch: Batch) -> dict[str, Any]:
        values = self._part.test(batch)
        self._tested += 1
        if batch.epoch in self._told:
            self._logger.log_test_metrics(dict(values), self._tested, batch.epoch)
        return values


class _SoFar(NamedTuple):
    """An epoch up to one of its steps."""

    step: int
    epoch: int
    # Sum of the losses of the records, and their number.
    loss: float
    records: int


#: Steps whose sums the driver keeps: as many as a master keeps events of a job.
_STEPS_KEPT = 16_384


class _Driver(Callback):
    """Turns the events of a job into what the logger of the driver hears.

    A job whose ps lost its part of the model goes back to a checkpoint, and the master tells the
    steps behind that again. So the sums are kept for each step: those of the steps that are trained
    again are dropped, and the sums before them go on with the same bits.
    """

    def __init__(
        self,
        logger: LoggerCallback,
        told: _Told,
        records: int,
        batch_size: int,
        effective: int,
    ) -> None:
        self._logger = logger
        self._told = told
        self._batches = math.ceil(records / batch_size)
        self._per_step = effective // batch_size
        self._steps = math.ceil(self._batches / self._per_step)
        self._so_far: deque[_SoFar] = deque(maxlen=_STEPS_KEPT)

    def on_begin(self, job: str) -> None:
        self._logger.on_train_begin()

    def on_event(self, event: Event) -> None:
        if event.kind == "train":
            self._train(event)
        elif event.kind == "rewind":
            self._forget(event["version"])
        elif event.kind == "eval" and event["epoch"] in self._told:
            known = {"event", "sequence", "unix_ms", "epoch", "step"}
            values = {name: measured(value) for name, value in event.items() if name not in known}
            self._logger.log_test_metrics(values, 0, event["epoch"])

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self._logger.on_train_end()

    def _train(self, event: Event) -> None:
        epoch, step = event["epoch"], event["step"]
        newest = self._so_far[-1] if self._so_far else None
        loss, records = 0.0, 0
        if newest is not None and newest.epoch == epoch:
            loss, records = newest.loss, newest.records
        loss += number(event["loss"]) * event["samples"]
        records += event["samples"]
        self._so_far.append(_SoFar(step, epoch, loss, records))
        in_epoch = min((step % self._steps + 1) * self._per_step, self._batches)
        iteration = epoch * self._batches + in_epoch
        values = {"loss": loss / records}
        self._logger.log_train_metrics(values, iteration, epoch, event["workers"])

    def _forget(self, version: int) -> None:
        """Drop the steps that are told again: those from ``version`` on."""
        while self._so_far and self._so_far[-1].step >= version:
            self._so_far.pop()
