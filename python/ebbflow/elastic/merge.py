"""``@elastic_allreduce``: a function that merges the gradients of a batch, exactly once."""

from __future__ import annotations

import functools
import logging
import random
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

from ebbflow.elastic.loop import current
from ebbflow.errors import AttemptsError, SessionError, UnsupportedError
from ebbflow.tensors import Tensors

_LOG = logging.getLogger("ebbflow")

_Parameters = ParamSpec("_Parameters")
_Value = TypeVar("_Value")


@overload
def elastic_allreduce(
    function: Callable[_Parameters, _Value],
    framework: str = "torch",
    *,
    retries: int = 5,
    wait_secs: float = 1.0,
    retry_on: tuple[type[Exception], ...] = (ConnectionError, TimeoutError),
) -> Callable[_Parameters, _Value]: ...


@overload
def elastic_allreduce(
    function: None = None,
    framework: str = "torch",
    *,
    retries: int = 5,
    wait_secs: float = 1.0,
    retry_on: tuple[type[Exception], ...] = (ConnectionError, TimeoutError),
) -> Callable[[Callable[_Parameters, _Value]], Callable[_Parameters, _Value]]: ...


def elastic_allreduce(
    function: Callable[..., Any] | None = None,
    framework: str = "torch",
    *,
    retries: int = 5,
    wait_secs: float = 1.0,
    retry_on: tuple[type[Exception], ...] = (ConnectionError, TimeoutError),
) -> Any:
    """Mark a function that calls ``optimizer.step()`` of the registered optimizer once.

    When it returns, the job gets the gradients, the batch is reported as finished, and the caller
    gets the function's value. A function that raises counts for nothing. An error of ``retry_on``
    lets it run again, with the gradients, the running statistics and the random numbers that it
    had. The connections to ps and master repeat their own calls: no error of theirs comes here
    before the job is over.

    Args:
        function: The function. Without one, the call returns a decorator.
        framework: ``"torch"``. TensorFlow is refused.
        retries: How often a failed function runs again.
        wait_secs: Seconds before it runs again.
        retry_on: Errors that may pass.

    Raises:
        UnsupportedError: The framework is another one.
        ValueError: ``retries`` or ``wait_secs`` is below 0.

    The marked function raises:
        AttemptsError: It failed as often as it may, or cannot run again.
        SessionError: It is called without a batch, or did not call ``optimizer.step()``.
    """
    if framework != "torch":
        raise UnsupportedError(
            f"elastic_allreduce: framework = {framework!r} is not trained; write the loop in "
            'PyTorch (framework = "torch")'
        )
    if retries < 0 or wait_secs < 0:
        raise ValueError(
            f"elastic_allreduce: retries = {retries}, wait_secs = {wait_secs}: expected 0 or more"
        )
    if function is None:
        return functools.partial(
            elastic_allreduce,
            framework=framework,
            retries=retries,
            wait_secs=wait_secs,
            retry_on=retry_on,
        )
    name = getattr(function, "__name__", "the function")

    @functools.wraps(function)
    def merging(*arguments: Any, **options: Any) -> Any:
        loop = current(name)
        if loop.job is None:
            raise SessionError(f"{name} is called before the first batch of the dataset")
        before = _Before(loop.job._tensors)
        loss = loop.loss
        for attempt in range(1, retries + 2):
            loop.merging = True
            try:
                value = function(*arguments, **options)
            except retry_on as error:
                loop.stepped, loop.loss = False, loss
                reason = f"{name} failed at attempt {attempt} of {retries + 1}: {error!r}"
                if attempt > retries:
                    raise AttemptsError(reason, attempt) from error
                if not before.restore():
                    raise AttemptsError(
                        f"{reason}; it cannot run again, because it added to gradients that were "
                        "there before; call zero_grad() and backward() both inside or both outside",
                        attempt,
                    ) from error
                _LOG.warning("%s; it runs again in %s s", reason, wait_secs)
                time.sleep(wait_secs)
            else:
                loop.push(name)
                return value
            finally:
                loop.merging = False
        raise AssertionError("the last attempt returns or raises")

    return merging


class _Before:
    """What a function that runs again must find as it was."""

    def __init__(self, tensors: Tensors) -> None:
        import numpy
        import torch

        self._gradients = [
            (tensor, tensor.grad, None if tensor.grad is None else tensor.grad._version)
            for _, tensor in tensors.parameters
        ]
        self._states = [(tensor, tensor.clone()) for _, tensor in tensors.states]
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        self._numpy = numpy.random.get_state()
        self._random = random.getstate()

    def restore(self) -> bool:
        """Restore gradients, states and random numbers.

        Returns:
            Whether that was possible. Gradients are not copied, so one that was written is lost.
        """
        import numpy
        import torch

        for tensor, gradient, version in self._gradients:
            if gradient is not None and gradient._version != version:
                return False
            tensor.grad = gradient
        for tensor, values in self._states:
            tensor.data.copy_(values)
        torch.set_rng_state(self._torch)
        if self._cuda is not None:
            torch.cuda.set_rng_state_all(self._cuda)
        numpy.random.set_state(self._numpy)
        random.setstate(self._random)
        return True
