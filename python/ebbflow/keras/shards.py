"""Data sets of ``tf.data``, one for each data shard, as the records of a job.

A lease names records by number, and a ``tf.data.Dataset`` has only a first and a next one. So each
data shard is a data set that can be made again, and that has the same records each time. A process
reads a shard forward, and keeps the records that it has passed. To go back it makes the data set
again. It compares checksums of what it reads with those of the first time.

A job that shuffles has the order ``window`` of ``docs/job.md``: the shards in a new order, dealt to
lanes, and a permutation within each window of a lane. A process has memory for the records of two
windows of each shard that it reads.
"""

from __future__ import annotations

import zlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from ebbflow.errors import RecordError

#: Checksums that a process keeps of one data set, of 4 bytes each.
_CHECKSUMS_MAX = 1 << 24


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
        # Of the records of each shard, as far as it was read; of a very large data set, of every
        # n-th record of a shard.
        self._checksums: dict[int, array[int]] = {}
        self._every = -(-self._ends[-1] // _CHECKSUMS_MAX)
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
                f"{self._of.records[number]}; give Shards the number that make({number}) has"
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
        return _Shard(self._compared(iterator, number), 2 * self._of.window)

    def _compared(self, records: Iterator[Any], shard: int) -> Iterator[Any]:
        """Yield the records of a shard, which must be those that it had before."""
        known = self._checksums.setdefault(shard, array("I"))
        for record, value in enumerate(records):
            at, left = divmod(record, self._every)
            if left == 0:
                checksum = _checksum(value)
                if at == len(known):
                    known.append(checksum)
                elif known[at] != checksum:
                    # A loop that goes on reads the shard from its begin, and hears it again.
                    del self._open[shard]
                    raise RecordError(
                        f"{self._what}: record {record} of shard {shard} is another one than "
                        "before; make(shard) must give the same records each time: leave out "
                        "shuffle and random operations, and files that change"
                    )
            yield value


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


def _checksum(record: Any) -> int:
    """Return the CRC-32 of a record."""
    import keras
    import numpy

    checksum = 0
    for part in keras.tree.flatten(record):
        values = numpy.asarray(part)
        # Strings are objects, whose places in memory are of no meaning.
        content = repr(values.tolist()).encode() if values.dtype.hasobject else values.tobytes()
        checksum = zlib.crc32(content, checksum)
    return checksum
