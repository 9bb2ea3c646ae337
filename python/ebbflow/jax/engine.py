"""What a loop in JAX computes with: see :class:`ebbflow.engine.Engine`."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from ebbflow._device import CPU, name_on_host
from ebbflow.arrays import Arrays
from ebbflow.engine import Engine
from ebbflow.jax import threads
from ebbflow.jax.optimizers import optimizer_settings
from ebbflow.jax.tree import Tree
from ebbflow.records import seed_host


class Jax(Engine):
    """JAX. Its parameters never change; a request brings new ones.

    Args:
        params: The parameters.
        session: Class of the session.

    Raises:
        ValueError: The parameters cannot be trained, or XLA has several threads.
    """

    def __init__(self, params: Any, session: Any) -> None:
        threads.check()
        self.tensors: Tree = Tree(params)
        self.session = session

    def records(self, data: Any, what: str, seed: int) -> Arrays:
        import jax

        return Arrays(data, what, seed, jax.tree_util.tree_map)

    def settings(self, optimizer: Any, steps: int) -> dict[str, Any]:
        return optimizer_settings(optimizer, steps, self.tensors)

    def use_threads(self, _: int) -> int:
        return 1

    def numerics(self, _: int) -> tuple[str, bytes]:
        return threads.numerics(self._place())

    def device(self) -> tuple[str, int]:
        place = self._place()
        if place.platform != "gpu":
            return CPU
        # What JAX may take of the memory: it does not tell all of it.
        memory = (place.memory_stats() or {}).get("bytes_limit", 0)
        return name_on_host(place.id, os.environ), int(memory)

    def seed(self, seed: int, *position: int) -> None:
        seed_host(seed, *position)

    def key(self, number: int) -> Any:
        import jax

        return jax.random.fold_in(jax.random.key(number >> 32), number & 0xFFFF_FFFF)

    def measuring(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def _place(self) -> Any:
        """Return the device on which the parameters are, as JAX names it."""
        import jax

        return next(iter(jax.tree_util.tree_leaves(self.tensors.params)[0].devices()))
