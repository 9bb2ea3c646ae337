"""What SageMaker's estimator has and this one has not, with what to do instead. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ebbflow.errors import InvalidJobError, UnsupportedError

#: Instance types that there are.
LOCAL, LOCAL_GPU, COMPOSE, SLURM = "local", "local_gpu", "compose", "slurm"

_TYPES = (LOCAL, LOCAL_GPU, COMPOSE, SLURM)

_DIFFERENT_MACHINES = (
    "start a cluster with the files of deploy/, and the script on its machines with EBBFLOW_MASTER"
)

#: Instance types that a user may expect, with what to do instead.
_EXPECTED = {
    "kubernetes": "use `ebb run SCRIPT.py --on kubernetes`, or compose or slurm",
    "ml.": "no machines are rented here; use local, local_gpu, compose or slurm, or "
    + _DIFFERENT_MACHINES,
}

#: Arguments of the estimator, with the value that means "off" and what to do instead of others.
_OPTIONS: dict[str, tuple[Any, str]] = {
    "role": (None, "the processes have the rights of this one; remove it"),
    "sagemaker_session": (None, "nothing is sent to AWS; remove it"),
    "debugger_hook_config": (False, "look at the model in the script; pass False or remove it"),
    "disable_profiler": (True, "there is no profiler of the service; pass True or remove it"),
    "profiler_config": (None, "use torch.profiler in the script; remove it"),
    "rules": (None, "check numbers in the script; remove it"),
    "tensorboard_output_config": (None, "pass ebbflow.trackers.TensorBoard to ebbflow.join"),
    "use_spot_instances": (
        False,
        "processes that are killed are started again in every run; remove it",
    ),
    "max_wait": (None, "there are no spot instances to wait for; max_run limits the training"),
    "checkpoint_s3_uri": (None, "pass checkpoints=URL and checkpoint_every to ebbflow.join"),
    "checkpoint_local_path": (None, "pass checkpoints=FOLDER and checkpoint_every to ebbflow.join"),
    "max_retry_attempts": (None, "each process is started again up to three times; remove it"),
    "instance_groups": (None, "all processes are equal; use instance_count"),
    "keep_alive_period_in_seconds": (None, "the cluster ends with its job; remove it"),
    "volume_size": (None, "the job uses the folder for temporary files, TMPDIR; remove it"),
    "volume_kms_key": (None, "encrypt the file system; remove it"),
    "output_kms_key": (None, "let the bucket encrypt what it gets; remove it"),
    "subnets": (None, "the cluster has no network of AWS; remove it"),
    "security_group_ids": (None, "the cluster has no network of AWS; remove it"),
    "encrypt_inter_container_traffic": (
        False,
        "the cluster has no keys; use one with keys, and the script with EBBFLOW_MASTER",
    ),
    "enable_network_isolation": (False, "the script has the network of this host; remove it"),
    "tags": (None, "put them into base_job_name; remove it"),
    "git_config": (None, "check the source out and pass its folder as source_dir"),
    "code_location": (None, "the code is copied for the job only; remove it"),
    "container_log_level": (None, "set the level in the script; remove it"),
    "enable_sagemaker_metrics": (None, "estimator.metrics has them; remove it"),
    "compiler_config": (None, "call torch.compile in the script; remove it"),
    "input_mode": ("File", "say it for a channel, in TrainingInput"),
}

#: Ways to distribute that mean what happens here: every process trains one model on its records.
_DATA_PARALLEL = ("pytorchddp", "torch_distributed", "parameter_server")


def refuse_options(given: Mapping[str, Any]) -> None:
    """Refuse arguments of SageMaker's estimator that mean nothing here.

    A value that switches something off is taken.

    Raises:
        UnsupportedError: The first such argument, with what to do instead.
        TypeError: SageMaker's estimator has no argument of this name either.
    """
    for name, value in given.items():
        if name not in _OPTIONS:
            raise TypeError(f"PyTorch() got an unexpected keyword argument {name!r}")
        off, instead = _OPTIONS[name]
        if value is not None and value != off:
            raise UnsupportedError(f"estimator: `{name}` is not kept: {instead}")


def check_type(instance_type: str, image: str | None) -> None:
    """Check that there is such a cluster, and that containers have an image.

    Raises:
        UnsupportedError: The instance type is another one, or has no image. The message says what
            to do instead.
        InvalidJobError: Containers lack an image.
    """
    if instance_type not in _TYPES:
        begins = [begin for begin in _EXPECTED if instance_type.startswith(begin)]
        instead = _EXPECTED[begins[0]] if begins else f"there are {', '.join(_TYPES)}"
        raise UnsupportedError(f"estimator: instance_type = {instance_type!r}: {instead}")
    if image is not None and instance_type != COMPOSE:
        raise UnsupportedError(
            f"estimator: `image_uri` is not kept with {instance_type}: the script runs with the "
            "interpreter of this process; remove it, or use compose"
        )
    if image is None and instance_type == COMPOSE:
        raise InvalidJobError(
            "estimator: instance_type = 'compose': `image_uri` is missing; name an image in which "
            "`pip install 'ebbflow[torch]'` has been run, with what the script imports"
        )


def check_distribution(distribution: Mapping[str, Any] | None) -> None:
    """Check that a distribution is data parallelism, or none.

    Raises:
        UnsupportedError: It is another one. The message says what to do instead.
        InvalidJobError: It is no dictionary of dictionaries.
    """
    for name, options in _dictionary(distribution or {}, "distribution").items():
        where = f"distribution[{name!r}]"
        if name == "smdistributed":
            for kind, more in _dictionary(options, where).items():
                if kind == "dataparallel":
                    _is_enabled(more, f"{where}[{kind!r}]")
                elif kind != "modelparallel":
                    raise UnsupportedError(f"estimator: {where}[{kind!r}]: there is dataparallel")
                elif _is_enabled(more, f"{where}[{kind!r}]"):
                    raise UnsupportedError(
                        f"estimator: {where}['modelparallel']: a model is not split over workers; "
                        "each worker holds all of it, and the ps share its parameters out. Use "
                        "{'smdistributed': {'dataparallel': {'enabled': True}}}"
                    )
        elif name == "mpi":
            if _is_enabled(options, where):
                raise UnsupportedError(
                    f"estimator: {where}: processes do not talk to each other by MPI; "
                    "instance_count is the number of processes"
                )
        elif name in _DATA_PARALLEL:
            _is_enabled(options, where)
        else:
            raise UnsupportedError(
                f"estimator: {where}: there is "
                "{'smdistributed': {'dataparallel': {'enabled': True}}}"
            )


def check_versions(
    framework: str | None, found: str | None, py_version: str | None, python: tuple[int, int]
) -> None:
    """Check that versions that a user asks for are those of this interpreter.

    Args:
        framework: Version of PyTorch that is asked for, or its beginning, such as ``2.4``.
        found: Version that is there. ``None``: PyTorch is not.
        py_version: Version of Python that is asked for, such as ``py3`` or ``py310``.
        python: Version that is there.

    Raises:
        UnsupportedError: One differs.
        InvalidJobError: ``py_version`` is none.
    """
    if framework is not None and found is None:
        raise UnsupportedError(
            f"estimator: framework_version = {framework!r}: PyTorch is not installed; "
            "pip install 'ebbflow[torch]'"
        )
    if framework is not None and found is not None:
        wanted, there = framework.split("."), found.split("+")[0].split(".")
        if there[: len(wanted)] != wanted:
            raise UnsupportedError(
                f"estimator: framework_version = {framework!r}: the script runs with PyTorch "
                f"{found} of this interpreter; pass that, or remove it"
            )
    if py_version is None:
        return
    parts = re.fullmatch(r"py(\d)(\d*)", py_version)
    if parts is None:
        raise InvalidJobError(f"py_version = {py_version!r}: expected py3, or such as py310")
    if int(parts[1]) != python[0] or (parts[2] and int(parts[2]) != python[1]):
        raise UnsupportedError(
            f"estimator: py_version = {py_version!r}: the script runs with Python "
            f"{python[0]}.{python[1]} of this process; pass py3, or remove it"
        )


def _is_enabled(options: Any, where: str) -> bool:
    """Return whether a part of a distribution is switched on."""
    return bool(_dictionary(options, where).get("enabled", False))


def _dictionary(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidJobError(f"{where} = {value!r}: expected a dictionary")
    return value
