"""``ebbflow.join``: a training loop in Python as a part of a job.

The loop gets the batches that are leased to this process, with the right version of the weights in
the model. It gives gradients back with ``job.step(loss)``. The job's parameter servers apply the
optimizer.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import math
import os
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from ebbflow import _native
from ebbflow._device import bytes_of_ps, check_kind, load_compiler
from ebbflow._leaving import Leaving
from ebbflow._listed import PARTS, listed
from ebbflow._measured import KNOWN, Sums, metrics_of, parts
from ebbflow._memory import keep_free_memory
from ebbflow._reach import agent_of, full, secrets
from ebbflow._redaction import redacted
from ebbflow._vote import Alone, Elected
from ebbflow.callbacks import Callback, Caller
from ebbflow.data import Leased, Source, refuse_inside, section_of
from ebbflow.engine import Engine, Torch
from ebbflow.errors import SessionError, SessionFailedError
from ebbflow.optimizers import optimizer_settings, schedule_settings
from ebbflow.records import EVALUATION
from ebbflow.state import State, described, room
from ebbflow.status import Event
from ebbflow.tensors import parsed
from ebbflow.worst import Worst

_LOG = logging.getLogger("ebbflow")

# Longest time that a debugger may hold the only process of a job.
_PATIENT = "24h"

# Names of the jobs that this process has joined in a run of `ebb run`.
_JOINED: set[str] = set()

_MODES = ("sync", "pipelined", "bounded", "async")

_Self = TypeVar("_Self", bound="Session")


class Batch:
    """Records that are leased to this process, collated.

    ``for x, y in epoch`` and ``batch["name"]`` reach what the collate function returned.

    Attributes:
        data: What the collate function returned.
        records: Numbers of the records in the data set, in the order of the batch.
        epoch: Epoch of the batch, from 0.
        step: Step of the job to which the batch belongs, from 0. 0 in an evaluation.
        microbatch: Number of the batch in the job, from 0, over all epochs. 0 in an evaluation.
    """

    def __init__(
        self,
        data: Any,
        records: list[int],
        epoch: int,
        step: int,
        key: Callable[[], Any] = lambda: None,
        microbatch: int = 0,
    ) -> None:
        self.data = data
        self.records = records
        self.epoch = epoch
        self.step = step
        self.microbatch = microbatch
        self._key = key

    @property
    def key(self) -> Any:
        """In a loop in JAX, a key of ``jax.random`` that belongs to the batch; else ``None``."""
        return self._key()

    @property
    def x(self) -> Any:
        """The first of two parts, such as features."""
        return self._part(0)

    @property
    def y(self) -> Any:
        """The second of two parts, such as labels."""
        return self._part(1)

    def _part(self, at: int) -> Any:
        if isinstance(self.data, Sequence) and len(self.data) == 2:
            return self.data[at]
        found = type(self.data).__name__
        raise AttributeError(f"a batch has x and y if its records are pairs; this one is {found}")

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)

    def __getitem__(self, key: Any) -> Any:
        return self.data[key]

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.records)


class Epoch:
    """The batches of one epoch that are leased to this process, in the order of their leases.

    Attributes:
        number: The epoch, from 0.
    """

    def __init__(self, job: Session, number: int) -> None:
        self._job = job
        self.number = number

    def __iter__(self) -> Iterator[Batch]:
        return self._job._batches(self.number)


class Session:
    """A process's part in a job, from :func:`join`.

    Attributes:
        elected: Whether this process is the one that writes what the job has once, such as files.
            True in exactly one process of a job that has ended.
        metrics: Metrics of the last evaluation, or the last training loss, when the job has ended.
        history: Metrics of each evaluation, with its epoch and step.
        summary: The job in numbers, as in ``summary.json``, when it has ended.
        workers: Number of processes that train, as of the newest step that this one heard of.
        worst: Records with the largest losses in the last evaluation, when the job has ended, if
            ``join`` got ``worst``.
    """

    def __init__(
        self,
        session: Any,
        engine: Engine,
        train: Any,
        evaluation: Any,
        seed: int,
        threads: int,
        caller: Caller | None = None,
        state: State | None = None,
        leaving: str = "this process leaves the job",
    ) -> None:
        self._session = session
        self._process = os.getpid()
        self._state = state
        self._leaving = Leaving(self._leave, leaving)
        self._caller = caller
        self._threads = threads
        self._engine = engine
        self._tensors = engine.tensors
        self._train = train
        self._evaluation = evaluation
        self._seed = seed
        self._epoch: int | None = None
        # The request that the loop works on, the one that waits for the loop, and the newest one.
        self._current: Any = None
        self._pending: Any = None
        self._newest: Any = None
        self._measured: dict[int, dict[str, Any]] = {}
        # Metrics of the loop's own, and the sums of those that it has not named yet, by epoch.
        self._metrics: dict[str, Sums] = {}
        self._unknown: dict[int, dict[str, Sequence[float]]] = {}
        self.elected = False
        self.metrics: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []
        self.summary: dict[str, Any] | None = None
        self.workers = 1
        self.worst = Worst([], b"")

    @property
    def model_sha256(self) -> str | None:
        """SHA-256 of the final weights as ``model.safetensors``; ``None`` before the end."""
        return None if self.summary is None else self.summary["model_sha256"]

    @property
    def loss_scale(self) -> float:
        """Factor of the loss that belongs before the backward pass of the batch at hand.

        ``job.step`` multiplies the loss by it. A loop that calls ``job.push`` does so itself, as in
        ``(loss.float() * job.loss_scale).backward()``. It is 1 in a job without ``loss_scaling``.

        Raises:
            SessionError: There is no batch, or it was stepped already.
        """
        if self._current is None:
            raise SessionError(
                "job.loss_scale belongs to a batch: read it between a batch and its step"
            )
        return float(self._current.scale)

    @property
    def state(self) -> State:
        """Values of the loop's own, at the version of the batch, and at last those of the end.

        Raises:
            SessionError: ``join`` got no ``state_bytes``.
        """
        if self._state is None:
            raise SessionError("job.state has no room; give join the bytes, as in state_bytes=4096")
        return self._state

    def __enter__(self: _Self) -> _Self:
        self._engine.begin()
        self._leaving.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if os.getpid() != self._process:
            # A fork has none of the threads, and the job is its parent's.
            return
        with self._leaving.ending():
            if self._current is not None:
                self._refuse(self._current, error or "the loop ended before job.step(loss)")
            self._current = self._pending = self._newest = None
            if self._caller is not None:
                self._caller.close()
            self._session.stop()
            self._engine.close()
            self._train.close()
            self._engine.use_threads(self._threads)
            if self._evaluation is not None:
                self._evaluation.close()

    def epochs(self) -> Iterator[Epoch]:
        """Return the epochs in which this process takes part.

        An epoch whose batches the loop leaves early comes again with the rest of them. At the end
        of the job the model has its final weights.

        Raises:
            SessionFailedError: The job has failed or was cancelled.
            SessionError: The loop does not measure the model although the job has ``eval_data``.
        """
        while True:
            message = self._wait()
            if isinstance(message, _native.Train):
                self._pending = message
                self._epoch = message.epoch
                yield Epoch(self, message.epoch)
            elif isinstance(message, _native.Evaluate):
                if self._epoch == message.epoch:
                    message.fail("the loop did not call job.evaluate")
                    raise SessionError(
                        "join got eval_data, or a source with validation_fraction, and the loop "
                        f"did not call job.evaluate after epoch {message.epoch}; call it at the "
                        "end of each epoch, or leave them out"
                    )
                self._pending = message
                self._epoch = message.epoch
                yield Epoch(self, message.epoch)
            elif message == "ended":
                return

    def step(self, loss: Any) -> float:
        """Compute the gradients of a batch's mean loss and hand them to the job.

        Args:
            loss: Mean loss over the records of the batch: a tensor of one element.

        Returns:
            The loss.

        Raises:
            SessionError: There is no batch, or it was stepped already. Or a part of its gradients
                was sent before its backward pass failed, or before one of them grew again.
            TypeError: ``loss`` is no tensor of one element that has a gradient.
            WrittenError: The loop wrote a weight itself.
        """
        import torch

        if self._current is None:
            raise SessionError(
                "job.step without a batch: call it once for each batch of `for batch in epoch`"
            )
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise TypeError(
                "job.step(loss): expected the mean loss over the batch, a tensor of one element "
                f"that requires a gradient, found {_shown(loss)}"
            )
        self._tensors.check()
        # A lease may have come since the batch.
        self._expect()
        scaled = loss
        if self.loss_scale != 1:
            # In f32: a loss in f16 would overflow by its scale.
            scaled = loss.to(torch.float32) * self.loss_scale
        self._tensors.backward(scaled, self._current)
        return self.push(float(loss.detach()))

    def push(self, loss: float) -> float:
        """Hand gradients to the job that a backward pass of the loop's own has computed.

        The gradients of the batch's mean loss, times ``job.loss_scale``, are in ``grad`` of the
        parameters. Afterwards they are ``None``.

        Args:
            loss: Mean loss over the records of the batch, for the metrics.

        Returns:
            The loss.

        Raises:
            SessionError: There is no batch, or its gradients were handed over already.
            WrittenError: The loop wrote a weight itself.
        """
        self._check_process()
        request = self._current
        if request is None:
            raise SessionError(
                "job.push without a batch: call it once for each batch of `for batch in epoch`"
            )
        self._tensors.check()
        self._tensors.collect(request)
        self._hand_over(request, loss)
        return loss

    def evaluate(
        self,
        function: Callable[[Batch], Mapping[str, Any]],
        metrics: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Measure the model on ``eval_data`` at the end of an epoch, together with other processes.

        Args:
            function: Returns the means of its metrics over a batch, by name: ``loss`` and any of
                ``accuracy``, ``top5`` (or another k), ``log_loss``, ``perplexity`` (the mean
                negative log likelihood), ``mae``, ``mse`` and ``rmse`` (the mean square), or other
                names. With ``metrics`` it also returns ``outputs``, and ``labels`` if they are not
                ``batch.y``. With ``worst`` of ``join`` it also returns ``losses``, one for each
                record, and may return ``outputs``, ``labels`` and ``images`` for the list. It is
                called without gradients, and with the model in evaluation mode.
            metrics: Metrics by name, the same ones in every process: functions of outputs and
                labels, which return the mean over the batch or a sum and its count; metrics of
                torchmetrics whose states are sums; metrics of Keras whose variables are.

        Returns:
            The metrics over all records, the same ones in every process. Empty if the job went
            back to an earlier epoch meanwhile.

        Raises:
            SessionError: The job has no ``eval_data``, or no epoch has begun.
            TypeError: A metric is of a kind that does not add up over processes, or ``worst`` lacks
                the losses.
            SessionFailedError: The job has failed or was cancelled.
        """
        if self._evaluation is None:
            raise SessionError("job.evaluate needs eval_data, which join did not get")
        epoch = self._epoch
        if epoch is None:
            raise SessionError("job.evaluate belongs after an epoch of job.epochs()")
        self._name(metrics_of(metrics))
        held: Any = None
        while epoch not in self._measured:
            message = self._wait() if held is None else self._receive()
            if isinstance(message, _native.Evaluate):
                self._answer(message, function)
            elif isinstance(message, _native.Train):
                if message.epoch <= epoch:
                    self._pending = message
                    return {}
                held = message
            elif message == "ended":
                break
        self._pending = held if held is not None else self._pending
        if epoch not in self._measured:
            raise SessionError(f"the job ended without an evaluation of epoch {epoch}")
        return self._measured[epoch]

    def _hand_over(self, request: Any, loss: float) -> None:
        """Answer a request whose gradients are written."""
        if self._state is not None:
            self._state.commit(request)
        self._current = None
        request.answer(loss)

    def _batches(self, epoch: int) -> Iterator[Batch]:
        while True:
            message = self._wait()
            if message == ("measured", epoch):
                return
            if isinstance(message, tuple):
                continue
            if not isinstance(message, _native.Train) or message.epoch != epoch:
                self._pending = message
                return
            self._current = message
            records = message.records
            try:
                data = _loaded(self._train, epoch, message)
                self._tensors.bind(message)
                if self._state is not None:
                    self._state.bind(message, trains=True)
            except BaseException as error:
                self._current = None
                self._refuse(message, error)
                raise
            self._engine.seed(message.key)
            key = functools.partial(self._engine.key, message.key)
            yield Batch(data, records, epoch, message.step, key, message.microbatch)

    def _answer(self, request: Any, function: Callable[[Batch], Mapping[str, Any]]) -> None:
        records = request.records
        try:
            data = _loaded(self._evaluation, EVALUATION, request)
            self._tensors.bind(request)
            if self._state is not None:
                self._state.bind(request, trains=False)
            self._engine.seed(self._seed, EVALUATION, records[0])
            with self._engine.measuring():
                batch = Batch(data, records, request.epoch, 0)
                found = parts(_checked(function(batch)), batch, self._metrics)
                count = len(records)
                sums = [
                    (name, metric.of(found, count), metric.is_mean)
                    for name, metric in self._metrics.items()
                ]
            means = [
                (name, float(value) * count, count)
                for name, value in found.items()
                if name not in {"loss", "outputs", "labels", *PARTS, *self._metrics}
            ]
            worst = listed(found, batch, request.worst) if request.worst else []
            request.answer(float(found["loss"]) * count, means, sums, worst)
        except BaseException as error:
            self._refuse(request, error)
            raise

    def _leave(self) -> None:
        """Hand back what this process has of the job, without waiting."""
        if self._newest is not None:
            self._newest.leave()
        self._session.leave()

    def _refuse(self, request: Any, why: BaseException | str) -> None:
        """Say why the loop has no answer. Whoever leaves the job hands the request back instead."""
        is_good_exit = isinstance(why, SystemExit) and why.code in (None, 0)
        if self._leaving.told or isinstance(why, KeyboardInterrupt) or is_good_exit:
            request.leave()
            return
        if isinstance(why, BaseException):
            why = "".join(traceback.format_exception(why)).strip()
        request.fail(redacted(why))

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise SessionError(
                f"process {os.getpid()} was forked from process {self._process}, which joined the "
                "job, and has no part in it; call ebbflow.join in the process that trains"
            )
        self._leaving.check()

    def _wait(self) -> Any:
        """Return the request that waits, or what comes next."""
        self._check_process()
        if self._current is not None:
            request, self._current = self._current, None
            request.fail(
                f"the loop left microbatch {request.microbatch} (epoch {request.epoch}, records "
                f"{request.records[0]}, ..) without job.step(loss); step every batch, also before "
                "continue and break"
            )
        if self._pending is not None:
            message, self._pending = self._pending, None
            return message
        return self._receive()

    def _receive(self) -> Any:
        """Return a request, ``("measured", epoch)``, or ``"ended"``."""
        while True:
            if self.summary is not None:
                return "ended"
            message = self._session.next()
            self._expect()
            if not isinstance(message, tuple):
                self._newest = message
                return message
            kind, *facts = message
            if kind == "broken":
                raise SessionFailedError(facts[0])
            if kind == "ended":
                self._end(json.loads(facts[0]), *facts[1:])
                return "ended"
            event = json.loads(facts[0])
            unknown = self._evaluated(event, dict(facts[1]))
            if self._caller is not None:
                self._caller.event(Event(event))
            if event["event"] == "eval":
                return self._note(event, unknown)
            if event["event"] == "train":
                self.workers = int(event["workers"])
            if event["event"] == "rewind":
                self._forget(event["version"])
            elif event["event"] == "warning":
                _LOG.warning("%s", event["message"])

    def _expect(self) -> None:
        """Let records be loaded that this process will be asked for."""
        for kind, *facts in self._session.ahead():
            if kind == "train" and _loads_ahead(self._train):
                self._train.expect(*facts)
            elif kind == "evaluate" and _loads_ahead(self._evaluation):
                begin, end, micro = facts
                # An evaluation that was broken off does not go on.
                self._evaluation.forget()
                for at in range(begin, end, micro):
                    self._evaluation.expect(EVALUATION, list(range(at, min(end, at + micro))))

    def _evaluated(
        self, row: dict[str, Any], sums: dict[str, Sequence[float]]
    ) -> dict[str, Sequence[float]]:
        """Add the values of sums to a row. Returns the sums whose metric is not known yet."""
        for name, metric in self._metrics.items():
            if name in sums:
                row[name] = metric.value(sums.pop(name))
        return sums

    def _name(self, metrics: dict[str, Sums]) -> None:
        """Learn which metrics the loop has, and what they were in epochs before."""
        self._metrics = metrics
        for row in self.history:
            epoch = row["epoch"]
            self._unknown[epoch] = self._evaluated(row, self._unknown.pop(epoch, {}))
            self._measured[epoch] = _metrics_in(row)

    def _note(self, event: dict[str, Any], unknown: dict[str, Sequence[float]]) -> tuple[str, int]:
        told = {"event", "sequence", "unix_ms"}
        measured = {name: value for name, value in event.items() if name not in told}
        epoch = int(event["epoch"])
        self.history = [before for before in self.history if before["epoch"] != epoch]
        self.history.append(measured)
        self._unknown[epoch] = unknown
        self._measured[epoch] = _metrics_in(measured)
        return ("measured", epoch)

    def _forget(self, version: int) -> None:
        self.history = [before for before in self.history if before["step"] <= version]
        kept = {int(before["epoch"]) for before in self.history}
        self._measured = {epoch: self._measured[epoch] for epoch in kept}

    def _end(
        self,
        summary: dict[str, Any],
        weights: bytes | None,
        exported: bool,
        state: bytes | None,
        worst: tuple[list[tuple[str, bytes | None]], bytes],
    ) -> None:
        self.summary = summary
        self.worst = Worst(*worst)
        last = _metrics_in(self.history[-1]) if self.history else {}
        self.metrics = last | summary["final"]
        trained = weights if summary["status"] == "succeeded" else None
        if trained is not None:
            self._tensors.load(parsed(trained))
            if self._state is not None:
                self._state.end(state)
            self.elected = exported
        if self._caller is not None:
            updates = int(self.history[-1]["step"]) if self.history else 0
            self._caller.end(summary, self.worst, updates)
        if trained is None:
            raise SessionFailedError(f"{summary['job']} {summary['status']}: {summary['reason']}")


def join(
    model: Any,
    optimizer: Any,
    train_data: Any,
    eval_data: Any = None,
    *,
    epochs: int,
    micro: int | None = None,
    effective: int | None = None,
    seed: int = 0,
    scheduler: Any = None,
    scheduler_every: str = "epoch",
    clip_norm: float | None = None,
    mode: str = "sync",
    delay: int | None = None,
    shuffle: bool | None = None,
    state: Sequence[str] = (),
    state_bytes: int = 0,
    loss_scaling: bool = False,
    threads: int = 1,
    workers: int | None = None,
    fleet_device: str | None = None,
    ps_device: str | None = None,
    ps_bytes_max: int | None = None,
    checkpoints: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 1,
    limits: Mapping[str, Any] | None = None,
    data_patience: str = "1m",
    worst: int = 0,
    callbacks: Sequence[Callback] = (),
    name: str | None = None,
    master: str | None = None,
    token: str | None = None,
    token_file: str | os.PathLike[str] | None = None,
    ca: str | os.PathLike[str] | None = None,
    cert: str | os.PathLike[str] | None = None,
    key: str | os.PathLike[str] | None = None,
    insecure: bool | None = None,
) -> Session:
    """Take part in a job with a training loop of one's own. Use the result in a ``with`` statement.

    Without ``master`` this process has a master, a ps and a worker of its own. With it this process
    is a worker of that master's cluster. The first process submits the job. Others with the same
    ``name`` take part in it as long as it lives, and must describe the same job.

    Args:
        model: A ``torch.nn.Module``. Its values now are the job's first weights.
        optimizer: An optimizer of ``torch.optim`` over the model's parameters. It gives the
            settings; the ps apply the updates, so the loop never calls its ``step``.
        train_data: A data set with ``__len__`` and ``__getitem__``, a ``DataLoader`` of one, or
            :func:`ebbflow.data.source`.
        eval_data: Records on which ``job.evaluate`` measures the model; the same kinds.
        epochs: Passes over ``train_data``.
        micro: Records of a batch. Default: those of the ``DataLoader``.
        effective: Records of an update. Default: ``micro``. More accumulate gradients.
        seed: Seed of the order of records, and of every random number of the loop.
        scheduler: A scheduler of ``torch.optim.lr_scheduler`` that looks at no metrics. The loop
            never calls its ``step``.
        scheduler_every: When the scheduler steps: ``"epoch"`` or ``"step"`` (an update).
        clip_norm: Largest norm of an update's mean gradient.
        mode: ``"sync"``, ``"pipelined"``, ``"bounded"`` or ``"async"``.
        delay: Steps that computing may run ahead of applying (``pipelined`` and ``bounded``).
        shuffle: Whether each epoch has another order. Default: true, unless the ``DataLoader``
            keeps the order of the data set. A source has an order of its own.
        state: Names of buffers that ``forward`` changes beside running statistics of
            normalisations.
        state_bytes: Room for ``job.state`` in bytes, at most 16 MiB. Each pull and push carries
            twice as many. Default: none.
        loss_scaling: Whether the job has a loss scale, in place of ``torch.amp.GradScaler``, which
            a loop in ``torch.float16`` needs. See ``job.loss_scale``.
        threads: Threads of torch for the loop. Another number gives other bits.
        workers: Most processes that take part at a time. Further ones stand by. Default: 64.
        fleet_device: Kind of device that processes compute on, ``"cuda"`` or ``"cpu"``. Others
            stand by. It is the device of each process's model. Default: any.
        ps_device: Where the ps of this process keeps the model, without a cluster: ``"cuda"``, in
            memory of the GPU on which the model computes, or ``"cpu"``. It changes no bit. With a
            cluster it has no effect. Default: ``"cpu"``.
        ps_bytes_max: Bytes of that GPU that the ps may take. Default: half of those that are free.
        checkpoints: Folder or URL for checkpoints, which the master and every ps see. From it a job
            goes on that loses a ps. Default: none; such a job begins anew.
        checkpoint_every: Epochs between two checkpoints.
        limits: Settings of the section ``[limits]`` of a job file, such as
            ``{"pull_timeout": "60s"}``.
        data_patience: Time during which a failed request for data by URL is repeated, with waits
            that double from 0.2s. Then the task fails. At most 10min; a few attempts are made in
            any case. It is for :func:`ebbflow.data.source`.
        worst: Number of records with the largest losses in the last evaluation that the results
            list, at most 1000. The function of ``job.evaluate`` tells the losses. Default: none.
        callbacks: Objects that hear the events of the job, in one elected process at a time. Each
            process gives its own.
        name: Name of the job: letters, digits, ``-``, ``_`` and ``.``. In ``ebb run SCRIPT.py`` and
            ``ebb submit SCRIPT.py`` each job of a script needs a name of its own. Default: the name
            of a submitted script (the variable ``EBBFLOW_JOB``), else ``"script"``.
        master: URL of the cluster's master. Default: the variable ``EBBFLOW_MASTER``, where a
            launcher has set it.
        token: The token to show to the cluster, of the role ``script``. Default: the one in
            ``token_file``.
        token_file: File with the token. Default: the variable ``EBB_TOKEN_FILE``.
        ca: Certificates of the cluster's authority (PEM). Default: the variable ``EBB_TLS_CA``;
            without one, connections are not encrypted.
        cert: This process's certificate (PEM). Default: the variable ``EBB_TLS_CERT``.
        key: The private key of ``cert`` (PEM). Default: the variable ``EBB_TLS_KEY``.
        insecure: Show the token to other machines without encryption. Default: the variable
            ``EBB_INSECURE``.

    Raises:
        AccessError: A file with keys cannot be read, or the keys do not belong together.
        ModuleNotFoundError: PyTorch is not installed.
        TypeError: The model or the data is of a kind that cannot be trained.
        ValueError: A setting cannot be kept, or the settings contradict each other.
        UntranslatableError: The ps cannot apply the optimizer or the scheduler.
    """
    if scheduler_every not in ("epoch", "step"):
        raise ValueError(f'scheduler_every = {scheduler_every!r}: expected "epoch" or "step"')
    if mode not in _MODES:
        raise ValueError(f"mode = {mode!r}: expected one of {', '.join(_MODES)}")
    if not isinstance(model, Engine) and importlib.util.find_spec("torch") is None:
        raise ModuleNotFoundError("ebbflow.join needs PyTorch: pip install 'ebbflow[torch]'")
    state_bytes = room(state_bytes)
    if name is None:
        name = os.environ.get("EBBFLOW_JOB") or "script"
    engine = model if isinstance(model, Engine) else Torch(model, state)
    tensors = engine.tensors
    train, evaluation, data = _records(engine, train_data, eval_data, seed, shuffle)
    micro = micro if micro is not None else train.batch_size
    if micro is None:
        other = "" if isinstance(train_data, Source) else ", or a DataLoader"
        raise ValueError(f"micro: missing; give the records of a batch, as in micro=8{other}")
    per_update = max(1, math.ceil((effective or micro) / max(1, micro)))
    steps_per_epoch = 0
    if engine.counts_steps or scheduler is not None:
        # A source opens its files for it.
        records = len(train_data if isinstance(train_data, Source) else train)
        steps_per_epoch = math.ceil(math.ceil(records / max(1, micro)) / per_update)
    settings = engine.settings(optimizer, steps_per_epoch * epochs)
    if worst and evaluation is None:
        raise ValueError(
            f"worst = {worst} lists records of eval_data, which join did not get; give it, or "
            "remove worst"
        )
    if clip_norm is not None:
        settings["clip_norm"] = float(clip_norm)
    if scheduler is not None:
        every = 1 if scheduler_every == "step" else steps_per_epoch
        steps = steps_per_epoch * epochs
        schedules = schedule_settings(scheduler, optimizer, steps, every)
        settings |= optimizer_settings(optimizer, tensors.names(), schedules)
    spec: dict[str, Any] = {
        "name": name,
        "epochs": epochs,
        "seed": seed,
        "model": {"builtin": "python", "loss": "module"},
        "data": data,
        "batch": {"micro": micro, "effective": effective},
        "optimizer": settings,
        "consistency": {"mode": mode, "delay": delay},
        "limits": {"stall": _PATIENT, **(limits or {})},
    }
    if worst:
        spec["evaluation"] = {"worst": worst}
    if workers is not None:
        spec["fleet"] = {"workers": {"min": 1, "max": workers}}
    device = engine.device()
    if checkpoints is not None:
        spec["checkpoint"] = {"url": _place(checkpoints), "every_epochs": checkpoint_every}
    worker, script, agent = None, 0, None
    if master is None:
        master = os.environ.get("EBBFLOW_MASTER")
        worker = os.environ.get("EBBFLOW_WORKER") if master is not None else None
        script = int(os.environ.get("EBBFLOW_SCRIPT", "0")) if master is not None else 0
        agent = agent_of(os.environ) if master is not None else None
    check_kind(fleet_device, device[0], alone=master is None)
    if fleet_device is not None and master is not None:
        spec.setdefault("fleet", {})["device"] = fleet_device
    given = {"token": token, "token_file": token_file, "ca": ca, "cert": cert, "key": key}
    keys = [argument for argument, value in given.items() if value is not None]
    if master is None and keys:
        raise ValueError(
            f"{', '.join(keys)}: of use only with a cluster; set master or EBBFLOW_MASTER"
        )
    shown = None
    if master is not None:
        shown = secrets(token, token_file, ca, cert, key, insecure)
        master = full(master, shown)
    if worker is not None and name in _JOINED:
        raise ValueError(
            f"name = {name!r}: this process has joined a job of that name already; in `ebb run` "
            "and `ebb submit` each job of a script needs a name of its own"
        )
    constants = tensors.described_constants()
    spec["model"]["options"] = {"tensors": tensors.fingerprint(constants)}
    if engine.compiled:
        # Compiled code rounds differently, so one job has it in all processes or in none.
        spec["model"]["options"]["compiled"] = True
    if loss_scaling:
        spec["model"]["options"]["loss_scaling"] = True
    if state_bytes:
        spec["model"]["options"]["state_bytes"] = state_bytes
    scale = [_native.loss_scale()] if loss_scaling else []
    keep_free_memory()
    cuda = engine.cuda()
    of_ps = None
    if master is None:
        of_ps = bytes_of_ps(ps_device, ps_bytes_max, device[0] if cuda is not None else "cpu")
    if cuda is not None:
        load_compiler()
    before = engine.use_threads(threads)
    try:
        session = _native.Session(
            json.dumps(spec),
            tensors.described() + scale + described(state_bytes),
            constants,
            threads,
            engine.numerics(threads),
            master,
            worker,
            shown,
            script,
            device,
            agent,
            data_patience,
            _loads_ahead(train) or _loads_ahead(evaluation),
            cuda,
            of_ps,
        )
        caller = None
        if callbacks:
            vote = Alone() if master is None else Elected(name, master, shown or {}, script, agent)
            caller = Caller(name, callbacks, vote)
    except BaseException:
        engine.use_threads(before)
        raise
    if worker is not None:
        _JOINED.add(name)
    kind = engine.session or Session
    kept = State(state_bytes) if state_bytes else None
    leaving = f"this process leaves the job `{name}` and hands its records back"
    if master is None:
        leaving = f"the job `{name}` ends with this process"
    return kind(session, engine, train, evaluation, seed, before, caller, kept, leaving)


def _records(
    engine: Engine, train_data: Any, eval_data: Any, seed: int, shuffle: bool | None
) -> tuple[Any, Any, dict[str, Any]]:
    """Return the records that train and those that are measured, and the section ``[data]``."""
    refuse_inside(train_data, "train_data")
    refuse_inside(eval_data, "eval_data")
    if isinstance(train_data, Source) or isinstance(eval_data, Source):
        data = section_of(train_data, eval_data, shuffle)
        measures = eval_data is not None or "validation_fraction" in data
        leased = Leased(engine.array)
        return leased, leased if measures else None, data
    train = engine.records(train_data, "train_data", seed)
    evaluation = None if eval_data is None else engine.records(eval_data, "eval_data", seed)
    order = getattr(train, "order", {"shuffle": "records"})
    shuffles = train.shuffled if shuffle is None else shuffle
    data = {
        "format": "index",
        "train": {"files": _files(train)},
        **(order if shuffles else {"shuffle": "none"}),
    }
    if evaluation is not None:
        data["validation"] = {"files": _files(evaluation)}
    return train, evaluation, data


def _loaded(records: Any, epoch: int, request: Any) -> Any:
    """Return the records of a request: those that the worker has read, or those of the user."""
    if isinstance(records, Leased):
        return records.columns(request.columns())
    return records.load(epoch, request.records)


def _loads_ahead(records: Any) -> bool:
    """Return whether records are loaded before the loop asks for them."""
    return getattr(records, "loads_ahead", False)


def _files(records: Any) -> list[str]:
    """Return the number of records of each data shard, of which most data sets have one."""
    return [str(count) for count in getattr(records, "shards", [len(records)])]


def _place(checkpoints: str | os.PathLike[str]) -> str:
    """Return a URL as it is, and a path from the root."""
    place = os.fspath(checkpoints)
    return place if "://" in place else str(Path(place).absolute())


def _metrics_in(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in KNOWN}


def _checked(measured: Any) -> Mapping[str, Any]:
    if not isinstance(measured, Mapping) or "loss" not in measured:
        raise TypeError(
            "job.evaluate: expected a function that returns a dictionary with `loss` and other "
            f"means over the batch, found {_shown(measured)}"
        )
    reserved = next((name for name in measured if not isinstance(name, str) or name in KNOWN), None)
    if reserved is not None:
        raise TypeError(f"job.evaluate: a metric needs another name than {reserved!r}")
    return measured


def _shown(value: Any) -> str:
    shape = getattr(value, "shape", None)
    kind = type(value).__name__
    return kind if shape is None else f"{kind} of shape {tuple(shape)}"
