"""Memory that reads can fill at full speed.

A direct read hands the device a list of physical pieces, and devices take few of them (254 is
common): with 4 KiB pages an 8 MiB read becomes many small ones. Huge pages made the same reads
1.6 times as fast where this was measured, so slots ask for them.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys

import numpy as np

HUGE_PAGE = 2 << 20


def map_huge(nbytes: int) -> tuple[mmap.mmap, int]:
    """``(mapping, start)``: private zeroed memory; `start` is its first multiple of HUGE_PAGE.

    At least `nbytes` follow `start`. Pages are committed when first written, so the cost of that
    falls on the first read.
    """
    private = (
        {} if not hasattr(mmap, "MAP_PRIVATE") else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANON}
    )
    memory = mmap.mmap(-1, nbytes + HUGE_PAGE, **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages: slower, not wrong
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory, -np.frombuffer(memory, np.uint8).ctypes.data % HUGE_PAGE


def allocate_slot(nbytes: int) -> np.ndarray:
    """A zeroed, writable 1-D uint8 array whose address is a multiple of HUGE_PAGE.

    The caller owns it; the memory goes back to the system with the last array that uses it.
    """
    memory, start = map_huge(nbytes)
    return np.frombuffer(memory, np.uint8, count=nbytes, offset=start)


def trim_heap() -> None:
    """Give the heap's free pages back to the system, where malloc keeps them (glibc).

    After a prefill that is hundreds of megabytes which the expert cache is about to ask for.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another libc
            ctypes.CDLL(None).malloc_trim(0)
