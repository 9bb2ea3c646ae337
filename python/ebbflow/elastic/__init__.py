"""The training loops of ElasticDL, as part of a job.

A function ``elastic_train(dataset)`` has the loop. It registers its model and its optimizer with
:class:`ElasticBroadcastObject`, and marks the function that merges gradients with
:func:`elastic_allreduce`. :func:`run` calls it. ``docs/migrate-from-elasticdl.md`` shows both
sides.

Names of TorchElastic are here too: :class:`ElasticDistributedSampler` and :func:`rendezvous`.
"""

from __future__ import annotations

from typing import Any

from ebbflow.elastic.loop import Dataset, ElasticBroadcastObject, run
from ebbflow.elastic.merge import elastic_allreduce
from ebbflow.elastic.torchelastic import ElasticDistributedSampler, rendezvous
from ebbflow.errors import UnsupportedError

__all__ = [
    "Dataset",
    "ElasticBroadcastObject",
    "ElasticDistributedSampler",
    "elastic_allreduce",
    "rendezvous",
    "run",
]

_PULLED = "a process pulls the weights before its first batch; remove the call"
_MERGED = "the parameter servers merge gradients; keep the tape, and register the optimizer itself"
_RATE = (
    "the number of processes changes while a job trains, and no update depends on it; fix the "
    "records of an update with `effective` of run, and do not scale the learning rate"
)
_RANK = (
    "processes come and go, so they have no rank; `dataset.job.elected` is true after the end in "
    "the one process that writes files"
)

#: Names of Horovod and ElasticDL that a loop may still use, with what to do instead.
_INSTEAD = {
    "DistributedGradientTape": _MERGED,
    "DistributedOptimizer": _MERGED,
    "broadcast_optimizer_state": _PULLED,
    "broadcast_parameters": _PULLED,
    "broadcast_variables": _PULLED,
    "init": "`ebbflow.elastic.run` takes part in the job; remove the call",
    "local_rank": _RANK,
    "rank": _RANK,
    "report_batch_finished": "@elastic_allreduce reports each batch; remove the call",
    "size": _RATE,
}


def __getattr__(name: str) -> Any:
    if name in _INSTEAD:
        raise UnsupportedError(f"ebbflow.elastic has no {name}: {_INSTEAD[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
