"""Finds writes to gradients after the backward pass, such as clipping."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Gradients:
    """Remembers the gradients of parameters as a backward pass left them.

    Args:
        parameters: The parameters.
    """

    def __init__(self, parameters: Sequence[Any]) -> None:
        self._parameters = list(parameters)
        # The gradient at each place, and torch's count of its writes.
        self._left: list[tuple[Any, int] | None] = [None] * len(self._parameters)
        self._hooks: list[Any] = []

    def watch(self) -> None:
        """Begin to remember gradients."""
        self._hooks = [
            tensor.register_post_accumulate_grad_hook(self._hook(at))
            for at, tensor in enumerate(self._parameters)
        ]

    def written(self) -> int | None:
        """Return the place of a gradient that was written after its backward pass, if one was.

        A gradient that was assigned in place of that of the backward pass is not written.
        """
        for at, (tensor, left) in enumerate(zip(self._parameters, self._left, strict=True)):
            if left is not None and tensor.grad is left[0] and left[0]._version != left[1]:
                return at
        return None

    def forget(self) -> None:
        """Forget the gradients."""
        self._left = [None] * len(self._parameters)

    def close(self) -> None:
        """Remember nothing any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self.forget()

    def _hook(self, at: int) -> Any:
        def accumulated(tensor: Any) -> None:
            gradient = tensor.grad
            self._left[at] = (gradient, gradient._version)

        return accumulated
