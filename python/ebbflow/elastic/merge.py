"""``@elastic_allreduce``: a function that merges the gradients of a batch, exactly once."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

from ebbflow.elastic.loop import current
from ebbflow.errors import AttemptsError, SessionError, UnsupportedError

_LOG = logging.getLogger("ebbflow")

_Parameters = ParamSpec("_Parameters")
_Value = TypeVar("_Value")


@overload
def elastic_allreduce(
    function: Callable[_Parameters, _Value],
    framework: str | None = None,
    *,
    retries: int = 5,
    wait_secs: float = 1.0,
    retry_on: tuple[type[Exception], ...] = (ConnectionError, TimeoutError),
) -> Callable[_Parameters, _Value]: ...


@overload
def elastic_allreduce(
    function: None = None,
    framework: str | None = None,
    *,
    retries: int = 5,
    wait_secs: float = 1.0,
    retry_on: tuple[type[Exception], ...] = (ConnectionError, TimeoutError),
) -> Callable[[Callable[_Parameters, _Value]], Callable[_Parameters, _Value]]: ...


def elastic_allreduce(
    function: Callable[..., Any] | None = None,
    framework: str | None = None,
    *,
    retries: int = 5,
    wait_secs: float = 1.0,
    retry_on: tuple[type[Exception], ...] = (ConnectionError, TimeoutError),
) -> Any:
    """Mark a function that calls the step of the registered optimizer once.

    That is ``optimizer.step()``, and in TensorFlow ``optimizer.apply_gradients(..)``.

    When it returns, the job gets the gradients, the batch is reported as finished, and the caller
    gets the function's value. A function that raises counts for nothing. An error of ``retry_on``
    lets it run again, with the gradients, the running statistics and the random numbers that it
    had. The connections to ps and master repeat their own calls: no error of theirs comes here
    before the job is over.

    Args:
        function: The function. Without one, the call returns a decorator.
        framework: ``"torch"`` or ``"tf_v2"``. Default: that of the registered model. TensorFlow 1
            is refused.
        retries: How often a failed function runs again.
        wait_secs: Seconds before it runs again.
        retry_on: Errors that may pass.

    Raises:
        UnsupportedError: The framework is another one.
        ValueError: ``retries`` or ``wait_secs`` is below 0.

    The marked function raises:
        AttemptsError: It failed as often as it may, or cannot run again.
        SessionError: It is called without a batch, did not call the step of the optimizer, or the
            registered model is of another framework.
    """
    if framework not in (None, "torch", "tf_v2"):
        raise UnsupportedError(
            f"elastic_allreduce: framework = {framework!r} is not trained; write the loop in "
            'PyTorch, or with tf.GradientTape (framework = "torch" or "tf_v2")'
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
        if framework not in (None, loop.library.framework):
            raise SessionError(
                f"{name} has framework = {framework!r}, and the registered model is one of "
                f"{loop.library.framework!r}; leave framework out"
            )
        restore = loop.library.before(loop.job)
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
                if not restore():
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
