"""``ebbflow.jax.join``: a training loop in JAX as a part of a job.

The parameters are a pytree of float32 arrays. ``job.params`` has the right version of them for each
batch, and ``job.step(loss, gradients)`` hands gradients of the same structure to the job.

Import it before JAX computes something: it lets XLA compute with one thread on the CPU, because
their number changes bits.
"""

from __future__ import annotations

from ebbflow.jax.session import Session, join
from ebbflow.jax.threads import use_one_thread

__all__ = ["Session", "join"]

use_one_thread()
