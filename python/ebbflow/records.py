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


class _Feed:
    """The batches that a loader loads next. Its iterator goes on after a pause."""

    def __init__(self) -> None:
        self.waiting: deque[list[tuple[int, int]]] = deque()

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self

    def __next__(self) -> list[tuple[int, int]]:
        if not self.waiting:
            raise StopIteration
        return self.waiting.popleft()


class Records:
    """The records of one data set.

    Attributes:
        batch_size: Records of a batch of the user's ``DataLoader``; ``None`` without one.
        shuffled: Whether the user's ``DataLoader`` draws its records in a random order.

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
            raise ValueError(f"{what}: the data set has no records")
        if loader is not None:
            _check(loader, what)
        self._what = what
        self._length = len(dataset)
        self._feed = _Feed()
        self._iterator: Any = None
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
        feed: Any = self._feed
        self._loader: Any = torch_data.DataLoader(keyed, batch_sampler=feed, **kept)
        plain = (
            self._loader.collate_fn is torch_data.default_collate
            and self._loader.num_workers == 0
            and not self._loader.pin_memory
        )
        self._rows = _rows(dataset) if plain else None

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
        self._feed.waiting.append([(epoch, record) for record in records])
        if self._iterator is None:
            self._iterator = iter(self._loader)
        elif self._loader.num_workers > 0:
            # An iterator asks for more only while it has something to wait for.
            self._iterator._try_put_index()
        try:
            return next(self._iterator)
        except Exception:
            # Workers may have ended with the error.
            self._iterator = None
            raise

    def close(self) -> None:
        """End the workers of the loader."""
        self._iterator = None


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
