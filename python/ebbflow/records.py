"""The records of a user's data set, by number, as the leases of a job name them.

A data set is an object with ``__len__`` and ``__getitem__``, or a torch ``DataLoader`` of one. The
loader's collate function, workers and pinning stay; its sampler is replaced. Random numbers of a
record are keyed by (seed, epoch, record), in whichever process it is loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ebbflow import _native
from ebbflow.errors import RecordError

#: Stands for the epoch of records that are only measured, so that they are the same each time.
EVALUATION = 0xFFFF_FFFF


def seed_host(seed: int, *position: int) -> int:
    """Seed NumPy and ``random`` by a position of a job with ``seed``. Returns the key of both."""
    import random

    import numpy

    numbers = [number & 0xFFFF_FFFF_FFFF_FFFF for number in (seed, *position)]
    packed = struct.pack(f"<{len(numbers)}Q", *numbers)
    key = int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")
    random.seed(key)
    numpy.random.seed(key & 0xFFFF_FFFF)
    return key


def seed_all(seed: int, *position: int) -> None:
    """Seed torch, NumPy and ``random`` by a position of a job with ``seed``."""
    import torch

    key = seed_host(seed, *position)
    # `torch.manual_seed` notes a traceback for each device that is not in use, for milliseconds.
    torch.default_generator.manual_seed(key >> 1)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(key >> 1)


def seed_microbatch(seed: int, microbatch: int) -> None:
    """Seed torch, NumPy and ``random`` as a job with ``seed`` does before one of its batches.

    So a loop without a job draws the numbers of a job, such as the masks of dropout.

    Args:
        seed: The argument ``seed`` of :func:`ebbflow.join`.
        microbatch: Number of the batch in the job, from 0, over all epochs: ``batch.microbatch``.
            Each epoch has ``ceil(records / micro)`` of them.
    """
    seed_all(_native.microbatch_key(seed, microbatch))


class _Keyed:
    """A data set whose items are named by (epoch, record)."""

    def __init__(self, data: Any, what: str, seed: int) -> None:
        self.data = data
        self.what = what
        self.seed = seed

    def __getitem__(self, item: tuple[int, int]) -> Any:
        epoch, record = item
        seed_all(self.seed, epoch, record)
        try:
            return self.data[record]
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
            raise RecordError(f"record {record} of {self.what}: {found}") from error


#: Names of the items of a batch: an epoch and a record each.
_Items = list[tuple[int, int]]


class _Feed:
    """The batches that a loader loads next. Its iterator goes on after a pause."""

    def __init__(self) -> None:
        self.waiting: deque[_Items] = deque()

    def __iter__(self) -> Iterator[_Items]:
        return self

    def __next__(self) -> _Items:
        if not self.waiting:
            raise StopIteration
        return self.waiting.popleft()


class _Ahead:
    """Batches of a loader, of which its workers load some before anybody asks for them.

    A batch that is never asked for, such as that of a lost lease, makes room for a later one.
    """

    def __init__(self, data: Any, kept: dict[str, Any]) -> None:
        from torch.utils import data as torch_data

        self._feed = _Feed()
        feed: Any = self._feed
        self.loader: Any = torch_data.DataLoader(data, batch_sampler=feed, **kept)
        self._iterator: Any = None
        # Batches that the loader was told of and has not given, in its order.
        self._told: deque[_Items] = deque()
        # Batches that came before somebody asked for them, the oldest first.
        self._early: dict[tuple[tuple[int, int], ...], Any] = {}
        #: Batches that the workers load at a time.
        self.most = self.loader.num_workers * (self.loader.prefetch_factor or 0)

    def expect(self, items: _Items) -> None:
        """Load a batch that somebody will ask for."""
        self._told.append(items)
        self._feed.waiting.append(items)
        self._begin()

    def forget(self) -> None:
        """Load no batch that is not being loaded."""
        for _ in range(len(self._feed.waiting)):
            self._told.pop()
        self._feed.waiting.clear()

    def load(self, items: _Items) -> Any:
        """Return a batch."""
        if tuple(items) in self._early:
            return self._early.pop(tuple(items))
        if items not in self._told:
            self.expect(items)
        while True:
            self._begin()
            first = self._told.popleft()
            try:
                found = next(self._iterator)
            except Exception:
                self._restart()
                # Whoever asks for another batch sees its error.
                if first == items:
                    raise
                continue
            if first == items:
                return found
            self._early[tuple(first)] = found
            if len(self._early) > self.most:
                del self._early[next(iter(self._early))]

    def close(self) -> None:
        """End the workers, and forget the batches."""
        self._told.clear()
        self._early.clear()
        self._restart()

    def _begin(self) -> None:
        """Give the workers as many batches as they take."""
        if self._iterator is None:
            self._iterator = iter(self.loader)
        if self.loader.num_workers == 0:
            return
        # An iterator asks for more only when it gives a batch. Batches that have come, and wait for
        # one before them, count too.
        while self._feed.waiting and len(self._told) - len(self._feed.waiting) < self.most:
            self._iterator._try_put_index()

    def _restart(self) -> None:
        """Begin anew with the batches that were told: workers may have ended with an error."""
        self._iterator = self.loader._iterator = None
        self._feed.waiting = deque(self._told)


class Records:
    """The records of one data set.

    Attributes:
        batch_size: Records of a batch of the user's ``DataLoader``; ``None`` without one.
        shuffled: Whether the user's ``DataLoader`` draws its records in a random order.
        loads_ahead: Whether the user's ``DataLoader`` has workers, which load records ahead.

    Raises:
        TypeError: The data set has no length or no items by number, or a loader or a data set is
            of a kind whose records have no numbers.
        ValueError: The data set has no records, or a setting of the loader cannot be kept.
    """

    def __init__(self, data: Any, what: str, seed: int) -> None:
        from torch.utils import data as torch_data

        loader = data if isinstance(data, torch_data.DataLoader) else None
        dataset: Any = loader.dataset if loader is not None else data
        if isinstance(dataset, torch_data.IterableDataset):
            raise TypeError(
                f"{what}: {type(dataset).__name__} is an IterableDataset, whose records have no "
                "numbers, so nobody could train each of them exactly once; give a data set with "
                "__len__ and __getitem__"
            )
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise TypeError(
                f"{what}: {type(dataset).__name__} has no __len__ or no __getitem__; give a "
                "map-style data set, or a DataLoader of one"
            )
        if len(dataset) == 0:
            raise ValueError(
                f"{what}: the data set has no records, and a job needs at least one; check its "
                "path and its filters"
            )
        if loader is not None:
            _check(loader, what)
        self._what = what
        self._length = len(dataset)
        self.batch_size: int | None = None if loader is None else loader.batch_size
        sequential = loader is not None and isinstance(loader.sampler, torch_data.SequentialSampler)
        self.shuffled = not sequential
        keyed: Any = _Keyed(dataset, what, seed)
        kept: dict[str, Any] = {}
        if loader is not None:
            kept = {
                "num_workers": loader.num_workers,
                "collate_fn": loader.collate_fn,
                "pin_memory": loader.pin_memory,
                "timeout": loader.timeout,
                "worker_init_fn": loader.worker_init_fn,
                "multiprocessing_context": loader.multiprocessing_context,
                "prefetch_factor": loader.prefetch_factor,
                "persistent_workers": loader.num_workers > 0,
            }
        self._batches = _Ahead(keyed, kept)
        made = self._batches.loader
        plain = (
            made.collate_fn is torch_data.default_collate
            and made.num_workers == 0
            and not made.pin_memory
        )
        self._rows = _rows(dataset) if plain else None
        self.loads_ahead = made.num_workers > 0

    def __len__(self) -> int:
        return self._length

    def load(self, epoch: int, records: Sequence[int]) -> Any:
        """Return the collated records.

        Raises:
            RecordError: A record cannot be loaded. It has the number of the record, and the data
                set's own error as its cause or, from a worker of the loader, in its text.
        """
        if self._rows is not None:
            # The loader names the record whose error this is.
            with contextlib.suppress(Exception):
                return self._rows(records)
        return self._batches.load([(epoch, record) for record in records])

    def expect(self, epoch: int, records: Sequence[int]) -> None:
        """Let the workers of the loader load records that :meth:`load` will be asked for."""
        self._batches.expect([(epoch, record) for record in records])

    def forget(self) -> None:
        """Load nothing that was expected and is not being loaded."""
        self._batches.forget()

    def close(self) -> None:
        """End the workers of the loader."""
        self._batches.close()


def _rows(dataset: Any) -> Callable[[Sequence[int]], list[Any]] | None:
    """Return what collates the records of tensors at once; ``None`` for other data sets.

    It makes the batches of the default collate function. Nothing is drawn, so nothing is seeded.
    """
    import torch
    from torch.utils import data as torch_data

    # A subclass may do something else.
    if type(dataset) is torch_data.TensorDataset:
        tensors = dataset.tensors
        if all(type(tensor) is torch.Tensor and not tensor.is_sparse for tensor in tensors):
            return lambda records: [tensor[torch.as_tensor(records)] for tensor in tensors]
    if type(dataset) is torch_data.Subset:
        below, numbers = _rows(dataset.dataset), dataset.indices
        if below is not None:
            return lambda records: below([numbers[record] for record in records])
    return None


def _check(loader: Any, what: str) -> None:
    if loader.batch_sampler is None:
        raise ValueError(
            f"{what}: a DataLoader with batch_size=None makes no batches of records; give it a "
            "batch_size"
        )
    if loader.drop_last:
        raise ValueError(
            f"{what}: drop_last=True leaves records out, and a job trains each record once in an "
            "epoch; remove it"
        )
