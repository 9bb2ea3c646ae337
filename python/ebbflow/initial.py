"""First weights of a model, from files of this machine: a warm start.

    ebbflow.initial.load(model, "model.pt")         # before ebbflow.join

The values of the model are the first weights of a job. The first process of the job gives them.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ebbflow import _weights
from ebbflow.errors import OutputError
from ebbflow.tensors import plain_name

__all__ = ["load", "read"]

_LOG = logging.getLogger("ebbflow")

#: Files of weights in a folder of Hugging Face, the first one wins. An index names several files.
_IN_FOLDERS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)

#: Most names of one kind in a message.
_NAMED_MAX = 4


def load(model: Any, source: str | os.PathLike[str], *, strict: bool = True) -> list[str]:
    """Copy saved weights into a model, by name.

    A frozen parameter, whose ``requires_grad`` is false, gets its value too, and keeps it.

    Args:
        model: A ``torch.nn.Module``.
        source: What :func:`read` reads.
        strict: Whether every tensor of the model needs a saved one of its shape, and the other way
            round. Otherwise only those that fit are copied, and a warning names the rest.

    Returns:
        The names of the tensors that were copied.

    Raises:
        OutputError: The file or folder is missing, or it has no weights.
        ValueError: A tensor fits nothing and ``strict`` is true, or no tensor fits. The model is as
            it was.
    """
    import torch

    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, found {type(model).__name__}")
    saved = read(source)
    own = {plain_name(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    # The names of tied weights share one tensor, which a file has once.
    aliases: dict[int, list[str]] = {}
    for name, tensor in own.items():
        aliases.setdefault(id(tensor), []).append(name)
    fits = [name for name in own if name in saved and saved[name].shape == own[name].shape]
    filled = {other for name in fits for other in aliases[id(own[name])]}
    shapes = [
        f"{name} {tuple(saved[name].shape)} instead of {tuple(own[name].shape)}"
        for name in own
        if name in saved and saved[name].shape != own[name].shape
    ]
    missing = [name for name in own if name not in saved and name not in filled]
    unknown = [name for name in saved if name not in own]
    rest = "; ".join(
        f"{what}: {_some(names)}"
        for what, names in (
            ("not in the file", missing),
            ("not in the model", unknown),
            ("of another shape", shapes),
        )
        if names
    )
    if not fits or (strict and rest):
        advice = "pass strict=False to take what fits" if fits else "no tensor fits"
        raise ValueError(f"weights of `{source}` do not fit the model: {rest}; {advice}")
    with torch.no_grad():
        for name in fits:
            own[name].copy_(saved[name])
    if rest:
        _LOG.warning("%d tensors begin with the weights of `%s`; %s", len(fits), source, rest)
    return fits


def read(source: str | os.PathLike[str]) -> dict[str, Any]:
    """Return saved weights as torch tensors of the CPU, by name.

    Args:
        source: A safetensors file; a ``state_dict`` that ``torch.save`` wrote, also below the key
            ``state_dict`` or ``model``; or a folder of Hugging Face with ``model.safetensors`` or
            ``pytorch_model.bin``, whole or in several files.

    Raises:
        OutputError: The file or folder is missing, or it has no weights.
    """
    path = Path(source)
    if path.is_dir():
        for name in _IN_FOLDERS:
            if (path / name).is_file():
                return _read_parts(path / name) if name.endswith(".json") else _read(path / name)
        raise OutputError(f"{path}: a folder with weights has one of {', '.join(_IN_FOLDERS)}")
    return _read(path)


def _read_parts(index: Path) -> dict[str, Any]:
    try:
        parts = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise OutputError(f"{index}: no index of weights: {error}") from error
    found: dict[str, Any] = {}
    for part in sorted(parts):
        found |= _read(index.parent / part)
    return found


def _read(path: Path) -> dict[str, Any]:
    if path.suffix == ".safetensors":
        try:
            return _weights.to_torch(path.read_bytes())
        except OSError as error:
            raise OutputError(f"{path}: {error.strerror or error}") from error
    import torch

    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise OutputError(f"{path}: {error.strerror or error}") from error
    except Exception as error:
        raise OutputError(
            f"{path}: no file of weights alone: {type(error).__name__}; save model.state_dict()"
        ) from error
    for key in ("state_dict", "model"):
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not found:
        raise OutputError(f"{path}: expected a state_dict, found {type(found).__name__}")
    tensors = {plain_name(str(name)): tensor for name, tensor in found.items()}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise OutputError(f"{path}: `{name}` is {type(tensor).__name__} and no tensor")
    return tensors


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED_MAX
    return ", ".join(names[:_NAMED_MAX]) + (f" and {more} more" if more > 0 else "")
