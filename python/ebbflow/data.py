"""Data files that Ebbflow reads itself, as ``train_data`` and ``eval_data`` of a loop.

``ebbflow.join(model, optimizer, ebbflow.data.source("train-*.parquet", format="parquet"), ..)``
makes a job whose section ``[data]`` names files, as in a job file. Each process reads the records
of its leases in Rust, ahead of the loop, and the loop gets them as columns.
"""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ebbflow import _native
from ebbflow._job import stores
from ebbflow.errors import InvalidJobError

#: Keys of the section that the arguments of :func:`ebbflow.join` stand for.
_OF_JOIN = {
    "train": "they are the first argument",
    "validation": "give join eval_data = ebbflow.data.source(..)",
    "validation_sets": "a loop measures its model on one set; give join eval_data",
    "base": "relative paths start from the working directory",
}

#: Names of types in NumPy and torch, and in a job file.
_TYPES = {
    "uint8": "u8",
    "int8": "i8",
    "int16": "i16",
    "int32": "i32",
    "int64": "i64",
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
    "bool": "bool",
    "bool_": "bool",
}

#: How messages begin about a value that a section cannot have at all.
_UNREAD = "job specification: "

#: Keys that say nothing of validation records.
_OF_TRAINING = {"train", "shuffle", "window", "interleave", "base", "transforms"}


class Columns(Sequence[Any]):
    """Some columns, by number and by name: the inputs in their order, then the label.

    Attributes:
        names: Names of the columns. That of the label is ``labels``.
    """

    def __init__(self, named: Sequence[tuple[str, Any]]) -> None:
        self.names = [name for name, _ in named]
        self._values = tuple(value for _, value in named)

    def __len__(self) -> int:
        """Return the number of columns."""
        return len(self._values)

    def __getitem__(self, key: Any) -> Any:
        if not isinstance(key, str):
            return self._values[key]
        if key not in self.names:
            raise KeyError(f"no column {key!r}; there are {', '.join(self.names)}")
        return self._values[self.names.index(key)]


class Source:
    """Records in data files, from :func:`source`.

    ``len(source)`` opens the files and counts the records. ``source[i]`` and ``for record in
    source`` read records one by one, to look at them: a dictionary of NumPy arrays ``[shape..]``,
    transformed as in the first epoch of a job with the seed 0. A source can be pickled.

    Attributes:
        section: The section ``[data]`` of a job, without what has its default.
    """

    def __init__(self, section: Mapping[str, Any]) -> None:
        self._native = _read(section)
        self.section: dict[str, Any] = json.loads(self._native.section())
        if "labels" in self.section.get("inputs", ()):
            raise InvalidJobError(
                "data.inputs: in a batch `labels` is the name of the label; rename the column, as "
                'in inputs={"other": "labels"}'
            )

    def __repr__(self) -> str:
        return f"ebbflow.data.source({self.section['train']}, format={self.section['format']!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.section,)

    def __len__(self) -> int:
        """Return the number of training records.

        Raises:
            InvalidJobError: A file cannot be read, or does not fit the settings.
        """
        return self._native.count()

    def __getitem__(self, record: int) -> dict[str, Any]:
        """Return a record.

        Raises:
            IndexError: There is no such record.
            InvalidJobError: A file cannot be read, or does not fit the settings.
            RecordError: A value of the record is missing or broken.
            TypeError: It is no number of a record.
        """
        try:
            record = operator.index(record)
        except TypeError:
            found = type(record).__name__
            raise TypeError(f"source[i] needs the number of a record, found {found}") from None
        records = len(self)
        at = record + records if record < 0 else record
        if not 0 <= at < records:
            raise IndexError(f"record {record}: there are {records}")
        columns = Leased().columns(self._native.record(at))
        # With the dots a number stays an array, of no dimensions.
        return {name: column[0, ...] for name, column in zip(columns.names, columns, strict=True)}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[record] for record in range(len(self)))


def source(
    files: str | os.PathLike[str] | Sequence[Any] | Mapping[str, Any],
    *,
    format: str,  # noqa: A002
    **settings: Any,
) -> Source:
    """Describe data files as records of a job: ``train_data`` or ``eval_data`` of a ``join``.

    The settings are the keys of the section ``[data]`` of a job file, with the same values,
    defaults and errors: ``inputs``, ``label``, ``dtypes``, ``transforms``, ``shuffle``,
    ``missing``, ``on_error`` and others (``docs/job.md``).

    Args:
        files: Path, URL or pattern, or a list of them: ``"s3://bucket/train-*.parquet"``. For a
            format whose files have one array each, a dictionary from the column name to its files:
            ``{"features": "x.npy", "labels": "y.npy"}``. The key ``records`` beside them, or beside
            ``files``, uses some records alone: ``{"files": "x.parquet", "records": [0, 900]}``.
        format: Format of the files, such as ``"parquet"``, ``"npy"``, ``"csv"`` or ``"images"``.
        settings: Other keys of the section.

    Returns:
        The records. A batch has the inputs ``[n, shape..]`` in their order, and the label
        ``[n, shape..]`` last: tensors in a loop in PyTorch, otherwise NumPy arrays. They are for
        reading. Types are those of the files, or of ``dtypes`` and ``transforms``. f64 and bf16
        become float32. Without ``inputs`` all columns but the label are one float32 array,
        ``features``.

    Raises:
        InvalidJobError: A key or a format is unknown, a value is not allowed, or settings
            contradict each other.
        TypeError: A setting belongs to ``join``, or a value has no counterpart in a job file.
    """
    for key, advice in _OF_JOIN.items():
        if key in settings:
            raise TypeError(f"ebbflow.data.source has no {key}: {advice}")
    given = {key: value for key, value in settings.items() if value is not None}
    if isinstance(given.get("shuffle"), bool):
        raise InvalidJobError(
            f'data.shuffle = {given["shuffle"]}: expected shuffle="records", "window" or "none"'
        )
    lists = files if isinstance(files, Mapping) else {"files": files}
    for name, names in lists.items():
        if isinstance(names, Mapping):
            raise InvalidJobError(
                f"data.train.{name}: a dictionary; give a file or a list of files, and `records` "
                'beside the columns, as in {"x": "x.npy", "y": "y.npy", "records": [0, 900]}'
            )
    train = {key: _list(names) if key != "records" else names for key, names in lists.items()}
    return Source({"format": format, "train": train, **given})


class Leased:
    """The records of a source, in a job: the worker reads those of its leases.

    Args:
        array: Makes what the loop gets of a NumPy array. Default: the array itself.

    Attributes:
        batch_size: ``None``: a loop gives ``micro``.
    """

    batch_size: int | None = None

    def __init__(self, array: Callable[[Any], Any] = lambda array: array) -> None:
        self._array = array

    def columns(self, regions: Sequence[tuple[str, str, Any]]) -> Columns:
        """Return name, type and memory of each column as columns ``[n, shape..]``."""
        import numpy

        def values(kind: str, region: Any) -> Any:
            array = numpy.asarray(region)
            if kind == "bf16":
                array = (array.astype(numpy.uint32) << 16).view(numpy.float32)
            return self._array(array)

        return Columns([(name, values(kind, region)) for name, kind, region in regions])

    def close(self) -> None:
        """Do nothing: the worker closes the files."""


def refuse_inside(data: Any, what: str) -> None:
    """Refuse a loader or a data set that reads a source, record by record.

    Raises:
        TypeError: There is a source inside.
    """
    left: list[Any] = [data]
    seen: set[int] = set()
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        # Attributes alone: asking for another one may run code of the data set.
        found = getattr(each, "__dict__", {})
        several = found.get("datasets")
        if isinstance(several, Mapping):
            several = several.values()
        elif not isinstance(several, list | tuple):
            several = ()
        left += [found.get("dataset"), *several]
        if any(isinstance(other, Source) for other in left):
            raise TypeError(
                f"{what}: {type(data).__name__} would read ebbflow.data.source record by record, "
                "without its order and with the same transforms in each epoch; give the source "
                f"itself as {what}, and the records of a batch, as in micro=8"
            )


def section_of(train: Any, evaluation: Any, shuffle: bool | None) -> dict[str, Any]:
    """Return the section ``[data]`` of a job with the sources of ``join``.

    Raises:
        TypeError: Only one of them is a source.
        ValueError: The sources contradict each other, or ``shuffle`` is given.
    """
    if not isinstance(train, Source) or not isinstance(evaluation, Source | None):
        found = [type(data).__name__ for data in (train, evaluation)]
        raise TypeError(
            f"train_data is {found[0]} and eval_data is {found[1]}: give both as "
            "ebbflow.data.source, or neither"
        )
    if shuffle is not None:
        raise ValueError(
            f"shuffle = {shuffle}: the order is a setting of the data; give ebbflow.data.source "
            'shuffle="records", "window" or "none"'
        )
    section = dict(train.section)
    if evaluation is None:
        return section
    other = evaluation.section
    own = ("validation_fraction", "validation_transforms")
    for key in own:
        if key in section or key in other:
            raise ValueError(
                f"{key}: eval_data has the validation records and their transforms; remove "
                f"{key}, or eval_data"
            )
    for key in sorted((section.keys() | other.keys()) - _OF_TRAINING):
        if section.get(key) != other.get(key):
            raise ValueError(
                f"eval_data: {key} = {_shown(other.get(key))}, and train_data has "
                f"{_shown(section.get(key))}; a job reads both in the same way, except for "
                "transforms and order"
            )
    bases = {found["base"] for found in (section, other) if "base" in found}
    if len(bases) > 1:
        raise ValueError(
            f"eval_data: relative paths start from {other['base']}, and those of train_data from "
            f"{section['base']}; give absolute paths"
        )
    section["validation"] = other["train"]
    if bases:
        section["base"] = bases.pop()
    transforms, others = section.get("transforms", {}), other.get("transforms", {})
    if transforms != others:
        columns = sorted(transforms.keys() | others.keys())
        section["validation_transforms"] = {column: others.get(column, []) for column in columns}
    return section


def _read(section: Mapping[str, Any]) -> _native.Source:
    """Return a checked section. Messages about a value of a wrong type begin with its key.

    Raises:
        InvalidJobError: The section is wrong.
    """

    def native(part: Mapping[str, Any]) -> _native.Source:
        return _native.Source(json.dumps(part, default=_plain), stores())

    try:
        return native(section)
    except InvalidJobError as error:
        said = str(error)
        whole = {"format": "csv", "train": {"files": ["x.csv"]}}
        for key, value in section.items() if said.startswith(_UNREAD) else ():
            # Alone among good ones it is refused in the same words.
            try:
                native(whole | {key: value})
            except InvalidJobError as alone:
                if str(alone) == said:
                    wrong = said.removeprefix(_UNREAD)
                    if wrong == "expected value":
                        wrong = f"{value!r} stands where a name is expected"
                    raise InvalidJobError(f"data.{key}: {wrong}") from None
        raise


def _again(section: dict[str, Any]) -> Source:
    """Return the source that was pickled.

    Raises:
        InvalidJobError: Its paths are relative, and this process is in another folder.
    """
    source = Source(section)
    began, here = section.get("base"), source.section.get("base")
    if began != here:
        raise InvalidJobError(
            f"the paths of a pickled source start from {began}, and this process is in {here}; "
            "give ebbflow.data.source absolute paths"
        )
    return source


def _list(names: Any) -> list[str]:
    single = isinstance(names, str | os.PathLike)
    return [os.fspath(name) for name in ([names] if single else names)]


def _plain(value: Any) -> Any:
    """Return a value of another library as JSON has it."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return dict(value)
    tolist = getattr(value, "tolist", None)
    if callable(tolist) and not isinstance(value, type):
        return tolist()
    if isinstance(value, Sequence):
        return list(value)
    name = getattr(value, "__name__", None) or str(value).removeprefix("torch.")
    if name in _TYPES:
        raise TypeError(f'{value!r}: name the type as a job file does, "{_TYPES[name]}"')
    raise TypeError(
        f"{value!r} ({type(value).__name__}) has no counterpart in a job file; expected a bool, a "
        "number, a str, a path, a list or a dict"
    )


def _shown(value: Any) -> str:
    return "none" if value is None else json.dumps(value)
