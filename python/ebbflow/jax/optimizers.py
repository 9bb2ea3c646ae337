"""Settings of a job for optimizers and schedules of optax.

An optimizer of optax is a pair of functions that do not tell their settings. So a loop gives the
function and its arguments: ``functools.partial(optax.adam, 1e-3)``.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from ebbflow.errors import UntranslatableError
from ebbflow.jax.tree import Tree
from ebbflow.optimizers import TABLE_MAX, TINY

#: Arguments that the ps know; every other one must have its default.
_KNOWN = {
    "sgd": {"learning_rate", "momentum", "nesterov"},
    "adam": {"learning_rate", "b1", "b2", "eps", "eps_root"},
    "adamw": {"learning_rate", "b1", "b2", "eps", "eps_root", "weight_decay", "mask"},
    "rmsprop": {"learning_rate", "decay", "eps", "eps_in_sqrt", "centered", "momentum"},
    "adadelta": {"learning_rate", "rho", "eps", "weight_decay", "weight_decay_mask"},
    "lamb": {"learning_rate", "b1", "b2", "eps", "weight_decay", "mask"},
}

#: Arguments that say which arrays decay.
_MASKS = ("mask", "weight_decay_mask")


def optimizer_settings(recipe: Any, steps: int, tree: Tree) -> dict[str, Any]:
    """Return the ``[optimizer]`` section of a job of ``steps`` steps.

    Args:
        recipe: ``functools.partial`` of ``sgd``, ``adam``, ``adamw``, ``rmsprop``, ``adadelta`` or
            ``lamb`` of optax with its arguments. The learning rate may be a schedule of optax.
        steps: Number of updates of the job.
        tree: The parameters, for a mask of the weight decay.

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
    settings = _rate(given["learning_rate"], steps) | _rule(name, given)
    if name == "rmsprop" and "schedule" in settings and "momentum" in settings:
        raise UntranslatableError(
            f"optimizer optax.rmsprop: momentum = {given['momentum']!r} with a schedule: the "
            "velocity of optax has the rates of earlier steps, and that of the ps has not; use a "
            "constant rate, or remove momentum"
        )
    mask = next((given[mask] for mask in _MASKS if given.get(mask) is not None), None)
    if mask is not None and settings["weight_decay"]:
        spared = _spared(name, mask, tree)
        if spared:
            settings["groups"] = [{"tensors": spared, "weight_decay": 0.0}]
    return settings


def _rule(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the kind and its own settings."""
    if name == "sgd":
        if not given["momentum"]:
            return {"kind": "sgd"}
        kind = "nesterov" if given["nesterov"] else "momentum"
        return {"kind": kind, "momentum": float(given["momentum"])}
    if name == "rmsprop":
        eps = float(given["eps"])
        beside, root = (TINY, eps) if given["eps_in_sqrt"] else (eps, 0.0)
        rule: dict[str, Any] = {
            "kind": name,
            "alpha": float(given["decay"]),
            "eps": beside,
            "eps_root": root,
            "centered": bool(given["centered"]),
        }
        return rule | ({"momentum": float(given["momentum"])} if given["momentum"] else {})
    if name == "adadelta":
        rule = {"kind": name, "rho": float(given["rho"]), "eps": float(given["eps"])}
        return rule | {"weight_decay": _number(given["weight_decay"], "adadelta: weight_decay")}
    betas = [float(given["b1"]), float(given["b2"])]
    rule = {"kind": name, "betas": betas, "eps": float(given["eps"])}
    if name != "lamb":
        rule["eps_root"] = float(given["eps_root"])
    if name != "adam":
        rule["weight_decay"] = _number(given["weight_decay"], f"{name}: weight_decay")
    return rule


def _spared(name: str, mask: Any, tree: Tree) -> list[str]:
    """Return the names of the arrays that a mask spares from the weight decay."""
    try:
        return tree.spared(mask)
    except (TypeError, ValueError) as error:
        raise UntranslatableError(
            f"optimizer optax.{name}: its mask does not fit the parameters: {error}"
        ) from error


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
