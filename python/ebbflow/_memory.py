"""How the C library keeps the memory that torch gives back."""

from __future__ import annotations

import ctypes
import os

# Options of `mallopt` in malloc.h, with the names that `GLIBC_TUNABLES` has for them.
_OPTIONS = (
    ("glibc.malloc.mmap_max", -4, 0),
    ("glibc.malloc.trim_threshold", -1, 2**31 - 1),
)


def keep_free_memory() -> None:
    """Keep the memory of freed tensors for the next ones, as the program ``ebb`` does.

    In each step torch takes and frees memory for results and gradients. The C library asks the
    system for each piece above 32 MiB, and the system clears every page of it: a fifth of the time
    of a step with a layer of 64 MiB. ``GLIBC_TUNABLES`` in the environment wins for what it names.
    """
    named = os.environ.get("GLIBC_TUNABLES", "")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for name, option, value in _OPTIONS:
        if name not in named:
            mallopt(option, value)
