"""Data sets of ``tf.data``, one for each data shard, as the records of a job.

A lease names records by number, and a ``tf.data.Dataset`` has only a first and a next one. So each
data shard is a data set that can be made again, and that has the same records each time. A process
reads a shard forward, and keeps the records that it has passed. To go back it makes the data set
again.

A job that shuffles has the order ``window`` of ``docs/job.md``: the shards in a new order, dealt to
lanes, and a permutation within each window of a lane. A process has memory for the records of two
windows of each shard that it reads.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from ebbflow.errors import RecordError


class Shards:
    """A function that makes a ``tf.data.Dataset`` for each data shard.

    Args:
        make: ``make(shard)`` returns the records of a data shard, not batched, and the same ones in
            the same order each time. Shards count from 0.
        records: Number of records of each data shard, so of shards too.
        window: Records that are permuted among each other.
        lanes: Shards that are read side by side.

    Raises:
        ValueError: A number is too small.
    """

    def __init__(
        self,
        make: Callable[[int], Any],
        records: Sequence[int],
        *,
        window: int = 10_000,
        lanes: int = 4,
    ) -> None:
        counts = [int(count) for count in records]
        if not counts or min(counts) < 1:
            raise ValueError(
                f"records: expected the number of records of each shard, at least 1, found {counts}"
            )
        if window < 1 or lanes < 1:
            raise ValueError(f"window = {window}, lanes = {lanes}: expected at least 1")
        self.make = make
        self.records = counts
        self.window = window
        self.lanes = min(lanes, len(counts))


class Reader:
    """The records of shards, by number over all shards.

    Attributes:
        batch_size: ``None``: a loop gives ``micro``.
        shuffled: True: each epoch has another order.
        shards: Number of records of each data shard.
        order: Settings of the order of a job that shuffles.
    """

    batch_size: int | None = None
    shuffled = True

    def __init__(self, shards: Shards, what: str) -> None:
        self._of = shards
        self._what = what
        self._ends = list(accumulate(shards.records))
        self._open: OrderedDict[int, _Shard] = OrderedDict()
        # Of the first record of each shard.
        self._firsts: dict[int, str] = {}
        self.shards = shards.records
        self.order = {"shuffle": "window", "window": shards.window, "interleave": shards.lanes}

    def __len__(self) -> int:
        return self._ends[-1]

    def load(self, _: int, records: Sequence[int]) -> Any:
        """Return the records, stacked along a new first axis.

        Raises:
            RecordError: A shard ends early, or has other records than before.
        """
        import keras
        import numpy

        loaded = [self._record(record) for record in records]
        return keras.tree.map_structure(lambda *parts: numpy.stack(parts), *loaded)

    def close(self) -> None:
        """Forget all records."""
        self._open.clear()

    def _record(self, record: int) -> Any:
        number = next(at for at, end in enumerate(self._ends) if record < end)
        within = record - (self._ends[number] - self._of.records[number])
        shard = self._open.get(number)
        if shard is None or not shard.has(within):
            shard = self._open[number] = self._opened(number)
        self._open.move_to_end(number)
        while len(self._open) > 2 * self._of.lanes:
            self._open.popitem(last=False)
        try:
            return shard.get(within)
        except StopIteration:
            raise RecordError(
                f"{self._what}: shard {number} ended after {shard.position} records, expected "
                f"{self._of.records[number]}"
            ) from None

    def _opened(self, number: int) -> _Shard:
        import tensorflow as tf

        dataset = self._of.make(number)
        if not isinstance(dataset, tf.data.Dataset):
            raise TypeError(
                f"{self._what}: expected a function that makes a tf.data.Dataset, found "
                f"{type(dataset).__name__}"
            )
        options = tf.data.Options()
        options.deterministic = True
        iterator = dataset.with_options(options).as_numpy_iterator()
        shard = _Shard(iterator, 2 * self._of.window)
        try:
            first = _digest(shard.get(0))
        except StopIteration:
            raise RecordError(f"{self._what}: shard {number} has no records") from None
        if self._firsts.setdefault(number, first) != first:
            raise RecordError(
                f"{self._what}: shard {number} has another first record than before; make(shard) "
                "must give the same records each time: leave out shuffle and random operations"
            )
        return shard


class _Shard:
    """An open shard, with its last records."""

    def __init__(self, iterator: Iterator[Any], most: int) -> None:
        self._iterator = iterator
        self._most = most
        self._kept: OrderedDict[int, Any] = OrderedDict()
        self.position = 0

    def has(self, record: int) -> bool:
        return record >= self.position or record in self._kept

    def get(self, record: int) -> Any:
        while record >= self.position:
            self._kept[self.position] = next(self._iterator)
            self.position += 1
            if len(self._kept) > self._most:
                self._kept.popitem(last=False)
        return self._kept[record]


def _digest(record: Any) -> str:
    import keras
    import numpy

    hashed = hashlib.sha256()
    for part in keras.tree.flatten(record):
        hashed.update(numpy.asarray(part).tobytes())
    return hashed.hexdigest()
