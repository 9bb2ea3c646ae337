"""Reads and writes safetensors files, without a library."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ebbflow.errors import OutputError

if TYPE_CHECKING:
    import numpy as np

#: Names of types in the file, with NumPy's and torch's, and the bytes of a value.
_TYPES = {
    "BOOL": ("bool", "bool", 1),
    "U8": ("uint8", "uint8", 1),
    "I8": ("int8", "int8", 1),
    "I16": ("int16", "int16", 2),
    "I32": ("int32", "int32", 4),
    "I64": ("int64", "int64", 8),
    "F16": ("float16", "float16", 2),
    "BF16": ("uint16", "bfloat16", 2),
    "F32": ("float32", "float32", 4),
    "F64": ("float64", "float64", 8),
}


def tensors(content: bytes) -> dict[str, tuple[str, tuple[int, ...], memoryview]]:
    """Return name, type, shape and bytes of each tensor, in the order of the names.

    Raises:
        OutputError: ``content`` is no safetensors file.
    """
    try:
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        header.pop("__metadata__", None)
        data = memoryview(content)[8 + length :]
        found = {}
        for name, about in sorted(header.items()):
            (begin, end), shape = about["data_offsets"], about["shape"]
            size = math.prod(shape) * _TYPES[about["dtype"]][2]
            if not 0 <= begin <= end <= len(data) or end - begin != size:
                raise ValueError(f"{name}: {about}")
            found[name] = (about["dtype"], tuple(shape), data[begin:end])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OutputError(f"the model is no safetensors file: {error}; fetch it again") from error
    return found


def to_numpy(content: bytes) -> dict[str, np.ndarray[Any, Any]]:
    """Return the tensors as NumPy arrays. NumPy lacks bf16: such values become f32, exactly."""
    import numpy as np

    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for name, (kind, shape, data) in tensors(content).items():
        array = np.frombuffer(data, dtype=np.dtype(_TYPES[kind][0]).newbyteorder("<"))
        if kind == "BF16":
            array = (array.astype(np.uint32) << 16).view(np.float32)
        # A copy is writable, and in the machine's own order.
        arrays[name] = array.astype(array.dtype.newbyteorder("="), copy=True).reshape(shape)
    return arrays


def to_torch(content: bytes) -> dict[str, Any]:
    """Return the tensors as torch tensors of the types in the file."""
    import torch

    found = {}
    for name, (kind, shape, data) in tensors(content).items():
        dtype = getattr(torch, _TYPES[kind][1])
        flat = torch.empty(0, dtype=dtype)
        # torch refuses an empty buffer.
        if data:
            flat = torch.frombuffer(bytearray(data), dtype=dtype)
        found[name] = flat.reshape(shape)
    return found


def of_torch(tensor: Any) -> tuple[str, tuple[int, ...], memoryview]:
    """Return type, shape and bytes of a torch tensor.

    Raises:
        OutputError: The file has no such type.
    """
    import torch

    dtype = str(tensor.dtype).removeprefix("torch.")
    kind = next((kind for kind, (_, name, _) in _TYPES.items() if name == dtype), None)
    if kind is None:
        raise OutputError(f"safetensors has no type for {tensor.dtype}")
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return kind, tuple(tensor.shape), memoryview(flat.view(torch.uint8).numpy())


def of_numpy(array: Any) -> tuple[str, tuple[int, ...], memoryview]:
    """Return type, shape and bytes of what NumPy takes for an array.

    Raises:
        OutputError: The file has no such type.
    """
    import numpy as np

    values = np.asarray(array)
    # NumPy lacks bf16, in whose place to_numpy has its bits.
    kinds = {numpy: kind for kind, (numpy, _, _) in _TYPES.items() if kind != "BF16"}
    kind = kinds.get(values.dtype.name)
    if kind is None:
        raise OutputError(f"safetensors has no type for {values.dtype}; it has {', '.join(kinds)}")
    little = values.astype(values.dtype.newbyteorder("<"))
    return kind, values.shape, memoryview(little.tobytes())


def texts(content: bytes) -> dict[str, str]:
    """Return the texts in the header of a safetensors file that this module wrote."""
    length = int.from_bytes(content[:8], "little")
    found: dict[str, str] = json.loads(content[8 : 8 + length])["__metadata__"]
    return found


def to_bytes(
    tensors: Mapping[str, tuple[str, tuple[int, ...], memoryview]], about: Mapping[str, str]
) -> bytes:
    """Return a safetensors file with these tensors and texts.

    Equal content gives equal bytes. Wide types come first, so that all values are aligned.
    """
    header: dict[str, Any] = {"__metadata__": dict(about)}
    order = sorted(tensors, key=lambda name: (-_TYPES[tensors[name][0]][2], name))
    begin = 0
    for name in order:
        kind, shape, data = tensors[name]
        end = begin + len(data)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *(tensors[name][2] for name in order)])
