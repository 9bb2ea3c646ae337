"""A process's part in a job whose loop is written in JAX."""

from __future__ import annotations

from typing import Any

from ebbflow import session
from ebbflow.errors import SessionError
from ebbflow.jax.engine import Jax


class Session(session.Session):
    """A process's part in a job, from :func:`join`. The rest is as in :class:`ebbflow.Session`."""

    @property
    def params(self) -> Any:
        """The parameters: in the loop those of the batch, after the job the final ones."""
        return self._tensors.params

    def step(self, loss: Any, gradients: Any = None) -> float:
        """Hand the gradients of a batch's mean loss to the job.

        Args:
            loss: Mean loss over the records of the batch: a number, or an array of one element.
            gradients: Its gradients with respect to ``job.params``, of the same structure.

        Returns:
            The loss.

        Raises:
            SessionError: There is no batch, or it was stepped already.
            TypeError: ``gradients`` do not fit the parameters.
        """
        request = self._current
        if request is None:
            raise SessionError(
                "job.step without a batch: call it once for each batch of `for batch in epoch`"
            )
        value = float(loss)
        self._tensors.collect(request, gradients)
        self._hand_over(request, value)
        return value

    def push(self, loss: float) -> float:
        """Refuse: gradients of JAX lie in no parameters.

        Raises:
            SessionError: Always.
        """
        raise SessionError("job.push is for PyTorch; call job.step(loss, gradients)")


def join(
    params: Any,
    optimizer: Any,
    train_data: Any,
    eval_data: Any = None,
    *,
    epochs: int,
    micro: int,
    **options: Any,
) -> Session:
    """Take part in a job with a loop in JAX. Use the result in a ``with`` statement.

    The rules of :func:`ebbflow.join` hold. ``job.step(loss, gradients)`` takes the place of a
    backward pass, and ``job.params`` that of the model.

    Args:
        params: The parameters: a pytree of float32 arrays. Its values now are the job's first ones.
        optimizer: ``functools.partial`` of ``optax.sgd``, ``optax.adam`` or ``optax.adamw`` with
            its arguments. The learning rate may be a schedule. The ps apply the updates.
        train_data: A tuple or a dictionary of arrays with one entry for each record, or an object
            with ``__len__`` and ``__getitem__``, or :func:`ebbflow.data.source`.
        eval_data: Records on which ``job.evaluate`` measures; the same kinds.
        epochs: Passes over ``train_data``.
        micro: Records of a batch.
        options: Other settings of :func:`ebbflow.join`, except ``scheduler``, ``scheduler_every``,
            ``state`` and ``threads``.

    Raises:
        TypeError: The data or an option is of a kind that a loop in JAX does not have.
        ValueError: A setting cannot be kept, or XLA would compute with several threads.
        UntranslatableError: The ps cannot apply the optimizer.
    """
    for name in ("scheduler", "scheduler_every", "state", "threads"):
        if name in options:
            raise TypeError(f"ebbflow.jax.join has no `{name}`: {_INSTEAD[name]}")
    joined = session.join(
        Jax(params, Session),
        optimizer,
        train_data,
        eval_data,
        epochs=epochs,
        micro=micro,
        **options,
    )
    assert isinstance(joined, Session)
    return joined


_INSTEAD = {
    "scheduler": "give a schedule of optax as the learning rate",
    "scheduler_every": "a schedule of optax counts updates",
    "state": "all arrays of `params` are trained; use normalisations without running values",
    "threads": "XLA computes with one thread",
}
