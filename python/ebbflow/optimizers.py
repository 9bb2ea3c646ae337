"""Settings of a job for optimizers and schedulers of ``torch.optim``.

The parameter servers apply the updates, with rules that give the numbers of ``torch.optim``. Only
exact types are translated, and a setting that would be lost is refused by name.
"""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

from ebbflow.errors import UntranslatableError

#: Most changes of the learning rate in one job.
TABLE_MAX = 65_536

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


def optimizer_settings(optimizer: Any) -> dict[str, Any]:
    """Return the ``[optimizer]`` section of a job for an optimizer of ``torch.optim``.

    Raises:
        UntranslatableError: The type is not exactly one of ``torch.optim``'s SGD, Adam, AdamW,
            Adagrad, RMSprop and Adadelta, it has stepped before, its parameter groups differ, or a
            setting cannot be expressed. The message names it.
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
    group = _one_group(optimizer, name)
    for setting, value in group.items():
        if setting in _SETTINGS[name] | _SPEED | _SCHEDULERS | {"params", "param_names"}:
            continue
        if value not in (False, None):
            raise UntranslatableError(
                f"optimizer {name}: the ps have no setting {setting} = {value!r}; remove it"
            )
    rate = float(group.get("initial_lr", group["lr"]))
    if not rate > 0:
        raise UntranslatableError(
            f"optimizer {name}: lr = {rate}, and a job needs a learning rate above 0"
        )
    settings: dict[str, Any] = {"learning_rate": rate}
    settings |= _rule(name, group)
    return settings


def _one_group(optimizer: Any, name: str) -> dict[str, Any]:
    first, *others = optimizer.param_groups
    for number, other in enumerate(others, start=1):
        for setting in first:
            if setting in {"params", "param_names"}:
                continue
            if other.get(setting) != first[setting]:
                raise UntranslatableError(
                    f"optimizer {name}: parameter groups 0 and {number} have different {setting} "
                    f"({first[setting]!r} and {other.get(setting)!r}), and the ps have one setting "
                    "for all tensors; give all groups the same"
                )
    return dict(first)


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
        if decoupled and group["amsgrad"]:
            raise UntranslatableError(
                f"optimizer {name}: amsgrad = True with decoupled weight decay is no rule of the "
                "ps; use torch.optim.Adam(amsgrad=True), or remove amsgrad"
            )
        kind = "adamw" if decoupled else "amsgrad" if group["amsgrad"] else "adam"
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


def schedule_settings(scheduler: Any, optimizer: Any, steps: int, every: int) -> dict[str, Any]:
    """Return the ``schedule`` of a job of ``steps`` steps: a table of the scheduler's rates.

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
    group = optimizer.param_groups[0]
    base = float(group.get("initial_lr", group["lr"]))
    kept_scheduler = copy.deepcopy(scheduler.state_dict())
    kept_groups = [_settings_of(group) for group in optimizer.param_groups]
    table: list[tuple[int, float]] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for change in range(changes):
                if change > 0:
                    scheduler.step()
                _check_groups(optimizer, kept_groups, name)
                factor = float(group["lr"]) / base
                if not table or table[-1][1] != factor:
                    table.append((change * every, factor))
                if len(table) > TABLE_MAX:
                    raise UntranslatableError(
                        f"scheduler {name} changes the rate more than {TABLE_MAX} times; step it "
                        'once an epoch (scheduler_every="epoch")'
                    )
    finally:
        scheduler.load_state_dict(kept_scheduler)
        for group, kept in zip(optimizer.param_groups, kept_groups, strict=True):
            group.update(kept)
    if table == [(0, 1.0)]:
        return {"kind": "constant"}
    return {"kind": "table", "table": table}


def _settings_of(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in {"params", "param_names"}}


def _check_groups(optimizer: Any, kept: list[dict[str, Any]], name: str) -> None:
    rates = {float(group["lr"]) for group in optimizer.param_groups}
    if len(rates) > 1:
        raise UntranslatableError(
            f"scheduler {name} gives parameter groups different rates ({sorted(rates)}), and "
            "the ps have one for all tensors"
        )
    for group, before in zip(optimizer.param_groups, kept, strict=True):
        for setting, value in before.items():
            if setting not in {"lr", *_SCHEDULERS} and group[setting] != value:
                raise UntranslatableError(
                    f"scheduler {name} changes {setting} too, and the ps have a schedule for the "
                    "rate alone; set cycle_momentum=False"
                )
