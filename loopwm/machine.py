"""Memory of a process: kept for reuse while there is work, given back when there is none.

Left to itself, glibc maps and unmaps large tensors, whose pages then are cleared anew at every join of a batch and in
every layer of a training step; and what worlds held stays with its threads' pools for ever. Does nothing where the C
library is another one.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Mapping

ARENA_MAX, MMAP_MAX, MMAP_THRESHOLD, TOP_PAD, TRIM_THRESHOLD = -8, -4, -3, -2, -1
"""Parameters of glibc's mallopt: pools, mappings, bytes that are mapped on their own, bytes that are asked for beyond
what is needed, free bytes at the end that are returned."""


def keep_for_reuse() -> None:
    """Of a service: small pieces stay, large ones go. To be called before there are threads."""
    _set({ARENA_MAX: 1, MMAP_THRESHOLD: 1 << 25, TRIM_THRESHOLD: (1 << 31) - 1})


def keep_everything() -> None:
    """Of a training run, every step of which needs what the one before needed."""
    _set({MMAP_MAX: 0, TOP_PAD: 1 << 28, TRIM_THRESHOLD: (1 << 31) - 1})


def _set(parameters: Mapping[int, int]) -> None:
    if (libc := _glibc()) is not None:
        for parameter, value in parameters.items():
            libc.mallopt(parameter, value)


def settle() -> None:
    """To be called once all is loaded. What there is now stays: else every full garbage collection looks through it
    and everybody waits, 0.3 s with torch and transformers."""
    gc.collect()
    gc.freeze()


def give_back() -> None:
    """Takes some 50 ms a gigabyte."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "malloc_trim") and hasattr(libc, "mallopt") else None
