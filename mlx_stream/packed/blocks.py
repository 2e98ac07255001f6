"""Blocks of bytes with gaps between them, cut into pieces of one size for a file."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mlx_stream.packed.pieces import Piece
from mlx_stream.storage.slot_memory import allocate_slot

BUFFERS = 3  # one is being filled, one is the caller's, one is being written


class Blocks:
    """Pieces of the range [begin, end) of a file; gaps become zeros.

    A piece is valid until the piece after the next.
    """

    def __init__(self, begin: int, end: int, piece_nbytes: int) -> None:
        self._begin, self._end, self._piece = begin, end, piece_nbytes
        size = min(piece_nbytes, end - begin)
        self._buffers = [allocate_slot(size) for _ in range(BUFFERS)] if size else []

    def cut(self, blocks: Iterator[tuple[int, np.ndarray]]) -> Iterator[Piece]:
        """From ascending ``(offset in the file, bytes)``, which may reach out of the range."""
        at, number = self._begin, 0
        buffer = self._fresh(number)
        for start, data in blocks:
            lo, hi = max(start, self._begin), min(start + len(data), self._end)
            while lo < hi:
                size = min(self._piece, self._end - at)
                if lo >= at + size:
                    yield Piece(at, buffer[:size])
                    at, number = at + size, number + 1
                    buffer = self._fresh(number)
                    continue
                stop = min(hi, at + size)
                buffer[lo - at : stop - at] = data[lo - start : stop - start]
                lo = stop
        while at < self._end:
            size = min(self._piece, self._end - at)
            yield Piece(at, buffer[:size])
            at, number = at + size, number + 1
            if at < self._end:
                buffer = self._fresh(number)

    def _fresh(self, number: int) -> np.ndarray:
        if not self._buffers:
            return np.empty(0, np.uint8)
        buffer = self._buffers[number % len(self._buffers)]
        buffer[:] = 0
        return buffer
