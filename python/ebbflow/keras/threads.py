"""How many threads TensorFlow computes with, and the numerics class of a loop that uses it."""

from __future__ import annotations

import hashlib
import os
import sys
from typing import Any

# TensorFlow reads the variables when it computes for the first time.
_VARIABLES = {
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
    "TF_DETERMINISTIC_OPS": "1",
}

_too_late = False


def use_one_thread() -> None:
    """Set variables of TensorFlow, unless it has computed something already."""
    global _too_late
    missing = {name for name, value in _VARIABLES.items() if os.environ.get(name) != value}
    _too_late = bool(missing) and _has_begun()
    if not _too_late:
        os.environ.update(_VARIABLES)


def check() -> None:
    """Check that TensorFlow computes with one thread.

    Raises:
        ValueError: TensorFlow had begun before this package could set the variables.
    """
    if _too_late:
        given = " ".join(f"{name}={value}" for name, value in _VARIABLES.items())
        raise ValueError(
            "TensorFlow computed something before ebbflow.keras was imported, so it has several "
            "threads, and their number changes bits; import ebbflow.keras (or ebbflow.fabric) "
            f"before the model is made, or start the script with {given}"
        )


def numerics() -> tuple[str, bytes]:
    """Return facts that decide how TensorFlow rounds, and a hash of fixed operations."""
    import keras
    import numpy
    import tensorflow as tf

    facts = f"keras {keras.__version__}, tensorflow {tf.__version__}, {_devices()}, 1 thread"
    drawn = numpy.random.default_rng(1)
    shapes = [(3, 3, 1, 8), (8 * 17 * 17, 33), (33,)]
    weights = [tf.constant(drawn.normal(size=shape), tf.float32) for shape in shapes]
    x = tf.constant(drawn.normal(size=(7, 17, 17, 1)), tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(weights)
        kernel, matrix, bias = weights
        hidden = tf.nn.gelu(tf.nn.conv2d(x, kernel, 1, "SAME"))
        outputs = tf.reshape(hidden, (7, -1)) @ matrix + bias
        logs = tf.nn.log_softmax(outputs)[:, 0]
        value = -tf.reduce_mean(logs + tf.reduce_sum(tf.tanh(outputs), 1))
    gradients: list[Any] = tape.gradient(value, weights)
    hashed = hashlib.sha256()
    for array in [value, *gradients]:
        hashed.update(array.numpy().tobytes())
    return facts, hashed.digest()


def _devices() -> str:
    """Return the kinds of devices, and the models of GPUs, which round differently."""
    import tensorflow as tf

    kinds = {device.device_type for device in tf.config.list_logical_devices()}
    details = map(tf.config.experimental.get_device_details, tf.config.get_visible_devices("GPU"))
    models = {str(found["device_name"]) for found in details if "device_name" in found}
    return ", ".join(sorted(kinds) + sorted(models))


def _has_begun() -> bool:
    eager = sys.modules.get("tensorflow.python.eager.context")
    made = getattr(eager, "_context", None)
    return made is not None and bool(getattr(made, "_initialized", True))
