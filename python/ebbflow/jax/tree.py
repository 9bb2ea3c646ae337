"""The parameters of a model in JAX: float32 arrays in a pytree, by names.

``{"dense": {"kernel": .., "bias": ..}}`` has the tensors ``dense.kernel`` and ``dense.bias``.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import Any


class Tree:
    """Parameters, in the order in which the job has them.

    Args:
        params: The pytree. Its values are version 0 of the job.

    Attributes:
        params: The version of the last request, of the given structure, as arrays of JAX.

    Raises:
        ValueError: There are no arrays, one is not float32, or two have the same name.
    """

    def __init__(self, params: Any) -> None:
        import jax
        import numpy

        found, self._structure = jax.tree_util.tree_flatten_with_path(params)
        if not found:
            raise ValueError("params: the pytree has no arrays, so there is nothing to train")
        self._names = [_name(path) for path, _ in found]
        name, count = Counter(self._names).most_common(1)[0]
        if count > 1:
            raise ValueError(f"params: {count} arrays have the name `{name}`; rename one")
        arrays = [numpy.asarray(array) for _, array in found]
        for name, array in zip(self._names, arrays, strict=True):
            if array.dtype != numpy.float32:
                raise ValueError(
                    f"params: `{name}` is {array.dtype}; only float32 is trained: convert it, and "
                    "compute in another type inside the loss"
                )
        self._shapes = [array.shape for array in arrays]
        self._first = [array.tobytes() for array in arrays]
        self.params = self._grown([array.copy() for array in arrays])

    def spared(self, mask: Any) -> list[str]:
        """Return the names of the arrays for which a mask of optax has ``False``.

        Args:
            mask: A pytree of booleans that is a prefix of ``params``, or a function of ``params``
                that returns one.

        Raises:
            TypeError: The mask has another structure.
            ValueError: The mask has another structure.
        """
        import jax

        tree_map = jax.tree_util.tree_map
        flags = mask(self.params) if callable(mask) else mask
        whole = tree_map(lambda flag, part: tree_map(lambda _: flag, part), flags, self.params)
        leaves = jax.tree_util.tree_leaves(whole)
        return [name for name, flag in zip(self._names, leaves, strict=True) if not flag]

    def described(self) -> list[tuple[str, str, list[int], bytes]]:
        """Return name, role, shape and first values of each tensor."""
        parts = zip(self._names, self._shapes, self._first, strict=True)
        return [(name, "parameter", list(shape), first) for name, shape, first in parts]

    def described_constants(self) -> list[tuple[str, str, list[int], bytes]]:
        """Return no constants: a loop has its own."""
        return []

    def fingerprint(self, _: object) -> str:
        """Return a hash of names and shapes."""
        hashed = hashlib.sha256()
        for name, shape in zip(self._names, self._shapes, strict=True):
            hashed.update(f"{name} float32 {shape};".encode())
        return hashed.hexdigest()

    def bind(self, request: Any) -> None:
        """Copy the weights of a request."""
        import numpy

        # Arrays of JAX never change, and the memory of a request does.
        self.params = self._grown([numpy.array(region) for region in request.weights()])

    def load(self, weights: dict[str, Any]) -> None:
        """Copy a job's final weights."""
        self.params = self._grown([weights[name] for name in self._names])

    def collect(self, request: Any, gradients: Any) -> None:
        """Write gradients times the number of records into a request.

        Raises:
            TypeError: They have another structure, shape or type than the parameters.
        """
        import jax
        import numpy

        arrays, structure = jax.tree_util.tree_flatten(gradients)
        if structure != self._structure:
            raise TypeError(
                f"job.step: expected gradients of the structure {self._structure}, found "
                f"{structure}"
            )
        parts = list(zip(self._names, self._shapes, map(numpy.asarray, arrays), strict=True))
        for name, shape, array in parts:
            if array.shape != shape or array.dtype != numpy.float32:
                raise TypeError(
                    f"job.step: expected a float32 gradient of shape {shape} for `{name}`, found "
                    f"{array.dtype} of shape {array.shape}"
                )
        weight = numpy.float32(request.weight)
        for (_, shape, array), region in zip(parts, request.buffers(), strict=True):
            numpy.multiply(array, weight, out=numpy.asarray(region).reshape(shape))

    def _grown(self, flat: list[Any]) -> Any:
        import jax
        from jax import numpy as jnp

        pairs = zip(flat, self._shapes, strict=True)
        arrays = [jnp.asarray(array.reshape(shape)) for array, shape in pairs]
        return jax.tree_util.tree_unflatten(self._structure, arrays)


def _name(path: Any) -> str:
    parts = []
    for key in path:
        for attribute in ("key", "idx", "name"):
            if hasattr(key, attribute):
                parts.append(str(getattr(key, attribute)))
                break
        else:
            parts.append(str(key))
    return ".".join(parts) or "params"
