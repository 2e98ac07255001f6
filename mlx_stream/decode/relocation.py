"""A planar one-expert read, sent to planes that lie elsewhere. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mlx_stream.storage.read_plan import GroupRead, ReadOp
from mlx_stream.storage.record_check import RecordCheck


def relocate(
    read: GroupRead, places: dict[tuple[str, str], int], scrap: int = 0
) -> tuple[tuple[ReadOp, ...], tuple[RecordCheck, ...]]:
    """The ops and checks of `read` with every tensor at its place in `places`.

    Args:
        scrap: where the padding of a packed record goes.
    """
    spans = sorted((p.offsets[0], p.nbytes, places[p.key]) for p in read.planes)
    end = max(start + nbytes for start, nbytes, _ in spans)
    spans.append((end, read.slot_nbytes - end, scrap))
    ops = tuple(replace(op, parts=tuple(_moved(op.parts, spans))) for op in read.ops)
    checks = tuple(replace(c, parts=tuple(_moved(c.parts, spans))) for c in read.checks)
    return ops, checks


def _moved(
    parts: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int, int]]
) -> list[tuple[int, int]]:
    """Parts cut where planes end, each at its plane's new place."""
    moved = []
    for slot, nbytes in parts:
        while nbytes:
            start, size, place = next(s for s in spans if s[0] <= slot < s[0] + s[1])
            take = min(nbytes, start + size - slot)
            moved.append((place + slot - start, take))
            slot, nbytes = slot + take, nbytes - take
    return moved
