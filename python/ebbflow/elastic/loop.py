"""Calls ``elastic_train(dataset)`` with the batches that are leased to this process.

``optimizer.step()`` in the loop, ``optimizer.apply_gradients(..)`` in TensorFlow, only says that
the gradients are complete. The job gets them when the function with ``@elastic_allreduce`` has
returned, so a function that fails counts for nothing.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NoReturn

from ebbflow import session
from ebbflow.elastic.library import Library, Torch, library_of
from ebbflow.errors import SessionError, UnsupportedError

#: The loop that :func:`run` is in.
_CURRENT: ContextVar[Loop | None] = ContextVar("ebbflow.elastic", default=None)

#: Settings of ``join`` that :func:`run` takes from elsewhere.
_REGISTERED = {"model", "optimizer", "scheduler", "scheduler_every"}


class Loop:
    """One call of :func:`run`.

    Attributes:
        model: The registered model.
        optimizer: The registered optimizer. Its step is replaced while batches come.
        scheduler: The registered scheduler, or ``None``.
        scheduler_every: When the scheduler steps.
        job: The session, once the loop has asked for its first batch.
        library: What the loop is written in, once it has asked for its first batch.
        loss: The loss of the current batch: the sum of what gradients were asked for. ``None``
            before the first time, or if it was no number.
        merging: Whether a function with ``@elastic_allreduce`` runs.
        stepped: Whether that function has called the step of the optimizer.
    """

    def __init__(self, load_checkpoint: Callable[[Any], object] | None) -> None:
        self.model: Any = None
        self.optimizer: Any = None
        self.scheduler: Any = None
        self.scheduler_every = "epoch"
        self.job: session.Session | None = None
        self.library: Library = Torch()
        self.loss: float | None = None
        self.merging = False
        self.stepped = False
        self._load_checkpoint = load_checkpoint
        self._rates: list[float] = []

    def join(self, train_data: Any, eval_data: Any, options: Mapping[str, Any]) -> session.Session:
        """Take part in the job with what was registered."""
        for name in ("model", "optimizer"):
            if getattr(self, name) is None:
                raise SessionError(
                    f"elastic_train asks for a batch before ElasticBroadcastObject.set_{name}"
                    f"({name}); call it before the loop"
                )
        if self._load_checkpoint is not None:
            self._load_checkpoint(self.model)
        self.library = library_of(self.model)
        self.job = self.library.join(self, train_data, eval_data, options)
        self._rates = self.library.rates(self.optimizer)
        return self.job

    def begin_batch(self) -> None:
        """Forget the batch before."""
        self.loss = None
        self.stepped = False
        self.library.begin_batch()

    def note(self, loss: float) -> None:
        """Add a number whose gradients are asked for to the loss of the batch."""
        self.loss = (self.loss or 0.0) + loss

    def check_step(self) -> None:
        """Check that the loop may say now that the gradients of the batch are complete."""
        if not self.merging:
            raise SessionError(
                f"{self.library.step} is called outside of a function with @elastic_allreduce, "
                "which hands the gradients to the job; put the call into one"
            )
        rates = self.library.rates(self.optimizer)
        if rates != self._rates:
            raise SessionError(
                f"the loop changed the learning rate from {self._rates} to {rates}, and the job "
                f"has its own; {self.library.schedule}"
            )

    def push(self, name: str) -> None:
        """Hand the gradients of the batch to the job, which reports the batch as finished."""
        if not self.stepped:
            raise SessionError(
                f"{name} has @elastic_allreduce and returned without a call of "
                f"{self.library.step} of the registered optimizer, so its gradients are not "
                "complete"
            )
        if self.loss is None:
            raise SessionError(
                f"{name}: the loss of the batch is not known; call {self.library.losses} of the "
                f"mean loss over the batch, a tensor of one element, before {self.library.step}"
            )
        assert self.job is not None
        self.library.push(self.job, self.loss)
        self.stepped = False


class Dataset:
    """The batches that are leased to this process, over all epochs of the job.

    ``for features, labels in dataset`` takes batches of pairs apart; ``batch["name"]`` and
    ``batch.records`` are those of :class:`ebbflow.Batch`. It can be iterated once.
    """

    def __init__(
        self,
        loop: Loop,
        batches: Callable[[], Iterator[session.Batch]],
    ) -> None:
        self._loop = loop
        self._batches = batches

    @property
    def job(self) -> session.Session:
        """The session.

        Raises:
            SessionError: The loop has not asked for a batch yet.
        """
        if self._loop.job is None:
            raise SessionError("dataset.job is there from the first batch on")
        return self._loop.job

    def __iter__(self) -> Iterator[session.Batch]:
        if self._loop.job is not None:
            raise SessionError(
                "the dataset of elastic_train has the batches of all epochs, and was iterated "
                "before; give `epochs` to run, and remove the loop over epochs"
            )
        return self._batches()


class ElasticBroadcastObject:
    """Registers what a loop trains. Each process gets the weights and the updates of the job."""

    @staticmethod
    def set_model(model: Any) -> None:
        """Register the ``torch.nn.Module`` or ``keras.Model`` to train.

        The first process gives the first weights.
        """
        current("ElasticBroadcastObject.set_model").model = model

    @staticmethod
    def set_optimizer(optimizer: Any) -> None:
        """Register an optimizer of ``torch.optim`` or ``keras.optimizers``.

        The parameter servers have its state.

        Raises:
            UnsupportedError: It is Horovod's.
        """
        loop = current("ElasticBroadcastObject.set_optimizer")
        if type(optimizer).__module__.startswith("horovod"):
            raise UnsupportedError(
                "set_optimizer got an optimizer of Horovod, which merges gradients itself; remove "
                "hvd.DistributedOptimizer, and give the optimizer of torch.optim or "
                "keras.optimizers"
            )
        loop.optimizer = optimizer

    @staticmethod
    def set_scheduler(scheduler: Any, every: str = "epoch") -> None:
        """Register a scheduler of ``torch.optim.lr_scheduler``. The loop never steps it.

        Args:
            scheduler: The scheduler of the registered optimizer.
            every: When it steps: ``"epoch"`` or ``"step"`` (an update).
        """
        loop = current("ElasticBroadcastObject.set_scheduler")
        loop.scheduler, loop.scheduler_every = scheduler, every

    @staticmethod
    def set_session(session: Any) -> NoReturn:
        """Refuse a session of TensorFlow 1.

        Raises:
            UnsupportedError: Always.
        """
        raise UnsupportedError(
            "ElasticBroadcastObject.set_session: loops of TensorFlow 1 are not trained; write the "
            "loop with tf.GradientTape or in PyTorch, and call set_model and set_optimizer"
        )


def current(name: str) -> Loop:
    """Return the loop that :func:`run` is in.

    Raises:
        SessionError: There is none. The message has ``name``.
    """
    loop = _CURRENT.get()
    if loop is None:
        raise SessionError(f"{name} belongs into the function that ebbflow.elastic.run calls")
    return loop


def run(
    elastic_train: Callable[[Dataset], Any],
    train_data: Any,
    eval_data: Any = None,
    *,
    measure: Callable[[Any, session.Batch], Mapping[str, float]] | None = None,
    load_checkpoint: Callable[[Any], object] | None = None,
    save_checkpoint: Callable[[Any, session.Session], object] | None = None,
    **options: Any,
) -> Any:
    """Call a loop of ElasticDL as a part of a job, and return what it returns.

    Args:
        elastic_train: Registers model and optimizer, and iterates its argument. Returning earlier
            means leaving the job: other processes train the rest.
        train_data: A data set with ``__len__`` and ``__getitem__``, or a ``DataLoader`` of one. For
            a model of Keras what :func:`ebbflow.keras.join` takes.
        eval_data: Records on which ``measure`` measures the model at the end of each epoch.
        measure: Gets the registered model and a batch, and returns means as the function of
            :meth:`ebbflow.Session.evaluate` does.
        load_checkpoint: Gets the registered model before the first batch, to load weights into it.
            They count only in the process that begins the job.
        save_checkpoint: Gets the model with its final weights, and the session, in one process of
            a job that has ended.
        options: Settings of :func:`ebbflow.join`, such as ``epochs`` and ``micro``.

    Raises:
        TypeError: ``options`` has a name that :func:`ebbflow.join` does not have.
        ValueError: Only one of ``eval_data`` and ``measure`` is given.
        SessionError: The loop does not do what a job needs.
        SessionFailedError: The job has failed or was cancelled.
    """
    known = inspect.signature(session.join).parameters.keys() - _REGISTERED
    for name in options:
        if name in {"scheduler", "scheduler_every"}:
            raise TypeError(f"run: give {name} to ElasticBroadcastObject.set_scheduler")
        if name not in known:
            raise TypeError(f"run has no setting `{name}`; it has those of ebbflow.join")
    if (eval_data is None) != (measure is None):
        raise ValueError("run: eval_data and measure belong together; give both, or none")
    loop = Loop(load_checkpoint)

    with contextlib.ExitStack() as stack:

        def batches() -> Iterator[session.Batch]:
            job = stack.enter_context(loop.join(train_data, eval_data, options))
            stack.enter_context(loop.library.replaced(loop))
            return _batches(loop, job, measure)

        token = _CURRENT.set(loop)
        stack.callback(_CURRENT.reset, token)
        value = elastic_train(Dataset(loop, batches))
        if loop.job is None:
            raise SessionError("elastic_train returned without iterating its dataset")
        if save_checkpoint is not None and loop.job.elected:
            save_checkpoint(loop.model, loop.job)
    return value


def _batches(
    loop: Loop,
    job: session.Session,
    measure: Callable[[Any, session.Batch], Mapping[str, float]] | None,
) -> Iterator[session.Batch]:
    for epoch in job.epochs():
        for batch in epoch:
            loop.begin_batch()
            yield batch
        if measure is not None:
            job.evaluate(functools.partial(measure, loop.model))
