"""Tasks and workflows after the manner of Flyte, run by calling them.

A task is a function with typed arguments and a typed result. It may be retried, its result may be
kept for equal arguments, and it starts only on a machine that has its resources.
``docs/migrate-from-flyte.md`` shows both sides.
"""

from __future__ import annotations

from ebbflow.flow.resources import Resources
from ebbflow.flow.task import Task, task, workflow
from ebbflow.flow.values import Parameters

__all__ = ["Parameters", "Resources", "Task", "task", "workflow"]
