"""``job.state``: values of the loop's own that belong to a version of the weights.

They lie in a register: a tensor of the job that the ps keep beside the weights (ADR 49). So they
are saved with checkpoints, go back with the weights after a loss, and are read at a version.

The content is a safetensors file: JSON values are its texts, arrays its tensors. The results of the
job have it as ``job_state.safetensors``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, MutableMapping
from typing import Any

from ebbflow import _weights
from ebbflow.errors import OutputError, SessionError

#: Most bytes of a job's state.
BYTES_MAX = 16 << 20

# Key of the texts in the header of a safetensors file.
_TEXTS = "__metadata__"


class State(MutableMapping[str, Any]):
    """Values by name: what JSON has, and arrays. Arrays are NumPy arrays when they are read.

    A batch sees the values of the version of the weights that it computes with. The process that
    has the first microbatch of a step is elected for this batch. It alone may assign and delete.
    What it assigns is copied at once, goes out with ``job.step``, and belongs to the version that
    the step makes.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        # What the process pulled, and its number.
        self._pulled = b""
        self._loaded = -1
        self._content = b""
        self._elected = False

    @property
    def elected(self) -> bool:
        """Whether this process may write now: its batch is the first one of a step."""
        return self._elected

    def __getitem__(self, name: str) -> Any:
        texts, arrays = self._parts()
        if name in texts:
            return json.loads(texts[name])
        if name not in arrays:
            raise KeyError(name)
        kind, shape, data = arrays[name]
        one = _weights.to_bytes({name: (kind, shape, data)}, {})
        return _weights.to_numpy(one)[name]

    def __iter__(self) -> Iterator[str]:
        texts, arrays = self._parts()
        return iter(sorted([*texts, *arrays]))

    def __len__(self) -> int:
        texts, arrays = self._parts()
        return len(texts) + len(arrays)

    def __setitem__(self, name: str, value: Any) -> None:
        if not isinstance(name, str) or name == _TEXTS:
            raise TypeError(f"job.state: expected a name other than {_TEXTS}, found {name!r}")
        texts, arrays = self._writable(name)
        texts.pop(name, None)
        arrays.pop(name, None)
        if hasattr(value, "dtype") and hasattr(value, "shape"):
            arrays[name] = _array(name, value)
        else:
            texts[name] = _text(name, value)
        self._replace(name, texts, arrays)

    def __delitem__(self, name: str) -> None:
        texts, arrays = self._writable(name)
        if name not in texts and name not in arrays:
            raise KeyError(name)
        texts.pop(name, None)
        arrays.pop(name, None)
        self._replace(name, texts, arrays)

    def __repr__(self) -> str:
        return f"State({dict(self)!r})"

    def bind(self, request: Any, *, trains: bool) -> None:
        """Take the values of a request's version."""
        if request.loaded != self._loaded:
            self._pulled = request.state() or b""
            self._loaded = request.loaded
        self._content = self._pulled
        self._elected = trains and request.leads

    def commit(self, request: Any) -> None:
        """Give a request what was written since it came."""
        if self._elected and self._content != self._pulled:
            request.set_state(self._content)
        self._elected = False

    def end(self, content: bytes | None) -> None:
        """Take the values of the job's last version."""
        self._content = content or b""
        self._elected = False

    def _parts(self) -> tuple[dict[str, str], dict[str, tuple[str, tuple[int, ...], Any]]]:
        if not self._content:
            return {}, {}
        return _weights.texts(self._content), dict(_weights.tensors(self._content))

    def _writable(
        self, name: str
    ) -> tuple[dict[str, str], dict[str, tuple[str, tuple[int, ...], Any]]]:
        if not self._elected:
            raise SessionError(
                f"job.state[{name!r}]: this process may not write it now; one process of each step "
                "may, between its batch and job.step: test job.state.elected before"
            )
        return self._parts()

    def _replace(self, name: str, texts: dict[str, str], arrays: dict[str, Any]) -> None:
        content = _weights.to_bytes(arrays, dict(sorted(texts.items())))
        if len(content) > self._room:
            raise ValueError(
                f"job.state[{name!r}]: all values together take {len(content)} bytes, and there "
                f"is room for {self._room}; keep less, or give join a larger state_bytes (at most "
                f"{BYTES_MAX})"
            )
        self._content = content


def room(state_bytes: Any) -> int:
    """Return the bytes that a job has room for, checked.

    Raises:
        ValueError: It is no integer from 0 to ``BYTES_MAX``.
    """
    if isinstance(state_bytes, bool) or not isinstance(state_bytes, int):
        raise ValueError(f"state_bytes = {state_bytes!r}: expected an integer")
    if not 0 <= state_bytes <= BYTES_MAX:
        raise ValueError(f"state_bytes = {state_bytes}: expected 0 to {BYTES_MAX} (16 MiB)")
    return state_bytes


def described(state_bytes: int) -> list[tuple[str, str, list[int], bytes]]:
    """Return name, role, shape and first values of the register for so many bytes, if any."""
    if state_bytes == 0:
        return []
    elements = 1 + -(-state_bytes // 4)
    return [("job.state", "register", [elements], bytes(8 * elements))]


def _text(name: str, value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"job.state[{name!r}]: expected what JSON has, or an array; found "
            f"{type(value).__name__}: {error}"
        ) from error


def _array(name: str, value: Any) -> tuple[str, tuple[int, ...], memoryview]:
    try:
        if type(value).__module__.partition(".")[0] == "torch":
            return _weights.of_torch(value)
        return _weights.of_numpy(value)
    except OutputError as error:
        raise TypeError(f"job.state[{name!r}]: {error}") from error
