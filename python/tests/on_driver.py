"""Lets a loop of PyTorch for the CPU exchange memory of the CUDA driver of the tests.

That driver (``kernels/tests/cuda/driver.cpp``) runs on the host, and so its memory is read at its
address. PyTorch takes a capsule of a CUDA device only where CUDA is. So this module takes the
capsules in its place, as the protocol DLPack says, and gives PyTorch tensors of the CPU with their
memory. A script calls :func:`install` before it joins.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from typing import Any

import torch
from ebbflow.engine import Torch
from ebbflow.numerics import numerics

# Python keeps the address of a capsule's name.
_NAME, _USED = b"dltensor", b"used_dltensor"

_CPU, _CUDA = 1, 2

#: Bytes of each piece of memory of the device that was taken.
lent: list[int] = []

_from_dlpack = torch.from_dlpack


class Elements(ctypes.Structure):
    """``DLDataType``."""

    _fields_ = [("kind", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class Managed(ctypes.Structure):
    """``DLManagedTensor``."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("dimensions", ctypes.c_int32),
        ("elements", Elements),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.CFUNCTYPE(None, ctypes.c_void_p)),
    ]


def address_in(capsule: object) -> int:
    """Return where the structure of a capsule lies whose memory nobody has taken."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address: int = get(capsule, _NAME)
    return address


def taken(capsule: object) -> Any:
    """Take the memory of a capsule of a CUDA device, as a tensor on the CPU."""
    address = address_in(capsule)
    rename = ctypes.pythonapi.PyCapsule_SetName
    rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
    rename(capsule, _USED)
    managed = Managed.from_address(address)
    shape, strides = (sizes[: managed.dimensions] for sizes in (managed.shape, managed.strides))
    elements = (managed.elements.kind, managed.elements.bits, managed.elements.lanes)
    assert (list(managed.device), elements) == ([_CUDA, 0], (2, 32, 1))
    assert strides == [math.prod(shape[at:]) for at in range(1, len(shape) + 1)]
    memory = (ctypes.c_float * math.prod(shape)).from_address(managed.data + managed.byte_offset)
    # It is called without the GIL, as by other libraries.
    weakref.finalize(memory, managed.deleter, address).atexit = False
    lent.append(ctypes.sizeof(memory))
    return torch.frombuffer(memory, dtype=torch.float32).view(shape)


def from_dlpack(given: Any) -> Any:
    """Do what ``torch.from_dlpack`` would do where CUDA is."""
    kind, _ = given.__dlpack_device__()
    return _from_dlpack(given) if kind == _CPU else taken(given.__dlpack__(stream=1))


def install() -> None:
    """Let models of PyTorch in this process exchange memory of the device 0."""
    torch.from_dlpack = from_dlpack
    engine: Any = Torch
    engine.cuda = lambda _: 0
    engine.device = lambda _: ("cuda:0", 1 << 26)
    # The arithmetic is that of the CPU.
    engine.numerics = lambda _, threads: numerics(threads)
