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


def bytes_of_ps(wanted: str | None, bytes_max: int | None, name: str) -> int | None:
    """Return the bytes of its CUDA device that the ps of a process may take.

    Args:
        wanted: Kind of device whose memory has the model in the ps.
        bytes_max: The bytes that the user gives it.
        name: Device of the process's model.

    Returns:
        The bytes, or 0: half of those that are free. ``None``: the ps is on the host.

    Raises:
        ValueError: It is no kind of device, the model is on another one, or the bytes are of no
            use.
    """
    if wanted not in (None, *KINDS):
        raise ValueError(f"ps_device = {wanted!r}: expected one of {', '.join(KINDS)}")
    if wanted != "cuda":
        if bytes_max is not None:
            raise ValueError(f"ps_bytes_max = {bytes_max}: only with ps_device='cuda'")
        return None
    if not name.startswith("cuda"):
        raise ValueError(
            f"ps_device = 'cuda': the model of this process is on {name}; move it with "
            "model.cuda() before the optimizer is made, or leave ps_device out"
        )
    if bytes_max is not None and bytes_max < 1:
        raise ValueError(f"ps_bytes_max = {bytes_max}: expected at least 1 byte")
    return bytes_max or 0


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
