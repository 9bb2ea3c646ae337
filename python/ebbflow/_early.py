"""Takes large gradients out of a module while its backward pass still computes others."""

from __future__ import annotations

import functools
import itertools
import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from ebbflow.errors import SessionError

#: Gradients of fewer bytes are taken after the backward pass, which costs less than a hand-over.
BYTES_MIN = 1 << 20

#: Bytes that one thread takes at a time, about a millisecond's work. A CUDA device takes a gradient
#: at once.
_PART_BYTES = 1 << 22


class Early:
    """Multiplies gradients into given memory, on a thread of its own.

    Most of a gradient's way to the ps is memory traffic, for which another core has time while the
    loop's core computes. The loop takes what is left at the end of the pass. The product of a
    gradient and a number is the same on any thread.

    A gradient that is taken is told at once, so that the worker pushes it meanwhile. Torch does not
    say whether a gradient will grow again, as one does that checkpoints of activations compute in
    several parts. So nothing is told in the first pass. If every gradient grew once in it, later
    passes are told.

    A CUDA device computes what torch has told it later. There the thread tells a stream of its own
    to wait for the gradient, and waits for that stream before it tells anybody. Models on several
    devices are left alone.

    Args:
        names: Names of the parameters of a module.
        parameters: These parameters. Large ones are watched.

    Attributes:
        has_told: Whether a gradient of the last pass was told.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[Any]) -> None:
        self.has_told = False
        self._names = names
        # `None`: no pass has ended.
        self._tells: bool | None = None
        is_alone = len({tensor.device for tensor in parameters}) == 1
        self._watched = [
            (at, tensor)
            for at, tensor in enumerate(parameters)
            if is_alone and tensor.device.type in ("cpu", "cuda") and tensor.nbytes >= BYTES_MIN
        ]
        self._hooks: list[Any] = []
        self._thread: threading.Thread | None = None
        self._calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # Number of the backward pass: an interrupt may leave answers of an earlier one.
        self._number = 0
        self._outs: list[Any] | None = None
        self._weight = 1.0
        self._tell: Callable[[int], None] = _nobody
        # How often the gradient at a place has grown in this backward pass.
        self._grown: Counter[int] = Counter()
        # Parts of gradients that were handed over in it.
        self._parts = 0

    def begin(self, outs: list[Any], weight: float, tell: Callable[[int], None]) -> None:
        """Begin a backward pass whose gradients times ``weight`` belong into ``outs``.

        ``tell`` gets the place of each gradient that is there, on any thread. Its place in ``outs``
        is ``None`` then, because what is told belongs to the worker.
        """
        if self._watched and self._thread is None:
            work = (self._calls.get, self._answers)
            self._thread = threading.Thread(target=_take, args=work, name="ebbflow", daemon=True)
            self._thread.start()
            self._hooks = [
                tensor.register_post_accumulate_grad_hook(self._hook(at))
                for at, tensor in self._watched
            ]
        # An interrupt may have left parts of an earlier pass.
        while self._left() is not None:
            pass
        self._outs, self._weight, self._tell = outs, weight, tell
        self._number += 1
        self.has_told = False

    def end(self, *, is_whole: bool) -> set[int]:
        """Wait for what has begun. Returns the places of the gradients that are taken.

        Args:
            is_whole: Whether the backward pass has computed all gradients.

        Raises:
            SessionError: A gradient that was told has grown again.
        """
        grown, self._grown, self._outs = self._grown, Counter(), None
        parts, self._parts = self._parts, 0
        _take(self._left, self._answers)
        failures: list[BaseException | None] = []
        while len(failures) < parts:
            number, failure = self._answers.get()
            if number == self._number:
                failures.append(failure)
        self._tell = _nobody
        for failure in failures:
            if failure is not None:
                raise failure
        # Checkpoints of activations add to a gradient in several parts.
        again = [at for at, times in grown.items() if times > 1]
        if again and self.has_told:
            # Another lease of this process computes it.
            self._tells = False
            raise SessionError(
                f"the gradient of `{self._names[again[0]]}` grew again after it had been handed to "
                "the job, which did not happen in the first backward pass: give "
                "torch.utils.checkpoint use_reentrant=False, or call loss.backward() and job.push "
                "in place of job.step"
            )
        if is_whole and self._tells is None:
            self._tells = not again
        return set(grown) - set(again)

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
            made = _made(gradient)
            rows = len(gradient) if made else max(1, _PART_BYTES // max(1, gradient[0].nbytes))
            gradients, outs = deque(gradient.split(rows)), deque(self._outs[at].split(rows))
            ended = self._told(at, len(outs)) if self._tells else None
            while outs:
                # Nothing here may keep a view of what is told: the worker would copy it then.
                part = (gradients.popleft(), self._weight, outs.popleft(), made)
                self._calls.put((self._number, part, ended))
                del part
                # An interrupt between the two leaves an answer, which nobody waits for.
                self._parts += 1

        return accumulated

    def _told(self, at: int, parts: int) -> Callable[[], None]:
        """Return what is called after each part of a gradient, and tells it after the last one."""
        assert self._outs is not None
        self._outs[at] = None
        self.has_told = True
        # Parts end on two threads. `next` counts each once.
        tell, ends = self._tell, itertools.count(1)

        def ended() -> None:
            if next(ends) == parts:
                tell(at)

        return ended


def _nobody(_: int) -> None:
    """Hear that a gradient is there."""


def _take(following: Callable[[], Any], answers: queue.SimpleQueue[Any]) -> None:
    """Take parts of gradients until nothing follows."""
    import torch

    while (call := following()) is not None:
        number, part, ended = call
        failure: BaseException | None = None
        try:
            with torch.no_grad():
                _multiply(*part)
        except BaseException as error:
            failure = error
        # A request is answered with its memory if nobody else has it. So let go of it first.
        del call, part
        try:
            if failure is None and ended is not None:
                ended()
        except BaseException as error:
            failure = error
        answers.put((number, failure))


def _made(gradient: Any) -> Any:
    """Return the event after which a CUDA device has computed a gradient; ``None`` on the host."""
    import torch

    if gradient.device.type != "cuda":
        return None
    return torch.cuda.current_stream(gradient.device).record_event()


def _multiply(gradient: Any, weight: float, out: Any, made: Any) -> None:
    """Write a gradient times a number into ``out``, after the event ``made``, and wait for it."""
    import torch

    if made is None:
        torch.mul(gradient, weight, out=out)
        return
    stream = _stream(gradient.device)
    stream.wait_event(made)
    with torch.cuda.stream(stream):
        if out.device == gradient.device:
            torch.mul(gradient, weight, out=out)
        else:
            out.copy_(gradient * weight)
    stream.synchronize()


@functools.cache
def _stream(device: Any) -> Any:
    """Return the stream of a CUDA device on which gradients are taken."""
    import torch

    return torch.cuda.Stream(device)
