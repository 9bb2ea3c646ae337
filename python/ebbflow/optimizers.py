"""Settings of a job for optimizers and schedulers of ``torch.optim``.

The parameter servers apply the updates, with rules that give the numbers of ``torch.optim``. Only
exact types are translated, and a setting that would be lost is refused by name.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from ebbflow.errors import UntranslatableError

#: Most changes of the learning rate in one job.
TABLE_MAX = 65_536

#: Smallest ``eps`` of the ps. No float32 sum notices it.
TINY = 2.0**-126

# Settings that decide only how fast torch computes the update.
_SPEED = {"foreach", "fused", "capturable"}

# What schedulers keep in a parameter group.
_SCHEDULERS = {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"}

_SETTINGS = {
    "SGD": {"lr", "momentum", "dampening", "weight_decay", "nesterov"},
    "Adam": {"lr", "betas", "eps", "weight_decay", "amsgrad", "decoupled_weight_decay"},
    "AdamW": {"lr", "betas", "eps", "weight_decay", "amsgrad", "decoupled_weight_decay"},
    "Adagrad": {"lr", "lr_decay", "eps", "weight_decay", "initial_accumulator_value"},
    "RMSprop": {"lr", "momentum", "alpha", "eps", "centered", "weight_decay"},
    "Adadelta": {"lr", "rho", "eps", "weight_decay"},
}


def optimizer_settings(
    optimizer: Any,
    names: Mapping[int, str],
    schedules: Sequence[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return the ``[optimizer]`` section of a job for an optimizer of ``torch.optim``.

    The settings of the first parameter group are those of the job. Every other group whose settings
    differ is one of ``groups``.

    Args:
        optimizer: The optimizer.
        names: The name of each parameter that is trained, by its ``id``.
        schedules: The schedule of each parameter group, see :func:`schedule_settings`.

    Raises:
        UntranslatableError: The type is not exactly one of ``torch.optim``'s SGD, Adam, AdamW,
            Adagrad, RMSprop and Adadelta, it has stepped before, its parameter groups differ in the
            rule itself, or a setting cannot be expressed. The message names it.
    """
    import torch

    name = type(optimizer).__name__
    known = [getattr(torch.optim, known) for known in _SETTINGS]
    if type(optimizer) not in known:
        base = next((known.__name__ for known in known if isinstance(optimizer, known)), None)
        kind = f"a subclass of {base}" if base else "no optimizer that the ps have"
        raise UntranslatableError(
            f"optimizer {name} is {kind}, and the ps would apply another rule; use exactly one of "
            f"torch.optim's {', '.join(_SETTINGS)}"
        )
    stepped = any(
        float(state["step"]) > 0 for state in optimizer.state.values() if "step" in state
    ) or (name == "SGD" and len(optimizer.state) > 0)
    if stepped:
        raise UntranslatableError(
            f"optimizer {name} has stepped before, and its state is not taken over; make a new one"
        )
    groups = _trained(optimizer, names)
    first = groups[0]
    settings = _group_settings(name, optimizer, first, schedules)
    differing = []
    for number in groups[1:]:
        own = _group_settings(name, optimizer, number, schedules)
        _check_one_rule(name, optimizer, (first, number), (settings, own))
        changed = {key: value for key, value in own.items() if settings[key] != value}
        if changed:
            tensors = optimizer.param_groups[number]["params"]
            listed = [names[id(tensor)] for tensor in tensors if id(tensor) in names]
            differing.append({"tensors": listed} | changed)
    return settings | ({"groups": differing} if differing else {})


def _trained(optimizer: Any, names: Mapping[int, str]) -> list[int]:
    """Return the numbers of the parameter groups that have a tensor to train."""
    trained = [
        number
        for number, group in enumerate(optimizer.param_groups)
        if any(id(tensor) in names for tensor in group["params"])
    ]
    return trained or [0]


def _group_settings(
    name: str, optimizer: Any, number: int, schedules: Sequence[dict[str, Any]] | None
) -> dict[str, Any]:
    """Return the settings of one parameter group, as those of a whole job."""
    group = optimizer.param_groups[number]
    place = f"optimizer {name}" + (
        f", parameter group {number}" if len(optimizer.param_groups) > 1 else ""
    )
    for setting, value in group.items():
        if setting in _SETTINGS[name] | _SPEED | _SCHEDULERS | {"params", "param_names"}:
            continue
        if value not in (False, None):
            raise UntranslatableError(
                f"{place}: the ps have no setting {setting} = {value!r}; remove it"
            )
    rate = _base_rate(group)
    if not rate > 0:
        raise UntranslatableError(
            f"{place}: lr = {rate}, and a job needs a learning rate above 0; freeze parameters "
            "with requires_grad_(False)"
        )
    settings: dict[str, Any] = {"learning_rate": rate}
    if schedules is not None:
        settings["schedule"] = schedules[number]
    return settings | _rule(name, group)


def _base_rate(group: dict[str, Any]) -> float:
    """Return the rate of a parameter group before the factor of a scheduler."""
    return float(group.get("initial_lr", group["lr"]))


def _check_one_rule(
    name: str,
    optimizer: Any,
    numbers: tuple[int, int],
    settings: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    """Check that two parameter groups have one rule with the same state beside each parameter."""
    one, other = settings
    same = all(one.get(key) == other.get(key) for key in ("kind", "centered"))
    if same and one.keys() == other.keys():
        return
    groups = [optimizer.param_groups[number] for number in numbers]
    found = next(
        setting
        for setting in ("amsgrad", "decoupled_weight_decay", "nesterov", "centered", "momentum")
        if groups[0].get(setting) != groups[1].get(setting)
    )
    values = " and ".join(repr(group.get(found)) for group in groups)
    raise UntranslatableError(
        f"optimizer {name}: parameter groups {numbers[0]} and {numbers[1]} have different {found} "
        f"({values}), and the ps have one rule for all tensors; give both groups the same"
    )


def _rule(name: str, group: dict[str, Any]) -> dict[str, Any]:
    """Return the kind and its own settings."""
    decay = float(group["weight_decay"])
    if name == "SGD":
        momentum = float(group["momentum"])
        if momentum == 0:
            return {"kind": "sgd", "weight_decay": decay}
        rule = {"kind": "momentum", "momentum": momentum, "weight_decay": decay}
        if group["nesterov"]:
            return rule | {"kind": "nesterov"}
        return rule | {"dampening": float(group["dampening"])}
    eps = float(group["eps"])
    rule = {"eps": eps, "weight_decay": decay}
    if name in {"Adam", "AdamW"}:
        decoupled = name == "AdamW" or bool(group.get("decoupled_weight_decay"))
        kind = ("amsgrad" if group["amsgrad"] else "adam") + ("w" if decoupled else "")
        return rule | {"kind": kind, "betas": [float(beta) for beta in group["betas"]]}
    if name == "Adagrad":
        initial = float(group["initial_accumulator_value"])
        rule |= {"lr_decay": float(group["lr_decay"]), "initial_accumulator_value": initial}
        return rule | {"kind": "adagrad"}
    if name == "RMSprop":
        if group["momentum"]:
            rule |= {"momentum": float(group["momentum"])}
        rule |= {"alpha": float(group["alpha"]), "centered": bool(group["centered"])}
        return rule | {"kind": "rmsprop"}
    return rule | {"kind": "adadelta", "rho": float(group["rho"])}


def schedule_settings(
    scheduler: Any, optimizer: Any, steps: int, every: int
) -> list[dict[str, Any]]:
    """Return the ``schedule`` of each parameter group in a job of ``steps`` steps: a table.

    The scheduler is stepped after each ``every`` steps of the job, and is left as it was.

    Raises:
        UntranslatableError: The scheduler looks at the training, belongs to another optimizer,
            changes more than the rate, or changes the rate more than ``TABLE_MAX`` times.
    """
    import torch

    name = type(scheduler).__name__
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise UntranslatableError(
            f"scheduler {name} looks at metrics, and a job knows its rates before it begins; "
            "use one that depends on the epoch alone"
        )
    if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        raise UntranslatableError(f"scheduler {name} is none of torch.optim.lr_scheduler")
    if scheduler.optimizer is not optimizer:
        raise UntranslatableError(f"scheduler {name} belongs to another optimizer; give its own")
    changes = math.ceil(steps / every)
    groups = optimizer.param_groups
    kept_scheduler = copy.deepcopy(scheduler.state_dict())
    kept_groups = [_settings_of(group) for group in groups]
    tables: list[list[tuple[int, float]]] = [[] for _ in groups]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for change in range(changes):
                if change > 0:
                    scheduler.step()
                _check_groups(optimizer, kept_groups, name)
                for group, table in zip(groups, tables, strict=True):
                    base = _base_rate(group)
                    factor = float(group["lr"]) / base if base else 0.0
                    if not table or table[-1][1] != factor:
                        table.append((change * every, factor))
                if max(map(len, tables)) > TABLE_MAX:
                    raise UntranslatableError(
                        f"scheduler {name} changes the rate more than {TABLE_MAX} times; step it "
                        'once an epoch (scheduler_every="epoch")'
                    )
    finally:
        scheduler.load_state_dict(kept_scheduler)
        for group, kept in zip(groups, kept_groups, strict=True):
            group.update(kept)
    return [
        {"kind": "constant"} if table == [(0, 1.0)] else {"kind": "table", "table": table}
        for table in tables
    ]


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in {"params", "param_names"}}


def _check_groups(optimizer: Any, kept: list[dict[str, Any]], name: str) -> None:
    for group, before in zip(optimizer.param_groups, kept, strict=True):
        for setting, value in before.items():
            if setting not in {"lr", *_SCHEDULERS} and group[setting] != value:
                raise UntranslatableError(
                    f"scheduler {name} changes {setting} too, and the ps have a schedule for the "
                    "rate alone; set cycle_momentum=False"
                )
