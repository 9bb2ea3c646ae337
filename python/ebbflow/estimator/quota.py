"""How large a cluster may be."""

from __future__ import annotations

import os

from ebbflow.errors import InvalidJobError, ResourceLimitError
from ebbflow.estimator.refusals import COMPOSE, LOCAL_GPU, SLURM
from ebbflow.launchers.compose import engine_cpus

#: The variable by which an operator allows more or fewer processes than there are processors.
VARIABLE = "EBBFLOW_WORKERS_MAX"

#: Most processes of one launch.
_PROCESSES_MAX = 256


def processes(
    instance_count: int, instance_type: str, gpus: int, cpus: int | None, limit: str | None
) -> int:
    """Return the number of processes of a cluster: one for each instance, or for each of its GPUs.

    Pure.

    Args:
        instance_count: Instances that a user asks for.
        instance_type: ``local``, ``local_gpu``, ``compose`` or ``slurm``.
        gpus: GPUs of the host.
        cpus: Processors of the host, or of the Docker engine. ``None``: Slurm knows what it has.
        limit: What the operator allows. ``None``: as many processes as there are processors.

    Raises:
        InvalidJobError: ``instance_count`` is below 1, or ``limit`` is no number.
        ResourceLimitError: The host, the engine or the operator does not allow so many.
    """
    if instance_count < 1:
        raise InvalidJobError(f"instance_count = {instance_count}: expected 1 or more")
    what = f"instance_count = {instance_count} of {instance_type}"
    wanted = instance_count
    if instance_type == LOCAL_GPU:
        # An instance is this host with all its GPUs.
        if gpus == 0:
            raise ResourceLimitError(f"{what}: the host has no GPU that torch sees; use local")
        if instance_count > 1:
            raise ResourceLimitError(
                f"{what}: the host is 1 instance with {gpus} GPUs; use instance_count = 1"
            )
        wanted = gpus
    if limit is not None and not limit.isdecimal():
        raise InvalidJobError(f"{VARIABLE} = {limit!r}: expected a number of processes")
    own = _PROCESSES_MAX if cpus is None else cpus
    allowed = min(own if limit is None else int(limit), _PROCESSES_MAX)
    if wanted > allowed:
        reason = f"there are at most {_PROCESSES_MAX}; use fewer"
        if limit is not None:
            reason = f"{VARIABLE} = {limit}, and {reason}"
        elif cpus is not None:
            who = "the Docker engine" if instance_type == COMPOSE else "the host"
            reason = f"{who} has {cpus} processors; {VARIABLE} allows more"
        raise ResourceLimitError(f"{what}: {wanted} processes, where {allowed} may be: {reason}")
    return wanted


def of_type(instance_count: int, instance_type: str) -> int:
    """Return :func:`processes` of what is there, and of the environment.

    Raises:
        UnsupportedError: No Docker engine answers.
    """
    gpus = _gpus() if instance_type == LOCAL_GPU else 0
    limit = os.environ.get(VARIABLE)
    return processes(instance_count, instance_type, gpus, cpus(instance_type), limit)


def cpus(instance_type: str) -> int | None:
    """Return the number of processors for all processes of a cluster. ``None``: Slurm has them.

    Raises:
        UnsupportedError: No Docker engine answers.
    """
    if instance_type == SLURM:
        return None
    return engine_cpus() if instance_type == COMPOSE else len(os.sched_getaffinity(0))


def _gpus() -> int:
    try:
        import torch
    except ImportError:
        return 0
    return int(torch.cuda.device_count())
