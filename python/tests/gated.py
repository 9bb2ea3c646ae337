"""Runs a script that joins a job, and holds it at a gate until a line comes on stdin.

    python gated.py GATE SCRIPT [ARGUMENT ...]

A gate is ``none``, ``join`` (the process takes part, and its loop has not begun), or a number of
steps, after which the loop waits with a batch in its hands. At its gate the process prints ``at
the gate``. A test never depends on speed that way. The last line of stdout is a JSON object.
"""

import functools
import json
import runpy
import sys
from collections.abc import Callable
from typing import Any

import ebbflow
from ebbflow import session as sessions_module


def main() -> None:
    gate, script, *arguments = sys.argv[1:]
    join, push = ebbflow.join, ebbflow.Session.push
    sessions: list[ebbflow.Session] = []
    steps = 0

    def wait() -> None:
        print("at the gate", flush=True)
        sys.stdin.readline()

    @functools.wraps(join)
    def joined(*values: Any, **options: Any) -> ebbflow.Session:
        sessions.append(join(*values, **options))
        # A session of JAX has no backward pass, and a `step` of its own.
        kind: Any = type(sessions[-1])
        if "step" in vars(kind) and kind is not ebbflow.Session:
            kind.step = gated(kind.step)
        if gate == "join":
            wait()
        return sessions[-1]

    def gated(hand_over: Callable[..., float]) -> Callable[..., float]:
        """Return a method that hands over gradients, behind the gate."""

        def handed_over(*values: Any) -> float:
            nonlocal steps
            if gate == str(steps):
                wait()
            steps += 1
            return hand_over(*values)

        return handed_over

    ebbflow.join = sessions_module.join = joined
    ebbflow.Session.push = gated(push)  # type: ignore[method-assign]
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")
    (job,) = sessions
    found = {"sha": job.model_sha256, "elected": job.elected, "steps": steps}
    found["numerics"] = None if job.summary is None else job.summary["numerics"]
    print(json.dumps({**found, "metrics": job.metrics, "history": job.history}))


if __name__ == "__main__":
    main()
