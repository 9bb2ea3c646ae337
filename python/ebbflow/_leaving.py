"""SIGTERM in a training loop: this process's part in the job goes back to it at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any


class Leaving:
    """Leaves a job when this process is asked to end.

    The handler calls ``leave``, then the handler that the user has set, and raises ``SystemExit``
    with 143, the status of a process that SIGTERM has ended. Python runs handlers on its main
    thread alone, so a loop on another thread has none. Where the user ignores SIGTERM,
    it stays ignored.

    Args:
        leave: Hands back what this process has of the job, without waiting.
        what: What the process does then, for people.

    Attributes:
        told: Whether SIGTERM came.
    """

    def __init__(self, leave: Callable[[], None], what: str) -> None:
        self._leave = leave
        self._what = what
        self._process = os.getpid()
        self._before: Any = None
        self._set = False
        # Whether the part of this process ends already.
        self._quiet = False
        self.told = False

    def begin(self) -> None:
        """Set the handler."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._before = signal.getsignal(signal.SIGTERM)
        # What C code has set cannot be set again from here.
        if self._before is None or self._before is signal.SIG_IGN:
            return
        signal.signal(signal.SIGTERM, self._on)
        self._set = True

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Let the part of this process end undisturbed, and then set the handler of before."""
        self._quiet = True
        told = self.told
        try:
            yield
        finally:
            # Another handler that the user has set meanwhile stays.
            if self._set and signal.getsignal(signal.SIGTERM) == self._on:
                signal.signal(signal.SIGTERM, self._before)
            self._set = False
        if not told:
            self.check()

    def check(self) -> None:
        """Raise ``SystemExit`` again if SIGTERM came, for a loop that has caught it.

        Raises:
            SystemExit: SIGTERM came.
        """
        if self.told:
            raise SystemExit(128 + signal.SIGTERM)

    def _on(self, number: int, frame: FrameType | None) -> None:
        if not self._set or os.getpid() != self._process:
            # A fork has no part in the job.
            self._pass_on(number, frame)
            return
        if self.told:
            # Launchers tell processes, and so may what launches them.
            return
        self.told = True
        self._leave()
        with contextlib.suppress(OSError):
            # The signal may have interrupted a print.
            os.write(2, f"ebbflow: SIGTERM: {self._what}\n".encode())
        if callable(self._before):
            self._before(number, frame)
        if not self._quiet:
            self.check()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if callable(self._before):
            self._before(number, frame)
        elif self._before is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
