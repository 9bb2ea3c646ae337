"""Typed values of tasks: which types there are, what fits them, and how they become JSON.

| type | in JSON |
| --- | --- |
| ``bool``, ``int``, ``float``, ``str``, ``None`` | the value; a float has its exact digits |
| ``list[T]``, ``tuple[T, ..]``, ``dict[str, T]`` | a list, a list, an object |
| ``Optional[T]`` | as ``T``, or null |
| a ``dataclass``, a ``NamedTuple`` | an object with its fields |
| ``pathlib.Path`` | a file, by its content |
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

_Parameters = TypeVar("_Parameters", bound="Parameters")

_PLAIN = (bool, int, float, str)

#: Turns a file into JSON, or back.
_OfFile = Callable[[Any], Any]


class Parameters:
    """Base of a dataclass with hyper-parameters, for its way to JSON and back.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Hyperparameters(Parameters):
    ...     epochs: int = 10
    ...     learning_rate: float = 0.01
    >>> Hyperparameters(epochs=3).to_json()
    '{"epochs": 3, "learning_rate": 0.01}'
    >>> Hyperparameters.from_json('{"epochs": 3}')
    Hyperparameters(epochs=3, learning_rate=0.01)
    """

    def to_json(self) -> str:
        """Return the fields as JSON.

        Raises:
            TypeError: A field has a value of another type.
            ValueError: A field is NaN or infinite.
        """
        name = type(self).__name__
        return json.dumps(encoded(fitting(self, type(self), name), type(self), str))

    @classmethod
    def from_json(cls: type[_Parameters], text: str) -> _Parameters:
        """Return what :meth:`to_json` wrote. Fields that are not there have their defaults.

        Raises:
            TypeError: A field has a value of another type.
            ValueError: The text is no JSON object, or has a field that the class does not have.
        """
        found: _Parameters = decoded(json.loads(text), cls, Path, cls.__name__)
        return found


def check_type(kind: Any, where: str) -> None:
    """Check that values of a type can be checked, written and read.

    Raises:
        TypeError: They cannot. The message has ``where``.
    """
    for part in _parts(kind):
        if part is None:
            raise TypeError(
                f"{where}: values of {_shown(kind)} cannot be compared and kept; use bool, int, "
                "float, str, list[..], tuple[..], dict[str, ..], Optional[..], a dataclass, a "
                "NamedTuple, or pathlib.Path for a file"
            )
        name, inner = part
        check_type(inner, f"{where}.{name}" if name else where)


def _parts(kind: Any) -> list[tuple[str, Any] | None]:
    """Return the types in a type, with the names of fields; ``[None]`` for an unknown one."""
    if kind is None or kind is type(None) or kind in _PLAIN or kind is Path:
        return []
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (list, tuple) and arguments:
        return [("", argument) for argument in arguments if argument is not Ellipsis]
    if origin is dict and arguments[0] is str:
        return [("", arguments[1])]
    if _is_optional(kind):
        return [("", _some(kind))]
    fields = _fields(kind)
    return [None] if fields is None else list(fields.items())


def fitting(value: Any, kind: Any, where: str) -> Any:
    """Return a value with the exact types of ``kind``: an ``int`` fits ``float``, a list a tuple.

    Raises:
        TypeError: It has another type. The message has the place in it.
        ValueError: A float is NaN or infinite.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if _is_optional(kind):
        return None if value is None else fitting(value, _some(kind), where)
    if kind is None or kind is type(None):
        fits = value is None
    elif kind is float:
        fits = isinstance(value, (int, float)) and not isinstance(value, bool)
        if fits and not math.isfinite(value):
            raise ValueError(f"{where}: {value} is no number that can be kept")
        value = float(value) if fits else value
    elif kind in _PLAIN:
        fits = type(value) is kind
    elif kind is Path:
        fits = isinstance(value, (str, Path))
        value = Path(value) if fits else value
    elif origin is list:
        if isinstance(value, (list, tuple)):
            return [fitting(item, arguments[0], f"{where}[{i}]") for i, item in enumerate(value)]
        fits = False
    elif origin is tuple:
        kinds = _of_tuple(arguments, len(value)) if isinstance(value, (list, tuple)) else None
        if kinds is not None:
            pairs = enumerate(zip(value, kinds, strict=True))
            return tuple(fitting(item, kind, f"{where}[{i}]") for i, (item, kind) in pairs)
        fits = False
    elif origin is dict:
        if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
            named = value.items()
            return {n: fitting(item, arguments[1], f"{where}[{n!r}]") for n, item in named}
        fits = False
    else:
        fields = _fields(kind) or {}
        if isinstance(value, kind):
            of = {n: fitting(getattr(value, n), k, f"{where}.{n}") for n, k in fields.items()}
            same = all(of[name] is getattr(value, name) for name in of)
            return value if same else kind(**of)
        fits = False
    if not fits:
        raise TypeError(
            f"{where}: expected {_shown(kind)}, found {type(value).__name__} ({value!r:.60})"
        )
    return value


def encoded(value: Any, kind: Any, of_file: _OfFile) -> Any:
    """Return a value that fits ``kind`` as JSON; ``of_file`` says what a path becomes."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if _is_optional(kind):
        return None if value is None else encoded(value, _some(kind), of_file)
    if kind is Path:
        return of_file(value)
    if origin is list:
        return [encoded(item, arguments[0], of_file) for item in value]
    if origin is tuple:
        kinds = _of_tuple(arguments, len(value)) or []
        return [encoded(item, kind, of_file) for item, kind in zip(value, kinds, strict=True)]
    if origin is dict:
        return {name: encoded(item, arguments[1], of_file) for name, item in value.items()}
    fields = _fields(kind)
    if fields is not None:
        return {name: encoded(getattr(value, name), k, of_file) for name, k in fields.items()}
    return value


def decoded(found: Any, kind: Any, of_file: _OfFile, where: str) -> Any:
    """Return the value that became ``found`` by :func:`encoded`.

    Raises:
        TypeError: It does not fit ``kind``.
        ValueError: It has a field that ``kind`` does not have.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if _is_optional(kind):
        return None if found is None else decoded(found, _some(kind), of_file, where)
    if kind is Path and isinstance(found, (str, Mapping)):
        return of_file(found)
    if origin is list and isinstance(found, list):
        return [decoded(item, arguments[0], of_file, where) for item in found]
    if origin is tuple and isinstance(found, list):
        kinds = _of_tuple(arguments, len(found))
        if kinds is not None:
            pairs = zip(found, kinds, strict=True)
            return tuple(decoded(item, kind, of_file, where) for item, kind in pairs)
    if origin is dict and isinstance(found, dict):
        return {n: decoded(item, arguments[1], of_file, where) for n, item in found.items()}
    fields = _fields(kind)
    if fields is not None and isinstance(found, dict):
        unknown = sorted(found.keys() - fields.keys())
        if unknown:
            raise ValueError(
                f"{where}: no field `{unknown[0]}`; there are {', '.join(fields) or 'none'}"
            )
        named = found.items()
        return kind(**{n: decoded(item, fields[n], of_file, f"{where}.{n}") for n, item in named})
    return fitting(found, kind, where)


def described(kind: Any) -> str:
    """Return a type as text that changes with it: names of classes, and fields with their types."""
    fields = _fields(kind)
    if fields is not None:
        inner = ", ".join(f"{name}: {described(field)}" for name, field in fields.items())
        return f"{kind.__qualname__}({inner})"
    arguments = typing.get_args(kind)
    if _is_optional(kind):
        return f"Optional[{described(_some(kind))}]"
    if arguments:
        inner = ", ".join("..." if a is Ellipsis else described(a) for a in arguments)
        return f"{typing.get_origin(kind).__name__}[{inner}]"
    return _shown(kind)


def _fields(kind: Any) -> dict[str, Any] | None:
    """Return the fields of a dataclass or a NamedTuple with their types."""
    if not isinstance(kind, type):
        return None
    named = issubclass(kind, tuple) and hasattr(kind, "_fields")
    if not (named or dataclasses.is_dataclass(kind)):
        return None
    hints = typing.get_type_hints(kind)
    if named:
        return {name: hints.get(name, Any) for name in kind._fields}  # type: ignore[attr-defined]
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def _is_optional(kind: Any) -> bool:
    union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    arguments = typing.get_args(kind)
    return union and len(arguments) == 2 and type(None) in arguments


def _some(kind: Any) -> Any:
    """Return ``T`` of ``Optional[T]``."""
    return next(argument for argument in typing.get_args(kind) if argument is not type(None))


def _of_tuple(arguments: tuple[Any, ...], length: int) -> list[Any] | None:
    """Return the type of each item, or ``None`` if the length is another one."""
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return [arguments[0]] * length
    return list(arguments) if len(arguments) == length else None


def _shown(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)
