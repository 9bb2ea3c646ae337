"""What a script of SageMaker finds in its arguments, its environment and its folders. Pure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ebbflow.errors import InvalidJobError

#: Beginnings of variables that a user may not set: they belong to the launcher and to the job.
_RESERVED = ("EBB_", "EBBFLOW_", "SM_")


def check_environment(environment: Mapping[str, str]) -> None:
    """Check variables that a user sets.

    Raises:
        InvalidJobError: A name or a value cannot be one, or a name belongs to the job.
    """
    for name, value in environment.items():
        if not isinstance(value, str) or "\0" in value:
            raise InvalidJobError(f"environment[{name!r}] = {value!r}: expected a text")
        if not name or "=" in name or "\0" in name:
            raise InvalidJobError(f"environment: {name!r} is no name of a variable")
        if name.startswith(_RESERVED):
            raise InvalidJobError(f"environment: {name} belongs to the job; choose another name")


def check_hyperparameters(hyperparameters: Mapping[str, Any]) -> None:
    """Check that hyper-parameters have names, and values that JSON has.

    Raises:
        InvalidJobError: One has not.
    """
    for name, value in hyperparameters.items():
        if not isinstance(name, str) or not name or "=" in name:
            raise InvalidJobError(f"hyperparameters: {name!r} is no name")
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise InvalidJobError(f"hyperparameters[{name!r}]: {error}") from error


def arguments(hyperparameters: Mapping[str, Any]) -> list[str]:
    """Return hyper-parameters as arguments of a script, by name: ``--batch_size 32 --lr 3e-05``.

    A name of one letter becomes ``-n``. A dictionary becomes ``a=1,b=2``, ``None`` an empty text,
    and any other value what ``str`` makes of it.
    """
    found = []
    for name, value in sorted(hyperparameters.items()):
        found.append(f"--{name}" if len(name) > 1 else f"-{name}")
        if isinstance(value, Mapping):
            found.append(",".join(f"{key}={value[key]}" for key in sorted(value)))
        else:
            found.append("" if value is None else str(value))
    return found


@dataclasses.dataclass(frozen=True)
class Host:
    """One process of a job, and its folders below the folder of the job.

        ROOT/code                      the source, for all hosts
        ROOT/data/NAME                 the channels, for all hosts
        ROOT/algo-1/input/data         -> ROOT/data
        ROOT/algo-1/input/config       the job as JSON files
        ROOT/algo-1/model              what becomes model.tar.gz
        ROOT/algo-1/output/data        what becomes output.tar.gz

    Attributes:
        root: Folder of the job.
        index: Number of the process, from 0.
    """

    root: Path
    index: int

    @property
    def name(self) -> str:
        """The name that SageMaker gives to a host: ``algo-1`` and so on."""
        return f"algo-{self.index + 1}"

    @property
    def folder(self) -> Path:
        """Folder of this host alone."""
        return self.root / self.name

    @property
    def model(self) -> Path:
        """Folder for the model."""
        return self.folder / "model"

    @property
    def output(self) -> Path:
        """Folder for other results."""
        return self.folder / "output" / "data"


@dataclasses.dataclass(frozen=True)
class Description:
    """A job as its hosts see it.

    Attributes:
        job: Name of the job.
        entry_point: Path of the script below the source.
        instance_type: Such as ``local``.
        hosts: All hosts.
        cpus: Processors of one host.
        gpus: Ids of GPUs, one for each host. Empty: hosts have none.
        channels: What ``SM_INPUT_DATA_CONFIG`` says of each channel.
        hyperparameters: Values that JSON has.
        network: Name of the network interface by which hosts reach each other.
    """

    job: str
    entry_point: str
    instance_type: str
    hosts: Sequence[Host]
    cpus: int
    gpus: Sequence[str]
    channels: Mapping[str, Mapping[str, str]]
    hyperparameters: Mapping[str, Any]
    network: str = "lo"

    def resource_config(self, host: Host) -> dict[str, Any]:
        """Return ``resourceconfig.json`` of a host."""
        return {
            "current_host": host.name,
            "current_instance_type": self.instance_type,
            "hosts": [other.name for other in self.hosts],
            "network_interface_name": self.network,
        }

    def config_files(self, host: Host) -> dict[str, Any]:
        """Return the content of the files in ``input/config``, by name."""
        return {
            "hyperparameters.json": {
                name: _text(value) for name, value in self.hyperparameters.items()
            },
            "inputdataconfig.json": dict(self.channels),
            "resourceconfig.json": self.resource_config(host),
        }

    def environment(self, host: Host) -> dict[str, str]:
        """Return the variables of a host's process."""
        inputs = host.folder / "input"
        found: dict[str, Any] = {
            "channels": sorted(self.channels),
            "current_host": host.name,
            "current_instance_type": self.instance_type,
            "framework_params": {},
            "hosts": [other.name for other in self.hosts],
            "hps": dict(self.hyperparameters),
            "input_config_dir": str(inputs / "config"),
            "input_data_config": dict(self.channels),
            "input_dir": str(inputs),
            "log_level": 20,
            "model_dir": str(host.model),
            "module_dir": str(host.root / "code"),
            "module_name": self.entry_point.removesuffix(".py"),
            "network_interface_name": self.network,
            "num_cpus": self.cpus,
            "num_gpus": 1 if self.gpus else 0,
            "output_data_dir": str(host.output),
            "output_dir": str(host.folder / "output"),
            "output_intermediate_dir": str(host.folder / "output" / "intermediate"),
            "resource_config": self.resource_config(host),
            "user_args": arguments(self.hyperparameters),
            "user_entry_point": self.entry_point,
        }
        # Everything so far in one text.
        found["training_env"] = {**found, "job_name": self.job}
        for name in self.channels:
            found[f"channel_{name}"] = str(inputs / "data" / name)
        for name, value in self.hyperparameters.items():
            found[f"hp_{name}"] = value
        variables = {f"SM_{name.upper()}": _text(value) for name, value in found.items()}
        variables["TRAINING_JOB_NAME"] = self.job
        # Without a GPU of its own a process sees none.
        variables["CUDA_VISIBLE_DEVICES"] = self.gpus[host.index] if self.gpus else ""
        return variables


def gpus_of(processes: int, visible: str | None) -> list[str]:
    """Return a GPU for each process, of those in ``CUDA_VISIBLE_DEVICES`` if it is set."""
    if not visible:
        return [str(index) for index in range(processes)]
    return [name.strip() for name in visible.split(",")][:processes]


def _text(value: Any) -> str:
    """Return a value as a variable: a text as it is, and any other one as JSON."""
    if value is None or isinstance(value, str):
        return value or ""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
