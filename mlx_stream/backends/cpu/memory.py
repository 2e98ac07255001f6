"""Host memory for staging and cache slots: arenas of huge pages, given back piece by piece.

Filling fresh memory costs a page fault for every 4 KiB; with 2 MiB pages that all but disappears.
A freed piece returns its pages to the system at once, so the resident size follows the budget.
"""

from __future__ import annotations

import mmap
from collections import defaultdict

import numpy as np

from mlx_stream.storage.slot_memory import map_huge

ARENA_NBYTES = 64 << 20
PAGE_NBYTES = 4096


class HostMemory:
    """Pieces of page-aligned memory, pooled by size. Compute thread only."""

    def __init__(self) -> None:
        self._free: dict[int, list[tuple[mmap.mmap, int]]] = defaultdict(list)
        self.nbytes = 0

    def take(self, nbytes: int) -> tuple[np.ndarray, tuple[mmap.mmap, int]]:
        """``(uint8 view, piece)``; the piece goes back with :meth:`give`."""
        size = _page_round(nbytes)
        if not self._free[size]:
            self._grow(size)
        arena, offset = piece = self._free[size].pop()
        self.nbytes += size
        return np.frombuffer(arena, dtype=np.uint8, count=nbytes, offset=offset), piece

    def give(self, piece: tuple[mmap.mmap, int], nbytes: int) -> None:
        """The piece's pages leave the process; its address range is kept for reuse."""
        size = _page_round(nbytes)
        arena, offset = piece
        if hasattr(mmap, "MADV_DONTNEED"):
            # madvise takes whole pages: the start of a piece is one, see _page_round.
            arena.madvise(mmap.MADV_DONTNEED, offset, size)
        self._free[size].append(piece)
        self.nbytes -= size

    def _grow(self, size: int) -> None:
        """Map an arena of pieces; pages count only once they are touched."""
        count = max(1, ARENA_NBYTES // size)
        arena, start = map_huge(count * size)
        # Taken from the end, so the first pieces handed out are the lowest.
        self._free[size].extend((arena, start + i * size) for i in reversed(range(count)))


def _page_round(nbytes: int) -> int:
    return max(1, -(-nbytes // PAGE_NBYTES)) * PAGE_NBYTES
