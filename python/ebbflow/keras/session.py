"""A process's part in a job whose model is one of Keras."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ebbflow import session
from ebbflow.errors import SessionError
from ebbflow.keras.engine import engine_of


class Session(session.Session):
    """A process's part in a job, from :func:`join`. The rest is as in :class:`ebbflow.Session`."""

    def step(self, loss: Callable[[], Any]) -> float:
        """Compute the gradients of a batch's mean loss and hand them to the job.

        Args:
            loss: A function without arguments that calls the model with ``training=True`` and
                returns the mean loss over the records of the batch. Losses of regularizers, which
                are in ``model.losses``, are added by it.

        Returns:
            The loss.

        Raises:
            SessionError: There is no batch, or it was stepped already.
            TypeError: ``loss`` is no function, or returns no tensor of one element.
            WrittenError: The loop applied the optimizer, or wrote a variable itself.
        """
        request = self._current
        if request is None:
            raise SessionError(
                "job.step without a batch: call it once for each batch of `for batch in epoch`"
            )
        if not callable(loss):
            raise TypeError(
                "job.step(loss): expected a function that returns the mean loss over the batch, "
                f"such as `lambda: loss_of(y, model(x, training=True))`, found "
                f"{type(loss).__name__}"
            )
        engine: Any = self._engine
        value: float = engine.gradients(loss, request)
        engine.check()
        self._hand_over(request, value)
        return value

    def push(self, loss: float) -> float:
        """Refuse: the session computes the gradients.

        Raises:
            SessionError: Always.
        """
        raise SessionError("job.push is for loops in PyTorch; call job.step(function)")


def join(
    model: Any,
    optimizer: Any,
    train_data: Any,
    eval_data: Any = None,
    *,
    epochs: int,
    micro: int | None = None,
    state: Sequence[str] = (),
    collate: Callable[[list[Any]], Any] | None = None,
    **options: Any,
) -> Session:
    """Take part in a job with a model of Keras. Use the result in a ``with`` statement.

    The rules of :func:`ebbflow.join` hold. ``job.step`` takes a function that returns the loss.

    Args:
        model: A ``keras.Model`` that has its variables. Its values now are the job's first ones.
            The backend of Keras is ``torch`` or ``tensorflow``.
        optimizer: An optimizer of ``keras.optimizers``. Its learning rate may be a
            ``LearningRateSchedule``. The ps apply the updates.
        train_data: A tuple or a dictionary of arrays with one entry for each record, an object with
            ``__len__`` and ``__getitem__``, :func:`ebbflow.data.source`, or
            :class:`ebbflow.keras.Shards` of ``tf.data``. On the backend ``torch`` also a
            ``DataLoader``.
        eval_data: Records on which ``job.evaluate`` measures; the same kinds.
        epochs: Passes over ``train_data``.
        micro: Records of a batch. Default: those of the ``DataLoader``.
        state: Paths of variables that a call of the model changes, beside moving statistics of
            ``BatchNormalization`` and seeds.
        collate: Makes a batch of a list of records. Default: they are stacked.
        options: Other settings of :func:`ebbflow.join`, except ``scheduler`` and
            ``scheduler_every``. On TensorFlow ``threads`` is 1.

    Raises:
        TypeError: The model, the data or an option is of a kind that cannot be trained.
        ValueError: A setting cannot be kept, or TensorFlow would compute with several threads.
        UntranslatableError: The ps cannot apply the optimizer.
    """
    for name in ("scheduler", "scheduler_every"):
        if name in options:
            raise TypeError(
                f"ebbflow.keras.join has no `{name}`: give a LearningRateSchedule as the learning "
                "rate of the optimizer"
            )
    engine = engine_of(model, state, Session, collate)
    if options.get("threads", 1) != 1 and not engine.has_threads:
        raise ValueError(f"threads = {options['threads']}: TensorFlow computes with one thread")
    joined = session.join(
        engine, optimizer, train_data, eval_data, epochs=epochs, micro=micro, **options
    )
    assert isinstance(joined, Session)
    return joined
