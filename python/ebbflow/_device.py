"""The device on which a loop computes, as the master of a cluster hears of it."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
from collections.abc import Mapping
from pathlib import Path

#: The device of a loop on the CPU: its name, and its memory, which does not count.
CPU = ("cpu", 0)

#: Kinds of device that a job may ask for.
KINDS = ("cpu", "cuda")


def name_on_host(index: int, environment: Mapping[str, str]) -> str:
    """Return the name on its host of a CUDA device that has this number in this process.

    A launcher shows a process one device, which is number 0 there, and says in ``EBBFLOW_DEVICE``
    which one it is.

    >>> name_on_host(0, {"EBBFLOW_DEVICE": "cuda:2"})
    'cuda:2'
    >>> name_on_host(1, {})
    'cuda:1'
    """
    given = environment.get("EBBFLOW_DEVICE", "")
    return given if index == 0 and given.startswith("cuda:") else f"cuda:{index}"


def check_kind(wanted: str | None, name: str, *, alone: bool) -> None:
    """Check which kind of device a job asks for.

    Raises:
        ValueError: It is no kind of device, or a process that trains alone has another one.
    """
    if wanted is None:
        return
    if wanted not in KINDS:
        raise ValueError(f"fleet_device = {wanted!r}: expected one of {', '.join(KINDS)}")
    if alone and not name.startswith(wanted):
        raise ValueError(
            f"fleet_device = {wanted!r}: the model of this process is on {name}, and no other "
            "process takes part; move the model, or give a master"
        )


def load_compiler() -> None:
    """Load the NVRTC that pip installs with PyTorch, for the worker, which looks for it by name.

    The system's loader does not look into Python's packages. Without one there, whatever the loader
    finds is used.
    """
    found = importlib.util.find_spec("nvidia")
    for folder in (found and found.submodule_search_locations) or ():
        # The library that NVRTC itself looks for sorts before it.
        for library in sorted(Path(folder).glob("*/lib/libnvrtc*.so.*")):
            if ".alt." not in library.name:
                # What cannot be loaded is as if it were not there.
                with contextlib.suppress(OSError):
                    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
