"""Finds writes to tensors that torch does not count, such as those through ``.data``."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

#: Tensors of at most so many elements are compared as a whole.
WHOLE_MAX = 4096

#: Parts of a larger tensor, each of which has one element that is compared.
PARTS = 512

#: Slabs of all larger tensors, at least. With each version another one is compared as a whole.
SLABS = 128

#: Most elements of a slab.
SLAB_MAX = 1 << 18


class Marks:
    """Elements of tensors, kept to be compared with what is there later.

    Small tensors are kept as a whole. Of a large one the first element, the last one, and one of
    each of ``PARTS`` equal parts are kept. So a write to all of it, or to a large part of it, is
    found. A write to a few elements of a large tensor may not be. But each :meth:`keep` keeps
    another slab of the large tensors, so a write that is repeated after each of them is found.

    Args:
        tensors: The tensors. Their memory may be another one later.
    """

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._tensors = list(tensors)
        self._places = [
            _places(tensor.numel(), tensor.device) if tensor.numel() > WHOLE_MAX else None
            for tensor in self._tensors
        ]
        counts = zip(self._tensors, self._places, strict=True)
        self._counts = [(tensor if chosen is None else chosen).numel() for tensor, chosen in counts]
        # Tensors of one type on one device are compared at once.
        groups: dict[tuple[Any, Any], list[int]] = {}
        for number, tensor in enumerate(self._tensors):
            groups.setdefault((tensor.dtype, tensor.device), []).append(number)
        self._groups = list(groups.values())
        self._kept: list[Any] = []
        self._slabs = itertools.cycle(self._all_slabs())
        self._slab: tuple[int, int, int] | None = None
        self._slab_kept: Any = None

    def keep(self) -> None:
        """Keep what the tensors have now."""
        self._kept = [self._elements(group) for group in self._groups]
        self._slab = next(self._slabs, None)
        if self._slab is not None:
            self._slab_kept = self._elements_of(*self._slab).clone()

    def written(self) -> int | None:
        """Return the number of a tensor that has changed since :meth:`keep`, if one has."""
        for group, kept in zip(self._groups, self._kept, strict=False):
            if not self._is_kept(group, kept):
                return self._first(group, kept)
        if self._slab is not None and not _same(self._elements_of(*self._slab), self._slab_kept):
            return self._slab[0]
        return None

    def _all_slabs(self) -> Iterator[tuple[int, int, int]]:
        """Yield the slabs of the large tensors: the number of one, and a range of its elements."""
        counts = {
            number: tensor.numel()
            for number, (tensor, places) in enumerate(zip(self._tensors, self._places, strict=True))
            if places is not None
        }
        length = max(WHOLE_MAX, min(SLAB_MAX, sum(counts.values()) // SLABS))
        for number, count in counts.items():
            for begin in range(0, count, length):
                yield number, begin, min(begin + length, count)

    def _elements_of(self, number: int, begin: int, end: int) -> Any:
        import torch

        tensor = self._tensors[number].detach()
        if tensor.is_contiguous():
            return tensor.view(-1)[begin:end]
        return torch.take(tensor, torch.arange(begin, end, device=tensor.device))

    def _first(self, group: list[int], kept: Any) -> int:
        counts = [self._counts[number] for number in group]
        for number, elements in zip(group, kept.split(counts), strict=True):
            if not self._is_kept([number], elements):
                return number
        return group[0]

    def _is_kept(self, group: list[int], kept: Any) -> bool:
        try:
            return _same(self._elements(group), kept)
        except (IndexError, RuntimeError):
            # A tensor has fewer elements, or is on another device.
            return False

    def _elements(self, group: list[int]) -> Any:
        """Return the elements that are kept of some tensors, one after the other."""
        import torch

        parts = []
        with torch.no_grad():
            for number in group:
                tensor, places = self._tensors[number].detach(), self._places[number]
                parts.append(tensor.reshape(-1) if places is None else torch.take(tensor, places))
            return torch.cat(parts)


def _same(one: Any, other: Any) -> bool:
    """Return whether two tensors have the same bits."""
    import torch

    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    # As integers, because a NaN is not equal to itself.
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(one.element_size(), torch.int64)
    one, other = one.view(kind), other.view(kind)
    if one.device.type == "cpu":
        # NumPy compares several times as fast.
        return bool((one.numpy() == other.numpy()).all())
    return bool(torch.equal(one, other))


@functools.lru_cache(maxsize=256)
def _places(count: int, device: Any) -> Any:
    """Return places in a tensor of ``count`` elements: first, last, and one of each equal part."""
    import torch

    begin = torch.arange(PARTS) * count // PARTS
    # Equal distances could meet one column of a matrix in all rows.
    drawn = torch.Generator().manual_seed(count)
    within = torch.randint(count // PARTS, (PARTS,), generator=drawn)
    ends = torch.tensor([0, count - 1])
    return torch.cat([ends, begin + within]).to(device)
