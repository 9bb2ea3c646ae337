"""What a task needs of its machine."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import tempfile
from fractions import Fraction

from ebbflow.errors import ResourcesError

_UNITS = {
    "": Fraction(1),
    "m": Fraction(1, 1000),
    **{unit: Fraction(1000**power) for power, unit in enumerate("kMGTPE", start=1)},
    **{f"{unit}i": Fraction(1024**power) for power, unit in enumerate("KMGTPE", start=1)},
}


@dataclasses.dataclass(frozen=True)
class Resources:
    """Resources, as quantities of Kubernetes: ``"500m"``, ``2``, ``"100Mi"``, ``"30Gi"``.

    Args:
        cpu: Processors that this process may use.
        mem: Bytes of memory.
        gpu: Devices that torch sees; 0 does not import torch.
        storage: Free bytes below the current folder.
        ephemeral_storage: Free bytes below the folder for temporary files.

    Raises:
        ValueError: A value is no quantity.
    """

    cpu: str | int | None = None
    mem: str | int | None = None
    gpu: str | int | None = None
    storage: str | int | None = None
    ephemeral_storage: str | int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                quantity(value, field.name)

    def check(self, task: str) -> None:
        """Check that this machine has the resources.

        Raises:
            ResourcesError: It lacks some: all of them at once.
        """
        lacking = []
        for field in dataclasses.fields(self):
            wanted = getattr(self, field.name)
            if wanted is None or quantity(wanted, field.name) == 0:
                continue
            there = _THERE[field.name]()
            if quantity(wanted, field.name) > there:
                lacking.append(f"{field.name} = {wanted} (there is {there})")
        if lacking:
            raise ResourcesError(
                f"task {task} requests {', '.join(lacking)}; start it on a machine that has them, "
                "or request less"
            )


def quantity(value: str | int, name: str) -> Fraction:
    """Return the number of a quantity.

    Raises:
        ValueError: It is none.
    """
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)(\w*)", str(value))
    if parts is None or parts[2] not in _UNITS:
        raise ValueError(f"{name} = {value!r}: expected a quantity such as 2, 500m, 100Mi or 30Gi")
    return Fraction(parts[1]) * _UNITS[parts[2]]


def _cpus() -> int:
    return len(os.sched_getaffinity(0))


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _devices() -> int:
    try:
        import torch
    except ImportError:
        return 0
    return int(torch.cuda.device_count())


def _storage() -> int:
    return shutil.disk_usage(".").free


def _ephemeral_storage() -> int:
    return shutil.disk_usage(tempfile.gettempdir()).free


_THERE = {
    "cpu": _cpus,
    "mem": _memory,
    "gpu": _devices,
    "storage": _storage,
    "ephemeral_storage": _ephemeral_storage,
}
