"""A job as users give it, made ready for Rust."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from ebbflow.errors import InvalidJobError

#: A job file's path, or the content of a job file as a dictionary.
JobSource: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any]"

#: Where a job begins: ``False`` at version 0, ``True`` at its newest checkpoint, and ``"anyway"``
#: even within an epoch that began with another seed, order, or data.
Resume: TypeAlias = bool | Literal["anyway"]

#: Beginnings of the names of variables with settings of object stores.
_STORES = ("AWS_", "GOOGLE_", "AZURE_")


def prepare(job: JobSource, changes: Mapping[str, Any] | None, resume: Resume) -> dict[str, object]:
    """Return what ``_native`` takes as a job.

    Raises:
        InvalidJobError: A value has no counterpart in a job file.
    """
    if isinstance(job, Mapping):
        text, path = (
            "".join(f"{_key(key)} = {toml(value)}\n" for key, value in job.items()),
            "<dict>",
        )
    else:
        text, path = None, os.fspath(job)
    start = {False: "new", True: "resume", "anyway": "resume_anyway"}.get(resume)
    if start is None:
        raise InvalidJobError(f"resume={resume!r}: expected False, True or 'anyway'")
    return {
        "text": text,
        "path": path,
        "overrides": [f"{key}={toml(value)}" for key, value in (changes or {}).items()],
        "start": start,
        "stores": stores(),
    }


def stores() -> dict[str, str]:
    """Return the settings of object stores that this process has in its environment."""
    return {name: value for name, value in os.environ.items() if name.startswith(_STORES)}


def toml(value: object) -> str:
    """Return a value as TOML writes it, on one line.

    Raises:
        InvalidJobError: TOML has no such value, for example ``None``.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, str):
        # JSON leaves DEL as it is, and TOML does not allow it.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, Path):
        return toml(str(value))
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_key(key)} = {toml(each)}" for key, each in value.items())
        return f"{{ {pairs} }}"
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return f"[{', '.join(toml(each) for each in value)}]"
    # NumPy's and torch's scalars and arrays.
    tolist = getattr(value, "tolist", None)
    if callable(tolist):
        return toml(tolist())
    raise InvalidJobError(
        f"{value!r} ({type(value).__name__}) has no counterpart in a job file; expected a bool, "
        "a number, a str, a path, a list or a dict"
    )


def _key(key: object) -> str:
    if not isinstance(key, str):
        raise InvalidJobError(f"the key {key!r} is no str")
    return toml(key)


def _number(value: float) -> str:
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    text = repr(value)
    return text if any(letter in text for letter in ".en") else f"{text}.0"
