"""Takes large gradients out of a module while its backward pass still computes others."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

#: Gradients of fewer bytes are taken after the backward pass, which costs less than a hand-over.
BYTES_MIN = 1 << 20

#: Bytes that one thread takes at a time, about a millisecond's work.
_PART_BYTES = 1 << 22


class Early:
    """Multiplies gradients into given memory, on a thread of its own.

    Most of a gradient's way to the ps is memory traffic, for which another core has time while the
    loop's core computes. The loop takes what is left at the end of the pass. The product of a
    gradient and a number is the same on any thread.

    Args:
        parameters: Parameters of a module. Large ones are watched.
    """

    def __init__(self, parameters: Sequence[Any]) -> None:
        self._watched = [
            (at, tensor)
            for at, tensor in enumerate(parameters)
            if tensor.device.type == "cpu" and tensor.nbytes >= BYTES_MIN
        ]
        self._hooks: list[Any] = []
        self._thread: threading.Thread | None = None
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # Number of the backward pass: an interrupt may leave answers of an earlier one.
        self._number = 0
        self._outs: Sequence[Any] | None = None
        self._weight = 1.0
        # How often the gradient at a place has grown in this backward pass.
        self._grown: Counter[int] = Counter()
        # Parts of gradients that were handed over in it.
        self._parts = 0

    def begin(self, outs: Sequence[Any], weight: float) -> None:
        """Begin a backward pass whose gradients times ``weight`` belong into ``outs``."""
        if self._watched and self._thread is None:
            work = (self._calls.get, self._answers)
            self._thread = threading.Thread(target=_take, args=work, name="ebbflow", daemon=True)
            self._thread.start()
            self._hooks = [
                tensor.register_post_accumulate_grad_hook(self._hook(at))
                for at, tensor in self._watched
            ]
        self._outs, self._weight = outs, weight
        self._number += 1

    def end(self) -> set[int]:
        """Wait for what has begun. Returns the places of the gradients that are in ``outs``."""
        grown, self._grown, self._outs = self._grown, Counter(), None
        parts, self._parts = self._parts, 0
        _take(self._left, self._answers)
        failures: list[BaseException | None] = []
        while len(failures) < parts:
            number, failure = self._answers.get()
            if number == self._number:
                failures.append(failure)
        for failure in failures:
            if failure is not None:
                raise failure
        # Checkpoints of activations add to a gradient in several parts.
        return {at for at, times in grown.items() if times == 1}

    def close(self) -> None:
        """End the thread, and watch the parameters no more."""
        for hook in self._hooks:
            hook.remove()
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join()
        self._hooks, self._thread = [], None

    def _left(self) -> Any:
        try:
            return self._calls.get_nowait()
        except queue.Empty:
            return None

    def _hook(self, at: int) -> Any:
        import torch

        def accumulated(tensor: Any) -> None:
            gradient = tensor.grad
            if self._outs is None or gradient.layout != torch.strided:
                return
            self._grown[at] += 1
            if self._grown[at] > 1:
                return
            rows = max(1, _PART_BYTES // max(1, gradient[0].nbytes))
            pairs = zip(gradient.split(rows), self._outs[at].split(rows), strict=True)
            for part, out in pairs:
                self._parts += 1
                self._calls.put((self._number, part, self._weight, out))

        return accumulated


def _take(following: Callable[[], Any], answers: queue.SimpleQueue[Any]) -> None:
    """Take parts of gradients until nothing follows."""
    import torch

    while (call := following()) is not None:
        number, gradient, weight, out = call
        failure: BaseException | None = None
        try:
            with torch.no_grad():
                torch.mul(gradient, weight, out=out)
        except BaseException as error:
            failure = error
        # A request is answered with its memory if nobody else has it. So let go of it first.
        del call, gradient, out
        answers.put((number, failure))
