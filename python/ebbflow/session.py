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
from typing import Any

from ebbflow import _native
from ebbflow._device import check_kind
from ebbflow._memory import keep_free_memory
from ebbflow._reach import agent_of, full, secrets
from ebbflow._redaction import redacted
from ebbflow._vote import Alone, Elected
from ebbflow.callbacks import Callback, Caller
from ebbflow.engine import Engine, Torch
from ebbflow.errors import SessionError, SessionFailedError
from ebbflow.optimizers import schedule_settings
from ebbflow.records import EVALUATION
from ebbflow.status import Event
from ebbflow.tensors import parsed

_LOG = logging.getLogger("ebbflow")

# Longest time that a debugger may hold the only process of a job.
_PATIENT = "24h"

# Names of the jobs that this process has joined in a run of `ebb run`.
_JOINED: set[str] = set()

_MODES = ("sync", "pipelined", "bounded", "async")


class Batch:
    """Records that are leased to this process, collated.

    ``for x, y in epoch`` and ``batch["name"]`` reach what the collate function returned.

    Attributes:
        data: What the collate function returned.
        records: Numbers of the records in the data set, in the order of the batch.
        epoch: Epoch of the batch, from 0.
        step: Step of the job to which the batch belongs, from 0. 0 in an evaluation.
    """

    def __init__(
        self,
        data: Any,
        records: list[int],
        epoch: int,
        step: int,
        key: Callable[[], Any] = lambda: None,
    ) -> None:
        self.data = data
        self.records = records
        self.epoch = epoch
        self.step = step
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
    ) -> None:
        self._session = session
        self._process = os.getpid()
        self._caller = caller
        self._threads = threads
        self._engine = engine
        self._tensors = engine.tensors
        self._train = train
        self._evaluation = evaluation
        self._seed = seed
        self._epoch: int | None = None
        # The request that the loop works on, and the one that waits for the loop.
        self._current: Any = None
        self._pending: Any = None
        self._measured: dict[int, dict[str, float]] = {}
        self.elected = False
        self.metrics: dict[str, float] = {}
        self.history: list[dict[str, float]] = []
        self.summary: dict[str, Any] | None = None
        self.workers = 1

    @property
    def model_sha256(self) -> str | None:
        """SHA-256 of the final weights as ``model.safetensors``; ``None`` before the end."""
        return None if self.summary is None else self.summary["model_sha256"]

    def __enter__(self) -> Session:
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
        if self._current is not None:
            reason = "the loop ended before job.step(loss)"
            if error is not None:
                reason = "".join(traceback.format_exception(kind, error, trace)).strip()
            self._current.fail(redacted(reason))
            self._current = None
        self._pending = None
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
                        f"join got eval_data, and the loop did not call job.evaluate after epoch "
                        f"{message.epoch}; call it at the end of each epoch, or leave out eval_data"
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
            SessionError: There is no batch, or it was stepped already.
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
        self._tensors.backward(loss, self._current)
        return self.push(float(loss.detach()))

    def push(self, loss: float) -> float:
        """Hand gradients to the job that a backward pass of the loop's own has computed.

        The gradients of the batch's mean loss are in ``grad`` of the parameters. Afterwards they
        are ``None``.

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
        self._current = None
        request.answer(loss)
        return loss

    def evaluate(self, function: Callable[[Batch], Mapping[str, float]]) -> dict[str, float]:
        """Measure the model on ``eval_data`` at the end of an epoch, together with other processes.

        Args:
            function: Returns the means of its metrics over a batch, by name: ``loss`` and any of
                ``accuracy``, ``top5`` (or another k), ``log_loss``, ``perplexity`` (the mean
                negative log likelihood), ``mae``, ``mse`` and ``rmse`` (the mean square). It is
                called without gradients, and with the model in evaluation mode.

        Returns:
            The metrics over all records, the same ones in every process. Empty if the job went
            back to an earlier epoch meanwhile.

        Raises:
            SessionError: The job has no ``eval_data``, or no epoch has begun.
            SessionFailedError: The job has failed or was cancelled.
        """
        if self._evaluation is None:
            raise SessionError("job.evaluate needs eval_data, which join did not get")
        epoch = self._epoch
        if epoch is None:
            raise SessionError("job.evaluate belongs after an epoch of job.epochs()")
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
                data = self._train.load(epoch, records)
                self._tensors.bind(message)
            except BaseException:
                self._current = None
                message.fail(redacted(traceback.format_exc().strip()))
                raise
            self._engine.seed(message.key)
            key = functools.partial(self._engine.key, message.key)
            yield Batch(data, records, epoch, message.step, key)

    def _answer(self, request: Any, function: Callable[[Batch], Mapping[str, float]]) -> None:
        records = request.records
        try:
            data = self._evaluation.load(EVALUATION, records)
            self._tensors.bind(request)
            self._engine.seed(self._seed, EVALUATION, records[0])
            with self._engine.measuring():
                measured = function(Batch(data, records, request.epoch, 0))
            means = _means(measured)
            loss = means.pop("loss")
            count = len(records)
            metrics = [(name, value * count, count) for name, value in means.items()]
            request.answer(loss * count, metrics)
        except BaseException:
            request.fail(redacted(traceback.format_exc().strip()))
            raise

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise SessionError(
                f"process {os.getpid()} was forked from process {self._process}, which joined the "
                "job, and has no part in it; call ebbflow.join in the process that trains"
            )

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
            if not isinstance(message, tuple):
                return message
            kind, *facts = message
            if kind == "broken":
                raise SessionFailedError(facts[0])
            if kind == "ended":
                self._end(json.loads(facts[0]), facts[1], facts[2])
                return "ended"
            event = json.loads(facts[0])
            if self._caller is not None:
                self._caller.event(Event(event))
            if event["event"] == "eval":
                return self._note(event)
            if event["event"] == "train":
                self.workers = int(event["workers"])
            if event["event"] == "rewind":
                self._forget(event["version"])
            elif event["event"] == "warning":
                _LOG.warning("%s", event["message"])

    def _note(self, event: dict[str, Any]) -> tuple[str, int]:
        known = {"event", "sequence", "unix_ms"}
        measured = {name: value for name, value in event.items() if name not in known}
        epoch = int(event["epoch"])
        self.history = [before for before in self.history if before["epoch"] != epoch]
        self.history.append(measured)
        self._measured[epoch] = {
            name: value for name, value in measured.items() if name not in {"epoch", "step"}
        }
        return ("measured", epoch)

    def _forget(self, version: int) -> None:
        self.history = [before for before in self.history if before["step"] <= version]
        kept = {int(before["epoch"]) for before in self.history}
        self._measured = {epoch: self._measured[epoch] for epoch in kept}

    def _end(self, summary: dict[str, Any], weights: bytes | None, exported: bool) -> None:
        self.summary = summary
        self.metrics = dict(summary["final"])
        trained = weights if summary["status"] == "succeeded" else None
        if trained is not None:
            self._tensors.load(parsed(trained))
            self.elected = exported
        if self._caller is not None:
            self._caller.end(summary)
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
    threads: int = 1,
    workers: int | None = None,
    fleet_device: str | None = None,
    checkpoints: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 1,
    limits: Mapping[str, Any] | None = None,
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
        train_data: A data set with ``__len__`` and ``__getitem__``, or a ``DataLoader`` of one.
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
            keeps the order of the data set.
        state: Names of buffers that ``forward`` changes beside running statistics of
            normalisations.
        threads: Threads of torch for the loop. Another number gives other bits.
        workers: Most processes that take part at a time. Further ones stand by. Default: 64.
        fleet_device: Kind of device that processes compute on, ``"cuda"`` or ``"cpu"``. Others
            stand by. It is the device of each process's model. Default: any.
        checkpoints: Folder or URL for checkpoints, which the master and every ps see. From it a job
            goes on that loses a ps. Default: none; such a job begins anew.
        checkpoint_every: Epochs between two checkpoints.
        limits: Settings of the section ``[limits]`` of a job file, such as
            ``{"pull_timeout": "60s"}``.
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
    if name is None:
        name = os.environ.get("EBBFLOW_JOB") or "script"
    engine = model if isinstance(model, Engine) else Torch(model, state)
    tensors = engine.tensors
    train = engine.records(train_data, "train_data", seed)
    evaluation = None if eval_data is None else engine.records(eval_data, "eval_data", seed)
    micro = micro if micro is not None else train.batch_size
    if micro is None:
        raise ValueError("micro: missing; give the records of a batch, or a DataLoader")
    shuffle = train.shuffled if shuffle is None else shuffle
    per_update = max(1, math.ceil((effective or micro) / max(1, micro)))
    steps_per_epoch = math.ceil(math.ceil(len(train) / max(1, micro)) / per_update)
    settings = engine.settings(optimizer, steps_per_epoch * epochs)
    if clip_norm is not None:
        settings["clip_norm"] = float(clip_norm)
    if scheduler is not None:
        every = 1 if scheduler_every == "step" else steps_per_epoch
        steps = steps_per_epoch * epochs
        settings["schedule"] = schedule_settings(scheduler, optimizer, steps, every)
    order = getattr(train, "order", {"shuffle": "records"})
    data: dict[str, Any] = {
        "format": "index",
        "train": {"files": _files(train)},
        **(order if shuffle else {"shuffle": "none"}),
    }
    if evaluation is not None:
        data["validation"] = {"files": _files(evaluation)}
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
    keep_free_memory()
    before = engine.use_threads(threads)
    try:
        session = _native.Session(
            json.dumps(spec),
            tensors.described(),
            constants,
            threads,
            None if master is None else engine.numerics(threads),
            master,
            worker,
            shown,
            script,
            device,
            agent,
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
    return kind(session, engine, train, evaluation, seed, before, caller)


def _files(records: Any) -> list[str]:
    """Return the number of records of each data shard, of which most data sets have one."""
    return [str(count) for count in getattr(records, "shards", [len(records)])]


def _place(checkpoints: str | os.PathLike[str]) -> str:
    """Return a URL as it is, and a path from the root."""
    place = os.fspath(checkpoints)
    return place if "://" in place else str(Path(place).absolute())


def _means(measured: Any) -> dict[str, float]:
    if not isinstance(measured, Mapping) or "loss" not in measured:
        raise TypeError(
            "job.evaluate: expected a function that returns a dictionary with `loss` and other "
            f"means over the batch, found {_shown(measured)}"
        )
    return {str(name): float(value) for name, value in measured.items()}


def _shown(value: Any) -> str:
    shape = getattr(value, "shape", None)
    kind = type(value).__name__
    return kind if shape is None else f"{kind} of shape {tuple(shape)}"
