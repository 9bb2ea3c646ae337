"""Which process of a job calls the objects that hear its events.

A cluster has one arbiter: its master. It gives each microbatch to one worker, and gives it to
another one when that worker dies. So each process with callbacks is also a worker of a second job,
``NAME.callbacks``, which takes one worker at a time (``fleet.workers.max = 1``). The process that
has a microbatch of it in its hands is elected. It answers every few seconds, so a process whose
lease was lost, for example when the master was started again, stops soon.

The second job computes nothing: its model is one number. The elected process cancels it when all
objects have heard the end.
"""

from __future__ import annotations

import json
import logging
import struct
import threading
from typing import Any

from ebbflow import _native
from ebbflow.client import Client
from ebbflow.errors import Error

_LOG = logging.getLogger("ebbflow")

# Seconds for which a process keeps a microbatch. A master that was restarted may elect another
# process, and both are elected for as long as this.
_TERM = 5.0

# Microbatches of the second job: enough for weeks.
_TERMS = 1_000_000

# Failures after which the second job would fail. Each process that ends may be one.
_MANY = 1_000_000


class Alone:
    """The only process of its job."""

    is_elected = True

    def wait(self) -> bool:
        """Return that it is this process."""
        return True

    def finish(self) -> None:
        """Say nothing, since nobody else is there."""

    def close(self) -> None:
        """Take no part any more."""


class Elected:
    """One process among those of a job on a cluster.

    Args:
        job: Name of the job, without a number.
        master: URL of the master.
        secrets: What this process shows and trusts; see :func:`ebbflow._reach.secrets`.
        script: Number of the submitted script that this process is one of. 0: none.
        agent: The descriptor by which this process reaches its agent, if it has one.
    """

    def __init__(
        self,
        job: str,
        master: str,
        secrets: dict[str, Any],
        script: int = 0,
        agent: int | None = None,
    ) -> None:
        self._name = f"{job[:54]}.callbacks"
        self._master = master
        self._secrets = secrets
        self._agent = agent
        self._changed = threading.Condition()
        self._is_elected = False
        self._is_over = False
        self._is_closed = False
        tensor = ("term", "parameter", [1], struct.pack("<f", 0.0))
        spec = json.dumps(_spec(self._name))
        self._session = _native.Session(
            spec, [tensor], [], 1, None, master, None, secrets or None, script, None, agent
        )
        self._thread = threading.Thread(target=self._run, name="ebbflow-callbacks", daemon=True)
        self._thread.start()

    @property
    def is_elected(self) -> bool:
        """Whether it is this process now."""
        return self._is_elected

    def wait(self) -> bool:
        """Wait until it is this process, or another one has called all. Returns whether it is."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_elected or self._is_over)
            return self._is_elected

    def finish(self) -> None:
        """Say that this process has called all, so that nobody else does."""
        try:
            Client(self._master, **self._secrets, _agent=self._agent).cancel(self._name, force=True)
        except Error as error:
            _LOG.warning(
                "%s cannot be cancelled, and another process may call its callbacks again: %s",
                self._name,
                error,
            )

    def close(self) -> None:
        """Take no part any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._session.stop()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._is_closed:
                message = self._session.next()
                if isinstance(message, _native.Train):
                    self._hold(message)
                elif isinstance(message, tuple) and message[0] == "broken":
                    _LOG.warning("callbacks of this process hear no more events: %s", message[1])
                    break
                elif isinstance(message, tuple) and message[0] == "ended":
                    break
                # The worker waits for a request that is still there.
                del message
        except RuntimeError:
            # The session was stopped.
            pass
        self._set(elected=False, over=True)

    def _hold(self, request: Any) -> None:
        """Be elected for one term."""
        import numpy

        self._set(elected=True, over=False)
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed, timeout=_TERM)
            self._is_elected = False
            if self._is_closed:
                # What is not answered goes to another process.
                return
        for region in request.buffers():
            numpy.asarray(region)[:] = 0
        request.answer(0.0)

    def _set(self, *, elected: bool, over: bool) -> None:
        with self._changed:
            self._is_elected = elected
            self._is_over = over
            self._changed.notify_all()


def _spec(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "epochs": 1,
        "model": {"builtin": "python", "loss": "module"},
        "data": {"format": "index", "train": {"files": [str(_TERMS)]}, "shuffle": "none"},
        "batch": {"micro": 1},
        "optimizer": {"kind": "sgd", "learning_rate": 1.0},
        "consistency": {"mode": "async"},
        "fleet": {"workers": {"min": 1, "max": 1}},
        "limits": {"attempts_max": _MANY, "deaths_max": _MANY},
    }
