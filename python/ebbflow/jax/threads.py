"""How many threads XLA computes with, and the numerics class of a loop in JAX."""

from __future__ import annotations

import hashlib
import os
import sys
from typing import Any

# XLA reads the variable when JAX computes for the first time.
_FLAGS = ("--xla_cpu_multi_thread_eigen=false", "intra_op_parallelism_threads=1")

_too_late = False


def use_one_thread() -> None:
    """Set ``XLA_FLAGS``, unless JAX has computed something already."""
    global _too_late
    given = os.environ.get("XLA_FLAGS", "").split()
    missing = [flag for flag in _FLAGS if flag not in given]
    _too_late = bool(missing) and _has_begun()
    if missing and not _too_late:
        os.environ["XLA_FLAGS"] = " ".join(given + missing)


def check() -> None:
    """Check that XLA computes with one thread.

    Raises:
        ValueError: JAX had begun before this package could set the flags.
    """
    if _too_late:
        raise ValueError(
            "JAX computed something before ebbflow.jax was imported, so XLA has several threads, "
            "and their number changes bits; import ebbflow.jax first, or start the script with "
            f"XLA_FLAGS={' '.join(_FLAGS)!r}"
        )


def numerics(device: Any) -> tuple[str, bytes]:
    """Return facts that decide how JAX rounds, for people, and a hash of fixed operations.

    Args:
        device: The device of JAX that computes.
    """
    import jax
    import numpy
    from jax import numpy as jnp

    facts = f"jax {jax.__version__}, {device.platform} {device.device_kind}, 1 thread"

    def loss(weights: list[Any], x: Any) -> Any:
        kernel, matrix, bias = weights
        dimensions = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=dimensions)
        x = jax.nn.gelu(x).reshape(x.shape[0], -1) @ matrix + bias
        return -jnp.mean(jax.nn.log_softmax(x)[:, 0] + jnp.tanh(x).sum(1))

    drawn = numpy.random.default_rng(1)
    shapes = [(3, 3, 1, 8), (8 * 17 * 17, 33), (33,)]
    weights = [jnp.asarray(drawn.normal(size=shape), jnp.float32) for shape in shapes]
    x = jnp.asarray(drawn.normal(size=(7, 17, 17, 1)), jnp.float32)
    value, gradients = jax.jit(jax.value_and_grad(loss))(weights, x)
    hashed = hashlib.sha256()
    for array in [value, *gradients]:
        hashed.update(numpy.asarray(array).tobytes())
    return facts, hashed.digest()


def _has_begun() -> bool:
    bridge = sys.modules.get("jax._src.xla_bridge")
    return bridge is not None and bool(bridge.backends_are_initialized())
