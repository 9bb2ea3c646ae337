"""`ebbflow.jax.join` alone."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from .conftest import needs

jax = needs("jax")
optax = needs("optax")

import ebbflow.jax  # noqa: E402
from ebbflow import errors  # noqa: E402
from ebbflow.jax.engine import Jax  # noqa: E402
from ebbflow.jax.optimizers import optimizer_settings  # noqa: E402
from ebbflow.jax.tree import Tree  # noqa: E402

jnp = jax.numpy


def data(records: int = 96) -> tuple[Any, Any]:
    x = np.random.default_rng(3).normal(size=(records, 6)).astype(np.float32)
    return x, (x.sum(1) > 0).astype(np.int32)


def params() -> Any:
    drawn = np.random.default_rng(7)
    shapes = {"kernel": (6, 16), "bias": (16,)}
    hidden = {k: jnp.asarray(drawn.normal(size=s), jnp.float32) for k, s in shapes.items()}
    return {"hidden": hidden, "out": [jnp.asarray(drawn.normal(size=(16, 2)), jnp.float32)]}


def loss_of(params: Any, x: Any, y: Any) -> Any:
    hidden = jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    outputs = hidden @ params["out"][0]
    return optax.softmax_cross_entropy_with_integer_labels(outputs, y).mean()


gradients_of = jax.jit(jax.value_and_grad(loss_of))


def large(params: Any) -> Any:
    """Return a mask without the biases."""
    return jax.tree_util.tree_map(lambda array: array.ndim > 1, params)


def trained(optimizer: Any, **options: Any) -> tuple[ebbflow.jax.Session, list[Any]]:
    """Train to the end; returns the job and (step, records) of each batch."""
    seen = []
    given: dict[str, Any] = {"epochs": 3, "micro": 8, "effective": 16, "seed": 5} | options
    source = given.pop("train_data", None) or data()
    with ebbflow.jax.join(params(), optimizer, source, **given) as job:
        for epoch in job.epochs():
            for batch in epoch:
                seen.append((batch.step, batch.records))
                job.step(*gradients_of(job.params, batch.x, batch.y))
            if given.get("eval_data") is not None:
                job.evaluate(lambda batch: {"loss": loss_of(job.params, batch.x, batch.y)})
    return job, seen


def plain(optimizer: Any, seen: list[Any]) -> Any:
    """Train with optax alone, on the batches that a job had."""
    weights = params()
    state = optimizer.init(weights)
    x, y = data()
    steps: dict[int, list[int]] = {}
    for step, records in seen:
        steps.setdefault(step, []).extend(records)
    for step in sorted(steps):
        _, gradients = gradients_of(weights, x[steps[step]], y[steps[step]])
        updates, state = optimizer.update(gradients, state, weights)
        weights = optax.apply_updates(weights, updates)
    return weights


def difference(one: Any, other: Any) -> float:
    apart = jax.tree_util.tree_map(lambda a, b: float(abs(a - b).max()), one, other)
    return float(max(jax.tree_util.tree_leaves(apart)))


@pytest.mark.parametrize(
    "optimizer",
    [
        functools.partial(optax.sgd, 0.1),
        functools.partial(optax.sgd, learning_rate=0.05, momentum=0.9),
        functools.partial(optax.sgd, 0.05, momentum=0.9, nesterov=True),
        functools.partial(optax.adam, 0.01, b1=0.8),
        functools.partial(optax.adam, 0.01, eps_root=1e-4),
        functools.partial(optax.adamw, 0.01, weight_decay=0.1),
        functools.partial(optax.adamw, optax.warmup_cosine_decay_schedule(0, 0.1, 4, 18)),
        functools.partial(optax.rmsprop, 0.01, eps=1e-4),
        functools.partial(optax.rmsprop, 0.01, eps=1e-4, eps_in_sqrt=False),
        functools.partial(optax.rmsprop, 0.01, centered=True, momentum=0.5, eps=1e-4),
        functools.partial(optax.rmsprop, optax.exponential_decay(0.01, 4, 0.5)),
        functools.partial(optax.adamw, 0.01, weight_decay=0.5, mask=large),
        functools.partial(optax.adadelta, 1.0, weight_decay=0.1, weight_decay_mask=large),
        functools.partial(
            optax.lamb, 0.01, weight_decay=0.1, mask={"hidden": True, "out": [False]}
        ),
    ],
)
def test_an_optimizer_gives_the_weights_of_optax(optimizer: Any) -> None:
    job, seen = trained(optimizer)
    assert len(seen) == 36 and job.summary is not None
    assert difference(job.params, plain(optimizer(), seen)) < 1e-5
    assert difference(job.params, params()) > 0.01


def test_the_same_script_gives_the_same_bits_and_measures_all_records() -> None:
    optimizer = functools.partial(optax.adam, 0.01)
    (one, _), (other, _) = [trained(optimizer, eval_data=data(300)) for _ in range(2)]
    assert one.model_sha256 == other.model_sha256 is not None and one.elected
    assert [entry["epoch"] for entry in one.history] == [0, 1, 2]
    x, y = data(300)
    assert one.metrics["loss"] == pytest.approx(float(loss_of(one.params, x, y)), abs=1e-5)


def test_keys_belong_to_batches() -> None:
    seen: dict[tuple[int, int], bytes] = {}
    for _ in range(2):
        optimizer = functools.partial(optax.sgd, 1e-30)
        with ebbflow.jax.join(params(), optimizer, data(), epochs=2, micro=8) as job:
            for epoch in job.epochs():
                for batch in epoch:
                    drawn = np.asarray(jax.random.normal(batch.key, 4)).tobytes()
                    assert seen.setdefault((epoch.number, batch.step), drawn) == drawn
                    job.step(*gradients_of(job.params, batch.x, batch.y))
    assert len(set(seen.values())) == len(seen) == 24


class Named:
    """Records that are dictionaries, with noise of their own."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, record: int) -> Any:
        if record == 100:
            raise KeyError("no such record")
        noise = np.random.normal(size=6)
        return {"x": np.float32(record + noise), "y": np.int32(record % 2)}


def test_data_sets_and_dictionaries_are_stacked_and_noise_is_keyed() -> None:
    first: dict[tuple[int, int], float] = {}
    x, y = data(24)
    for source in (Named(), Named(), {"x": x, "y": y}):
        optimizer = functools.partial(optax.sgd, 0.1)
        with ebbflow.jax.join(params(), optimizer, source, epochs=2, micro=8) as job:
            for epoch in job.epochs():
                for batch in epoch:
                    assert batch["x"].shape == (8, 6) and batch["y"].shape == (8,)
                    if isinstance(source, Named):
                        for record, row in zip(batch.records, batch["x"], strict=True):
                            value = float(row.sum())
                            assert first.setdefault((epoch.number, record), value) == value
                    else:
                        assert (batch["x"] == x[batch.records]).all()
                    job.step(*gradients_of(job.params, batch["x"], batch["y"]))
    assert len(set(first.values())) == len(first) == 48


def test_data_that_cannot_be_trained_are_refused() -> None:
    x, y = data()

    class Broken(Named):
        def __getitem__(self, record: int) -> Any:
            return super().__getitem__(100)

    sgd = functools.partial(optax.sgd, 0.1)
    cases: list[tuple[Any, type[Exception], str]] = [
        ((x, y[:5]), ValueError, r"arrays of equal length are expected, found {0: 96, 1: 5}"),
        ((x[:0], y[:0]), ValueError, "no records, and a job needs at least one; check its path"),
        (iter([1]), TypeError, "no __len__"),
        (Broken(), errors.RecordError, r"record \d+ of train_data: KeyError"),
    ]
    for source, error, expected in cases:
        with (
            pytest.raises(error, match=expected),
            ebbflow.jax.join(params(), sgd, source, epochs=1, micro=8) as job,
        ):
            for epoch in job.epochs():
                list(epoch)


def test_gradients_that_do_not_fit_are_refused() -> None:
    def tree(hidden: Any, out: Any) -> Any:
        return {"hidden": {"kernel": hidden, "bias": np.zeros(16, np.float32)}, "out": out}

    kernel, out = np.zeros((6, 16), np.float32), np.zeros((16, 2), np.float32)
    for gradients, expected in [
        (None, "expected gradients of the structure"),
        (tree(kernel, out), "expected gradients of the structure"),
        (tree(kernel.T, [out]), r"shape \(6, 16\) for `hidden.kernel`, found .* \(16, 6\)"),
        (tree(kernel, [out.astype(np.float16)]), r"for `out\.0`, found float16"),
    ]:
        with (
            pytest.raises(TypeError, match=expected),
            ebbflow.jax.join(
                params(), functools.partial(optax.sgd, 0.1), data(), epochs=1, micro=8
            ) as job,
        ):
            for epoch in job.epochs():
                for _ in epoch:
                    job.step(0.5, gradients)


def test_what_the_loop_may_not_do_is_refused() -> None:
    sgd = functools.partial(optax.sgd, 0.1)
    with ebbflow.jax.join(params(), sgd, data(), epochs=1, micro=8) as job:
        with pytest.raises(errors.SessionError, match="without a batch"):
            job.step(0.5, params())
        with pytest.raises(errors.SessionError, match=r"call job\.step\(loss, gradients\)"):
            job.push(0.5)
    for name in ("scheduler", "state", "threads"):
        with pytest.raises(TypeError, match=f"has no `{name}`"):
            ebbflow.jax.join(params(), sgd, data(), epochs=1, micro=8, **{name: 1})


def test_parameters_have_names_and_are_float32() -> None:
    assert [name for name, *_ in Tree(params()).described()] == [
        "hidden.bias",
        "hidden.kernel",
        "out.0",
    ]
    one = np.zeros(2, np.float32)
    for given, expected in [
        ({}, "nothing to train"),
        ({"a": one.astype(np.float16)}, "`a` is float16; only float32 is trained"),
        ({"a": {"b": one}, "a.b": one}, "2 arrays have the name `a.b`"),
    ]:
        with pytest.raises(ValueError, match=expected):
            Tree(given)


def test_optimizers_that_the_ps_do_not_have_are_refused_by_name() -> None:
    partial, tree = functools.partial, Tree(params())
    for recipe, expected in [
        (optax.adam(1e-3), "does not tell its settings"),
        (partial(optax.lion, 1e-3), "optimizer lion is none"),
        (partial(optax.rmsprop, 1e-3, nesterov=True, momentum=0.9), "no nesterov = True"),
        (partial(optax.rmsprop, 1e-3, initial_scale=1.0), "no initial_scale = 1.0"),
        (partial(optax.rmsprop, lambda step: 1.0 - (step > 3), momentum=0.9), "with a schedule"),
        (partial(optax.adamw, 1e-3, mask={"out": True}), "its mask does not fit"),
        (partial(optax.adam), "missing a required argument: 'learning_rate'"),
        (partial(optax.adam, 1e-3, nesterov=True), "no nesterov = True"),
        (partial(optax.sgd, 1e-3, accumulator_dtype="bfloat16"), "no accumulator_dtype"),
        (partial(optax.adamw, 1e-3, weight_decay=lambda step: 0.1), "weight_decay is a schedule"),
        (partial(optax.sgd, lambda step: 0.0), "never above 0"),
        (partial(optax.sgd, lambda step: 1.0 + step), "more than 65536 times"),
    ]:
        with pytest.raises(errors.UntranslatableError, match=expected):
            optimizer_settings(recipe, 70_000, tree)
    halves = optimizer_settings(partial(optax.sgd, optax.exponential_decay(0.5, 1, 0.5)), 3, tree)
    assert halves["schedule"]["table"] == [(0, 1.0), (1, 0.5), (2, 0.25)]
    assert optimizer_settings(partial(optax.sgd, lambda step: 0.1), 3, tree) == {
        "kind": "sgd",
        "learning_rate": pytest.approx(0.1),
    }
    masked = partial(optax.lamb, 1e-3, weight_decay=0.1, mask=large)
    assert optimizer_settings(masked, 3, tree)["groups"] == [
        {"tensors": ["hidden.bias"], "weight_decay": 0.0}
    ]
    everywhere = partial(optax.adamw, 1e-3, mask=True)
    assert "groups" not in optimizer_settings(everywhere, 3, tree)


def test_a_loop_tells_the_device_of_its_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Jax(params(), None)
    assert engine.device() == ("cpu", 0)
    facts, results = engine.numerics(1)
    assert ", cpu cpu, " in facts
    told = {"bytes_limit": 7}
    gpu = SimpleNamespace(platform="gpu", device_kind="A100", id=0, memory_stats=lambda: told)
    monkeypatch.setattr(Jax, "_place", lambda _: gpu)
    monkeypatch.delenv("EBBFLOW_DEVICE", raising=False)
    assert engine.device() == ("cuda:0", 7)
    monkeypatch.setenv("EBBFLOW_DEVICE", "cuda:2")
    assert engine.device() == ("cuda:2", 7)
    assert engine.numerics(1) == (facts.replace("cpu cpu", "gpu A100"), results)
    gpu.memory_stats = lambda: None
    assert engine.device() == ("cuda:2", 0), "its memory is not known"


LATE = """
import jax
jax.numpy.ones(8)
import ebbflow.jax
from ebbflow.jax import threads
threads.check()
"""


def test_a_package_that_comes_too_late_for_one_thread_says_so() -> None:
    def start(**variables: str) -> tuple[int, str]:
        kept = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
        command = [sys.executable, "-c", LATE]
        ended = subprocess.run(command, env=kept | variables, capture_output=True, text=True)
        return ended.returncode, ended.stderr

    code, said = start()
    assert code == 1 and "import ebbflow.jax first" in said
    flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    assert start(XLA_FLAGS=flags)[0] == 0
