"""Settings of a job for optimizers and schedules of ``keras.optimizers``.

The rules of the ps are those of ``torch.optim``. What Keras computes otherwise is refused by name.

| in Keras | on the ps |
| --- | --- |
| ``SGD``: ``v = m v - rate g``, ``w += v`` | ``v = m v + g``, ``w -= rate v``: equal at one rate |
| ``Adam``: ``sqrt(v) + epsilon`` before the bias correction | ``eps_before_correction``: equal |
| ``Adagrad``: ``sqrt(sum + epsilon)`` | epsilon is a part of the sum's first value: equal |
| ``Adadelta``: ``sqrt(.. + epsilon)`` | equal |
| ``Ftrl``: ``sqrt(n) / rate + 2 l2`` | ``sqrt(n) / rate + l2``, with twice the setting: equal |
| ``Lamb`` | equal |
| ``RMSprop``: ``sqrt(v + epsilon)`` | ``eps_root``: equal |
| ``weight_decay``: ``w -= rate decay w`` | in adamw and amsgradw, as plain sgd's; else refused |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ebbflow.errors import UntranslatableError
from ebbflow.optimizers import TABLE_MAX, TINY

#: Settings of every optimizer that change what an update does, and what to do instead.
_REFUSED = {
    "clipnorm": "the ps clip the norm of all gradients together: use global_clipnorm",
    "clipvalue": "the ps clip the norm of all gradients together: use global_clipnorm",
    "use_ema": "the ps keep no averages of weights; remove it",
    "loss_scale_factor": "gradients of a job are float32; remove it",
    "gradient_accumulation_steps": "use `effective` of join",
}

# Equal in every optimizer, or looked at elsewhere.
_COMMON = {
    "name",
    "learning_rate",
    "weight_decay",
    "global_clipnorm",
    "ema_momentum",
    "ema_overwrite_frequency",
}


def optimizer_settings(optimizer: Any, steps: int) -> dict[str, Any]:
    """Return the ``[optimizer]`` section of a job of ``steps`` steps.

    Args:
        optimizer: An optimizer of ``keras.optimizers`` that was not applied. Its learning rate may
            be a ``LearningRateSchedule``.
        steps: Number of updates of the job.

    Raises:
        UntranslatableError: The ps have no equal of it, or of a setting. The message names it.
    """
    name = _name(optimizer)
    if int(optimizer.iterations) > 0:
        raise UntranslatableError(
            f"optimizer {name} was applied before, and its state is not taken over; make a new one"
        )
    config = optimizer.get_config()
    for setting, instead in _REFUSED.items():
        if config.get(setting) not in (None, False):
            raise UntranslatableError(
                f"optimizer {name}: {setting} = {config[setting]!r}: {instead}"
            )
    rule, own = _RULES[name]
    for setting, value in config.items():
        if setting not in own | _COMMON | _REFUSED.keys() and value not in (None, False):
            raise UntranslatableError(
                f"optimizer {name}: the ps have no setting {setting} = {value!r}; remove it"
            )
    settings = _rate(optimizer, name, steps) | rule(config)
    decay = config.get("weight_decay")
    if decay and settings["kind"] not in ("sgd", "adamw", "amsgradw"):
        raise UntranslatableError(
            f"optimizer {name}: weight_decay = {decay!r} shrinks the weights themselves, which the "
            "ps do in SGD without momentum, Adam and AdamW; remove it"
        )
    if decay and _excludes(optimizer):
        raise UntranslatableError(
            f"optimizer {name}: exclude_from_weight_decay leaves out variables, and the ps decay "
            "all; remove it"
        )
    if "schedule" in settings and settings.get("momentum"):
        raise UntranslatableError(
            f"optimizer {name}: momentum = {settings['momentum']!r} with a schedule: the velocity "
            "of Keras has the rates of earlier steps, and that of the ps has not; use a constant "
            "rate, or another optimizer"
        )
    if config.get("global_clipnorm"):
        if settings["kind"] == "lamb":
            raise UntranslatableError("optimizer Lamb: the ps do not clip with it; remove it")
        settings["clip_norm"] = float(config["global_clipnorm"])
    return settings


def _name(optimizer: Any) -> str:
    """Return the name of an optimizer's exact type."""
    import keras

    kind = type(optimizer)
    for name in _RULES:
        known = getattr(keras.optimizers, name, None)
        # On the backend torch an instance has a class of that backend.
        of_backend = kind.__name__ == name and kind.__module__.startswith("keras.src.backend.")
        if known is not None and (kind is known or of_backend):
            return name
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        shown = repr(optimizer) if isinstance(optimizer, str) else kind.__name__
        raise UntranslatableError(
            f"optimizer: expected an instance of keras.optimizers, found {shown}"
        )
    bases = (base.__name__ for base in kind.__mro__[1:] if base.__name__ in _RULES)
    base = next(bases, None) if not kind.__module__.startswith("keras.") else None
    why = f"a subclass of {base}" if base else "no optimizer that the ps have"
    raise UntranslatableError(
        f"optimizer {kind.__name__} is {why}, and the ps would apply another rule; use exactly one "
        f"of keras.optimizers' {', '.join(_RULES)}"
    )


def _rate(optimizer: Any, name: str, steps: int) -> dict[str, Any]:
    """Return the learning rate, and a table of factors for a schedule."""
    import keras

    rate = optimizer._learning_rate
    if not isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        if callable(rate):
            raise UntranslatableError(
                f"optimizer {name}: the learning rate is a function, and a job knows its rates "
                "before it begins; give a LearningRateSchedule"
            )
        value = float(optimizer.learning_rate)
        if not value > 0:
            raise UntranslatableError(f"optimizer {name}: a job needs a learning rate above 0")
        return {"learning_rate": value}
    changes: list[tuple[int, float]] = []
    for step in range(max(1, steps)):
        value = float(keras.ops.convert_to_numpy(rate(step)))
        if not changes or changes[-1][1] != value:
            changes.append((step, value))
        if len(changes) > TABLE_MAX:
            raise UntranslatableError(
                f"optimizer {name}: {type(rate).__name__} changes the rate more than {TABLE_MAX} "
                "times"
            )
    largest = max(value for _, value in changes)
    if not largest > 0:
        raise UntranslatableError(f"optimizer {name}: its schedule is never above 0")
    if len(changes) == 1:
        return {"learning_rate": largest}
    table = [(step, value / largest) for step, value in changes]
    return {"learning_rate": largest, "schedule": {"kind": "table", "table": table}}


def _sgd(config: dict[str, Any]) -> dict[str, Any]:
    momentum = float(config["momentum"])
    if momentum == 0:
        # Subtracting the decayed weight, or its multiple with the gradient: one formula.
        return {"kind": "sgd", "weight_decay": float(config["weight_decay"] or 0)}
    kind = "nesterov" if config["nesterov"] else "momentum"
    return {"kind": kind, "momentum": momentum}


def _adam(config: dict[str, Any]) -> dict[str, Any]:
    betas = [float(config["beta_1"]), float(config["beta_2"])]
    rule = {
        "kind": "adam",
        "betas": betas,
        "eps": float(config["epsilon"]),
        "eps_before_correction": True,
    }
    if config["amsgrad"]:
        rule["kind"] = "amsgrad"
    if config["weight_decay"] is not None:
        return rule | {"kind": f"{rule['kind']}w", "weight_decay": float(config["weight_decay"])}
    return rule


def _adagrad(config: dict[str, Any]) -> dict[str, Any]:
    first = float(config["initial_accumulator_value"]) + float(config["epsilon"])
    return {"kind": "adagrad", "initial_accumulator_value": first, "eps": TINY}


def _rmsprop(config: dict[str, Any]) -> dict[str, Any]:
    rule = {
        "kind": "rmsprop",
        "alpha": float(config["rho"]),
        "eps": TINY,
        "eps_root": float(config["epsilon"]),
        "centered": bool(config["centered"]),
    }
    momentum = float(config["momentum"])
    return rule | ({"momentum": momentum} if momentum else {})


def _adadelta(config: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "adadelta", "rho": float(config["rho"]), "eps": float(config["epsilon"])}


def _ftrl(config: dict[str, Any]) -> dict[str, Any]:
    if config["learning_rate_power"] != -0.5:
        raise UntranslatableError(
            f"optimizer Ftrl: learning_rate_power = {config['learning_rate_power']!r}, and the ps "
            "have -0.5"
        )
    return {
        "kind": "ftrl",
        "beta": max(float(config["beta"]), TINY),
        "l1": float(config["l1_regularization_strength"]),
        "l2": 2 * float(config["l2_regularization_strength"]),
        "initial_accumulator_value": float(config["initial_accumulator_value"]),
    }


def _lamb(config: dict[str, Any]) -> dict[str, Any]:
    betas = [float(config["beta_1"]), float(config["beta_2"])]
    return {"kind": "lamb", "betas": betas, "eps": float(config["epsilon"]), "weight_decay": 0.0}


#: What makes the rule of each optimizer, and the settings that it reads.
_RULES: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], set[str]]] = {
    "SGD": (_sgd, {"momentum", "nesterov"}),
    "Adam": (_adam, {"beta_1", "beta_2", "epsilon", "amsgrad"}),
    "AdamW": (_adam, {"beta_1", "beta_2", "epsilon", "amsgrad"}),
    "Adagrad": (_adagrad, {"initial_accumulator_value", "epsilon"}),
    "RMSprop": (_rmsprop, {"rho", "momentum", "epsilon", "centered"}),
    "Adadelta": (_adadelta, {"rho", "epsilon"}),
    "Ftrl": (
        _ftrl,
        {
            "learning_rate_power",
            "initial_accumulator_value",
            "l1_regularization_strength",
            "l2_regularization_strength",
            "beta",
        },
    ),
    "Lamb": (_lamb, {"beta_1", "beta_2", "epsilon"}),
}


def _excludes(optimizer: Any) -> bool:
    """Return whether variables are left out of the decay of weights."""
    names = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
    return bool(getattr(optimizer, "_exclude_from_weight_decay", None)) or names is not None
