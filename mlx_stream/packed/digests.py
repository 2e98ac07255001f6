"""Checksums of a file's parts, computed from its pieces as they pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import xxhash

from mlx_stream.packed.layout import FileLayout
from mlx_stream.packed.pieces import Piece


class Digester:
    """Follows the pieces of one file from its start to its end.

    Attributes:
        digests: of every part, when all pieces were added.
        dirty: parts whose padding is not zero.
    """

    def __init__(self, layout: FileLayout, *, check_padding: bool = False) -> None:
        self._layout = layout
        self._padding = check_padding
        self._span = 0  # the first that may have bytes to come
        self._state = xxhash.xxh3_64()
        self._part = 0
        self.digests: list[int] = []
        self.dirty: set[int] = set()

    def add(self, piece: Piece) -> None:
        """The next piece; pieces follow each other without a gap."""
        spans, begin, end = self._layout.spans, piece.at, piece.at + len(piece.data)
        covered = begin
        while self._span < len(spans) and spans[self._span].at < end:
            s = spans[self._span]
            self._advance(s.part)
            lo, hi = max(s.at, begin), min(s.at + s.nbytes, end)
            if self._padding and lo > covered:
                self._look(piece, covered, lo)
            self._state.update(piece.data[lo - begin : hi - begin])
            covered = hi
            if s.at + s.nbytes > end:
                break
            self._span += 1
        if self._padding and covered < end:
            self._look(piece, covered, end)

    def finish(self) -> list[int]:
        """The digests of all parts."""
        self._advance(len(self._layout.parts))
        return self.digests

    def _advance(self, part: int) -> None:
        while self._part < part:
            self.digests.append(self._state.intdigest())
            self._state.reset()
            self._part += 1

    def _look(self, piece: Piece, begin: int, end: int) -> None:
        """Padding [begin, end) must be zero; it may span several parts' ends."""
        if not piece.data[begin - piece.at : end - piece.at].any():
            return
        for number, part in enumerate(self._layout.parts):
            lo, hi = max(begin, part.begin), min(end, part.end)
            if lo < hi and piece.data[lo - piece.at : hi - piece.at].any():
                self.dirty.add(number)


def digest_pieces(
    layout: FileLayout, pieces: Iterable[Piece], *, check_padding: bool = False
) -> Digester:
    """All pieces of a file through one digester."""
    digester = Digester(layout, check_padding=check_padding)
    for piece in pieces:
        digester.add(piece)
    digester.finish()
    return digester


def digest_bytes(data: bytes | np.ndarray) -> int:
    """xxh3-64."""
    return xxhash.xxh3_64_intdigest(data)


def differing(found: Sequence[int], expected: Sequence[int], dirty: Iterable[int]) -> list[int]:
    """Numbers of the parts that are not as they must be."""
    wrong = {n for n, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b}
    return sorted(wrong | set(dirty))
