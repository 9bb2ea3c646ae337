"""The records of a data set as NumPy arrays, by number, as the leases of a job name them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ebbflow.errors import RecordError
from ebbflow.records import seed_host


class Arrays:
    """The records of one data set.

    Args:
        data: A tuple or a dictionary of arrays whose first axis counts the records, or of
            dictionaries of such arrays; or an object with ``__len__`` and ``__getitem__``,
            whose records are trees of arrays and numbers.
        what: Its name in messages.
        seed: Seed of the job. Before each ``__getitem__`` NumPy and ``random`` are seeded.
        tree_map: ``tree_map(function, tree, ..)`` of the library in which the loop is written.
        collate: Makes a batch of a list of records. Default: they are stacked.

    Attributes:
        batch_size: ``None``: a loop gives ``micro``.
        shuffled: True: each epoch has another order.

    Raises:
        TypeError: The data are of another kind.
        ValueError: There are no records, or the arrays have different numbers of them.
    """

    batch_size: int | None = None
    shuffled = True

    def __init__(
        self,
        data: Any,
        what: str,
        seed: int,
        tree_map: Callable[..., Any],
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        import numpy

        self._what = what
        self._seed = seed
        self._tree_map = tree_map
        self._collate = collate
        self._columns: Any = None
        self._items: Any = None
        if isinstance(data, (tuple, Mapping)):
            lengths: dict[Any, int] = {}

            def arrays(column: Any, name: Any) -> Any:
                if isinstance(column, Mapping):
                    return {key: arrays(part, f"{name}.{key}") for key, part in column.items()}
                array = numpy.asarray(column)
                lengths[name] = len(array) if array.ndim else 0
                return array

            columns = data if isinstance(data, Mapping) else dict(enumerate(data))
            made = {name: arrays(column, name) for name, column in columns.items()}
            if len(set(lengths.values())) != 1:
                raise ValueError(f"{what}: arrays of equal length are expected, found {lengths}")
            self._columns = made if isinstance(data, Mapping) else tuple(made.values())
            self._length = next(iter(lengths.values()))
        elif hasattr(data, "__len__") and hasattr(data, "__getitem__"):
            self._items = data
            self._length = len(data)
        else:
            raise TypeError(
                f"{what}: {type(data).__name__} has no __len__ or no __getitem__; give a tuple or "
                "a dictionary of arrays, or a map-style data set"
            )
        if self._length == 0:
            raise ValueError(
                f"{what}: the data set has no records, and a job needs at least one; check its "
                "path and its filters"
            )

    def __len__(self) -> int:
        return self._length

    def load(self, epoch: int, records: Sequence[int]) -> Any:
        """Return the records as a batch.

        Raises:
            RecordError: A record cannot be loaded. It has the number of the record.
        """
        import numpy

        if self._columns is not None and self._collate is None:
            return self._tree_map(lambda column: column[records], self._columns)
        loaded = []
        for record in records:
            seed_host(self._seed, epoch, record)
            try:
                loaded.append(self._item(record))
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
                raise RecordError(f"record {record} of {self._what}: {found}") from error
        if self._collate is not None:
            return self._collate(loaded)
        return self._tree_map(lambda *parts: numpy.stack(parts), *loaded)

    def _item(self, record: int) -> Any:
        if self._items is not None:
            return self._items[record]
        return self._tree_map(lambda column: column[record], self._columns)

    def close(self) -> None:
        """Do nothing: there are no workers to end."""
