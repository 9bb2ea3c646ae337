"""Functions with typed arguments and results, as tasks and workflows."""

from __future__ import annotations

import functools
import inspect
import logging
import typing
from collections.abc import Callable, Mapping
from typing import Any, Generic, ParamSpec, TypeVar, overload

from ebbflow.errors import AttemptsError, UnsupportedError
from ebbflow.flow.cache import Entry, described_call
from ebbflow.flow.resources import Resources
from ebbflow.flow.values import check_type, fitting

_LOG = logging.getLogger("ebbflow")

_Arguments = ParamSpec("_Arguments")
_Value = TypeVar("_Value")

#: Arguments of Flyte's decorator, with what to do instead.
_INSTEAD = {
    "limits": "the task runs in this process, which nobody limits; give requests",
    "container_image": "the task runs in this process; remove it",
    "environment": "the task has the environment of its process; set the variables there",
    "secret_requests": "read a secret from a variable or a file inside the task",
    "task_config": "a loop is distributed by ebbflow.join inside the task; remove it",
    "timeout": "nothing interrupts the task; remove it",
    "cache_serialize": "two processes may compute one result, and the first one is kept; remove it",
}


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Task(Generic[_Arguments, _Value]):
    """A function that is called with typed arguments, from :func:`task` or :func:`workflow`.

    Attributes:
        name: Module and name of the function. The module of a script is the name of its file.
        requests: Resources that the machine must have.
    """

    def __init__(
        self,
        function: Callable[_Arguments, _Value],
        retries: int,
        version: str | None,
        requests: Resources,
    ) -> None:
        functools.update_wrapper(self, function)
        self.name = f"{_module(function)}.{function.__qualname__}"
        self.requests = requests
        self._function = function
        self._retries = retries
        self._version = version
        self._signature = inspect.signature(function)
        self._types: tuple[dict[str, Any], Any] | None = None

    def __call__(self, *arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Value:
        """Return the function's result, from the cache if the task has one and it is there.

        Raises:
            TypeError: An argument or the result has another type than its annotation.
            ResourcesError: The machine lacks a resource that the task requests.
            AttemptsError: The function failed as often as it may. Its last error is the cause.
            OSError: The cache cannot be written, or a file of an input or the result is missing.
        """
        kinds, result = self._annotations()
        bound = self._signature.bind(*arguments, **options)
        bound.apply_defaults()
        inputs = {
            name: fitting(value, kinds[name], f"argument `{name}` of {self.name}")
            for name, value in bound.arguments.items()
        }
        entry = None
        if self._version is not None:
            call = described_call(self.name, self._version, kinds, result, inputs)
            entry = Entry(self.name, call, result)
            kept = entry.read()
            if kept is not None:
                _LOG.info("task %s: its result is in %s", self.name, entry.path)
                found: _Value = kept[0]
                return found
        self.requests.check(self.name)
        value: _Value = fitting(self._attempt(inputs), result, f"result of {self.name}")
        return value if entry is None else entry.write(value)

    def _attempt(self, inputs: Mapping[str, Any]) -> Any:
        for attempt in range(1, self._retries + 2):
            try:
                return self._function(**inputs)  # type: ignore[call-arg]
            except Exception as error:
                if self._retries == 0:
                    raise
                reason = f"task {self.name} failed at attempt {attempt} of {self._retries + 1}"
                if attempt > self._retries:
                    raise AttemptsError(f"{reason}: {error!r}", attempt) from error
                _LOG.warning("%s: %r; it runs again", reason, error)
        raise AssertionError("the last attempt returns or raises")

    def _annotations(self) -> tuple[dict[str, Any], Any]:
        """Return the types of arguments and result. Names in them are looked up at the call."""
        if self._types is None:
            hints = typing.get_type_hints(self._function)
            kinds = {}
            for name, parameter in self._signature.parameters.items():
                if parameter.kind not in _NAMED:
                    raise TypeError(
                        f"{self.name}: the argument `{name}` is none that a caller can name"
                    )
                if name not in hints:
                    raise TypeError(f"{self.name}: give the argument `{name}` a type")
                check_type(hints[name], f"argument `{name}` of {self.name}")
                kinds[name] = hints[name]
            if "return" not in hints:
                raise TypeError(f"{self.name}: give its result a type, such as `-> None`")
            check_type(hints["return"], f"result of {self.name}")
            self._types = kinds, hints["return"]
        return self._types


@overload
def task(
    function: Callable[_Arguments, _Value],
    *,
    retries: int = 0,
    cache: bool = False,
    cache_version: str = "",
    requests: Resources | None = None,
    **others: Any,
) -> Task[_Arguments, _Value]: ...


@overload
def task(
    function: None = None,
    *,
    retries: int = 0,
    cache: bool = False,
    cache_version: str = "",
    requests: Resources | None = None,
    **others: Any,
) -> Callable[[Callable[_Arguments, _Value]], Task[_Arguments, _Value]]: ...


def task(
    function: Callable[..., Any] | None = None,
    *,
    retries: int = 0,
    cache: bool = False,
    cache_version: str = "",
    requests: Resources | None = None,
    **others: Any,
) -> Any:
    """Make a function a task. It runs in the process of its caller.

    Args:
        function: The function. Each argument and the result have a type. Without a function, the
            call returns a decorator.
        retries: How often a function that raised is called again.
        cache: Keep results on disk, and return them for equal inputs.
        cache_version: Change it with the code of the task: results of another version stay unused.
        requests: Resources that the machine must have, or the task does not start.
        others: Refused: arguments of Flyte's decorator that mean nothing here.

    Raises:
        ValueError: ``retries`` is below 0, or only one of ``cache`` and ``cache_version`` is given.
        UnsupportedError: There is another argument. The message says what to do instead.
    """
    for name in others:
        instead = _INSTEAD.get(name, "remove it")
        raise UnsupportedError(f"task: `{name}` is not kept: {instead}")
    if retries < 0:
        raise ValueError(f"task: retries = {retries}: expected 0 or more")
    if cache != bool(cache_version):
        raise ValueError(
            "task: cache and cache_version belong together; without a version, results of older "
            "code would be returned"
        )
    if function is None:
        return functools.partial(
            task, retries=retries, cache=cache, cache_version=cache_version, requests=requests
        )
    version = cache_version if cache else None
    return Task(function, retries, version, requests or Resources())


def workflow(function: Callable[_Arguments, _Value]) -> Task[_Arguments, _Value]:
    """Make a function that calls tasks a workflow: it has types, and no cache and no retries."""
    return Task(function, 0, None, Resources())


def _module(function: Callable[..., Any]) -> str:
    """Return the module's name; a script has that of its file, however it was started."""
    if function.__module__ != "__main__":
        return function.__module__
    return inspect.getmodulename(inspect.getfile(function)) or "__main__"
