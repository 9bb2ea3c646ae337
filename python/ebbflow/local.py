"""A whole job in this process: master, ps and workers, without sockets."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ebbflow import _native, _torchscript
from ebbflow._collect import Collector, finished
from ebbflow._job import JobSource, Resume, prepare
from ebbflow.result import Result
from ebbflow.status import Event, Status

__all__ = ["run"]


def run(
    job: JobSource,
    *,
    workers: int | None = None,
    ps: int | None = None,
    threads: int = 1,
    device: str = "auto",
    data_root: str | os.PathLike[str] | None = None,
    data_patience: str = "1m",
    changes: Mapping[str, Any] | None = None,
    resume: Resume = False,
    out: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    on_event: Callable[[Event], object] | None = None,
    check: bool = True,
) -> Result:
    """Train a job in this process, and return its result.

    This is ``ebb run`` with Ebbflow's own networks. The trained bits are those of any fleet.
    Ctrl-C ends the job at once; what it has trained is lost then, except checkpoints.

    Args:
        job: Path of a job file, or its content as a dictionary. Relative paths in it start from the
            file's folder; in a dictionary they start from the current folder.
        workers: Number of workers. They take turns on the devices. Default: one for each CUDA
            device within the bounds of the job, otherwise the smallest that the job asks for.
        ps: Number of ps. Default: that of the job.
        threads: Threads of one gradient computation, per worker. Another number gives other bits.
        device: ``cpu``; ``cuda:N``, or several such as ``cuda:0,2``; ``GPU-UUID`` or ``MIG-UUID``,
            as ``nvidia-smi -L`` spells them; ``all`` CUDA devices; or ``auto``: every CUDA device,
            otherwise the CPU.
        data_root: Folder that all data paths of the job start from, absolute ones too.
        data_patience: Time during which a failed request for data by URL is repeated, with waits
            that double from 0.2s. Then the task fails. At most 10min; a few attempts are made in
            any case.
        changes: Settings to change, such as ``{"optimizer.learning_rate": 0.01}``.
        resume: Go on from the newest checkpoint of an earlier run.
        out: Folder for the results. Default: none; the model stays in memory.
        progress: Show the progress: ``None`` on a terminal and in a notebook, ``True`` everywhere,
            ``False`` never.
        on_event: Called with each event, in order. An exception in it ends the job.
        check: Raise an exception if the job did not succeed.

    Raises:
        InvalidJobError: The job is wrong: every violation at once. Or a file cannot be read.
        ClusterError: A part of the cluster failed, for example because a device is not there.
        OutputError: ``out`` cannot be written.
        JobFailedError: The job failed.
    """
    cluster = {
        "workers": workers,
        "ps": ps,
        "threads": threads,
        "device": device,
        "data_root": data_root,
        "data_patience": data_patience,
    }
    folder = None if out is None else Path(out)
    with _torchscript.kept(), Collector(progress, on_event) as collector:
        text, model = _native.run(
            prepare(job, changes, resume),
            cluster,
            None if folder is None else str(folder),
            collector,
        )
    return finished(Status.of(text), collector, folder, lambda: model, check)
