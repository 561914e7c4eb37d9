"""Memory that is free goes back to the system: glibc keeps what worlds held, gigabytes after a busy hour."""

from __future__ import annotations

import ctypes
import sys


def give_back() -> None:
    """Takes some 50 ms a gigabyte. Does nothing where the C library is another one."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
