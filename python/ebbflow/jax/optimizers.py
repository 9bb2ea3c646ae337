"""Settings of a job for optimizers and schedules of optax.

An optimizer of optax is a pair of functions that do not tell their settings. So a loop gives the
function and its arguments: ``functools.partial(optax.adam, 1e-3)``.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from ebbflow.errors import UntranslatableError
from ebbflow.optimizers import TABLE_MAX

#: Arguments that the ps know; every other one must have its default.
_KNOWN = {
    "sgd": {"learning_rate", "momentum", "nesterov"},
    "adam": {"learning_rate", "b1", "b2", "eps"},
    "adamw": {"learning_rate", "b1", "b2", "eps", "weight_decay"},
}


def optimizer_settings(recipe: Any, steps: int) -> dict[str, Any]:
    """Return the ``[optimizer]`` section of a job of ``steps`` steps.

    Args:
        recipe: ``functools.partial`` of ``optax.sgd``, ``optax.adam`` or ``optax.adamw`` with its
            arguments. The learning rate may be a schedule of optax.
        steps: Number of updates of the job.

    Raises:
        UntranslatableError: It is something else, or an argument cannot be expressed. The message
            names it.
    """
    import optax

    shown = "functools.partial(optax.adam, 1e-3)"
    if not isinstance(recipe, functools.partial):
        raise UntranslatableError(
            f"optimizer: expected a function of optax with its arguments, such as {shown}, found "
            f"{type(recipe).__name__}, which does not tell its settings"
        )
    known = {getattr(optax, name): name for name in _KNOWN}
    name = known.get(recipe.func)
    if name is None:
        found = getattr(recipe.func, "__name__", repr(recipe.func))
        raise UntranslatableError(
            f"optimizer {found} is none that the ps compute as optax does; use "
            f"{', '.join(f'optax.{name}' for name in _KNOWN)}, such as {shown}"
        )
    signature = inspect.signature(recipe.func)
    try:
        bound = signature.bind(*recipe.args, **recipe.keywords)
    except TypeError as error:
        raise UntranslatableError(f"optimizer optax.{name}: {error}") from error
    bound.apply_defaults()
    given = bound.arguments
    for argument, value in given.items():
        default = signature.parameters[argument].default
        if argument not in _KNOWN[name] and value is not default and value != default:
            raise UntranslatableError(
                f"optimizer optax.{name}: the ps have no {argument} = {value!r}; remove it"
            )
    return _rate(given["learning_rate"], steps) | _rule(name, given)


def _rule(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the kind and its own settings."""
    if name == "sgd":
        if not given["momentum"]:
            return {"kind": "sgd"}
        kind = "nesterov" if given["nesterov"] else "momentum"
        return {"kind": kind, "momentum": float(given["momentum"])}
    betas = [float(given["b1"]), float(given["b2"])]
    rule = {"kind": name, "betas": betas, "eps": float(given["eps"])}
    if name == "adamw":
        rule["weight_decay"] = _number(given["weight_decay"], "adamw: weight_decay")
    return rule


def _rate(rate: Any, steps: int) -> dict[str, Any]:
    """Return the learning rate, and a table of factors for a schedule."""
    if not callable(rate):
        return {"learning_rate": _number(rate, "learning_rate")}
    changes: list[tuple[int, float]] = []
    for step in range(max(1, steps)):
        value = float(rate(step))
        if not changes or changes[-1][1] != value:
            changes.append((step, value))
        if len(changes) > TABLE_MAX:
            raise UntranslatableError(
                f"the schedule of the learning rate changes it more than {TABLE_MAX} times"
            )
    largest = max(value for _, value in changes)
    if not largest > 0:
        raise UntranslatableError("the schedule of the learning rate is never above 0")
    if len(changes) == 1:
        return {"learning_rate": largest}
    table = [(step, value / largest) for step, value in changes]
    return {"learning_rate": largest, "schedule": {"kind": "table", "table": table}}


def _number(value: Any, what: str) -> float:
    if callable(value):
        raise UntranslatableError(f"optimizer: {what} is a schedule, and the ps want a number")
    return float(value)
