"""A file in pieces of bounded size, assembled from the source or read as it is, a few ahead.

Memory does not depend on the size of file, layer or expert.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mlx_stream.packed.layout import LITERAL, FileLayout, Span
from mlx_stream.storage.read_plan import MAX_OP_NBYTES, ReadOp
from mlx_stream.storage.reader import Reader, Ticket
from mlx_stream.storage.record_layout import RECORD_ALIGN, round_up
from mlx_stream.storage.slot_memory import allocate_slot

PIECE_NBYTES = 16 << 20
AHEAD = 2  # pieces whose reads are in flight
COPY_NBYTES = 4096  # largest alignment of direct reads


@dataclass(frozen=True)
class Piece:
    """Bytes [at, at + len(data)) of a file; `data` is valid until the piece after the next."""

    at: int
    data: np.ndarray


class PieceSource:
    """Pieces of packed files, read through one reader.

    Args:
        reader: of the source, or of the packed files themselves.
        piece_nbytes: a multiple of RECORD_ALIGN.
    """

    def __init__(self, reader: Reader, *, piece_nbytes: int = PIECE_NBYTES) -> None:
        assert piece_nbytes % RECORD_ALIGN == 0
        self._reader = reader
        self._piece = piece_nbytes
        # The piece in the caller's hands, the one being written, and those being read.
        self._outputs = [allocate_slot(piece_nbytes) for _ in range(AHEAD + 2)]
        self._slots: deque[np.ndarray] = deque()

    def assemble(
        self, layout: FileLayout, ranges: Sequence[tuple[int, int]] | None = None
    ) -> Iterator[Piece]:
        """The file as it must be, or some ranges of it, made from the source's bytes."""
        header = np.frombuffer(layout.header, np.uint8)
        begins = [s.at for s in layout.spans]
        pieces = self._cut(ranges or [(0, layout.nbytes)])

        def start(at: int, size: int, output: np.ndarray) -> _Pending:
            first = max(0, bisect_left(begins, at + 1) - 1)
            spans = layout.spans[first : bisect_left(begins, at + size)]
            output[:size] = 0
            return self._gather(list(_inside(spans, at, at + size)), header, output)

        yield from self._run(pieces, start)

    def read(self, file: int, nbytes: int) -> Iterator[Piece]:
        """A file of the reader's as it is."""
        align = self._reader.align

        def start(at: int, size: int, output: np.ndarray) -> _Pending:
            ops = _ops(file, at, round_up(size, align), 0, align)
            return _Pending(self._reader.submit(ops, output), None, ())

        yield from self._run(self._cut([(0, nbytes)]), start)

    def _cut(self, ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        for begin, end in ranges:
            for at in range(begin, end, self._piece):
                yield at, min(self._piece, end - at)

    def _run(self, pieces: Iterator[tuple[int, int]], start: _Start) -> Iterator[Piece]:
        queue: deque[tuple[int, int, np.ndarray, _Pending]] = deque()
        number = 0
        try:
            while True:
                while len(queue) < AHEAD and (following := next(pieces, None)):
                    output = self._outputs[number % len(self._outputs)]
                    queue.append((*following, output, start(*following, output)))
                    number += 1
                if not queue:
                    return
                at, size, output, pending = queue.popleft()
                try:
                    pending.ticket.wait()
                    pending.copy(output)
                finally:
                    self._release(pending)
                yield Piece(at, output[:size])
        finally:
            for *_, pending in queue:
                pending.ticket.cancel()
            for *_, pending in queue:
                _quiet(pending.ticket)
                self._release(pending)

    def _gather(self, spans: list[Span], header: np.ndarray, output: np.ndarray) -> _Pending:
        """Start to read spans, whose `at` counts from the start of `output`."""
        for s in spans:
            if s.file == LITERAL:
                output[s.at : s.at + s.nbytes] = header[s.offset : s.offset + s.nbytes]
        wanted = sorted((s.file, s.offset, s.nbytes, s.at) for s in spans if s.file != LITERAL)
        align = self._reader.align
        if align == 1:
            ops = [op for f, o, n, at in wanted for op in _ops(f, o, n, at, 1)]
            return _Pending(self._reader.submit(ops, output), None, ())
        regions, copies, slot = _regions(wanted, align)
        memory = self._slot(slot)
        ops = [op for f, o, n, at in regions for op in _ops(f, o, n, at, align)]
        return _Pending(self._reader.submit(ops, memory), memory, copies)

    def _slot(self, nbytes: int) -> np.ndarray:
        fitting = self._slots.popleft() if self._slots else None
        if fitting is None or fitting.nbytes < nbytes:
            fitting = allocate_slot(max(nbytes, self._piece + 64 * COPY_NBYTES))
        return fitting

    def _release(self, pending: _Pending) -> None:
        if pending.slot is not None:
            self._slots.append(pending.slot)


@dataclass(frozen=True)
class _Pending:
    """A piece whose bytes are coming: into `slot`, from where `copies` go to the output."""

    ticket: Ticket
    slot: np.ndarray | None
    copies: Sequence[tuple[int, int, int]]  # (slot offset, output offset, nbytes)

    def copy(self, output: np.ndarray) -> None:
        """Once the ticket is done."""
        for source, at, nbytes in self.copies:
            output[at : at + nbytes] = self.slot[source : source + nbytes]  # type: ignore[index]


class _Start(Protocol):
    """What begins a piece."""

    def __call__(self, at: int, size: int, output: np.ndarray) -> _Pending: ...


def _quiet(ticket: Ticket) -> None:
    try:
        ticket.wait()
    except Exception:  # whoever asked has an error of its own already
        return


def _inside(spans: Sequence[Span], begin: int, end: int) -> Iterator[Span]:
    """The spans' parts in [begin, end), counted from `begin`."""
    for s in spans:
        lo, hi = max(s.at, begin), min(s.at + s.nbytes, end)
        if lo < hi:
            yield Span(lo - begin, hi - lo, s.part, s.file, s.offset + lo - s.at)


def _regions(
    wanted: Sequence[tuple[int, int, int, int]], align: int
) -> tuple[list[tuple[int, int, int, int]], list[tuple[int, int, int]], int]:
    """Aligned ``(file, offset, nbytes, slot)`` that cover ``(file, offset, nbytes, at)``."""
    regions: list[tuple[int, int, int, int]] = []
    copies: list[tuple[int, int, int]] = []
    slot = 0
    for file, offset, nbytes, at in wanted:
        begin, end = offset // align * align, round_up(offset + nbytes, align)
        if regions and regions[-1][0] == file and begin <= sum(regions[-1][1:3]):
            _, start, size, place = regions[-1]
            slot += max(0, end - start - size)
            regions[-1] = (file, start, max(size, end - start), place)
        else:
            regions.append((file, begin, end - begin, slot))
            slot += end - begin
        _, start, _, place = regions[-1]
        copies.append((place + offset - start, at, nbytes))
    return regions, copies, slot


def _ops(file: int, offset: int, nbytes: int, slot: int, align: int) -> list[ReadOp]:
    step = MAX_OP_NBYTES // align * align
    return [
        ReadOp(file, offset + at, ((slot + at, min(step, nbytes - at)),))
        for at in range(0, nbytes, step)
    ]
