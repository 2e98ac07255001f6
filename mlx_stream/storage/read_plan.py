"""Which bytes to read for a group of experts, and where in a slot each tensor then lies.

Pure planning: no file is opened, nothing is allocated. `reader.py` executes the ops and the
backends publish the planes. Two layouts, chosen by `align`:

- align == 1 (buffered, F_NOCACHE): every tensor's plane is contiguous `[G, ...]` in the slot;
  bytes adjacent in the file but not in the slot are scattered by one op with several parts.
- align > 1 (O_DIRECT): the slot holds aligned images of file regions, so a plane's experts keep
  the distances they have in the file and its offsets keep their remainder modulo `align`.

In a packed layer an expert is one record and one read; the padding in and between the records that
one read spans is read with them, and ops are cut between records where one fits.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from mlx_stream.storage.expert_index import ExpertIndex, ExpertLayer, ExpertTensor, Key
from mlx_stream.storage.record_check import RecordCheck, record_checks
from mlx_stream.storage.record_layout import RECORD_ALIGN

MAX_OP_NBYTES = 8 << 20
PLANE_ALIGN = 64  # a cache line, and enough for any vector load
IOV_MAX = 1024  # parts the kernel takes in one preadv; the same on Linux and macOS


@dataclass(frozen=True)
class ReadOp:
    """One preadv: bytes from `offset` on, scattered over `parts` in that order."""

    file: int  # index into Checkpoint.files
    offset: int  # in the file, a multiple of align
    parts: tuple[tuple[int, int], ...]  # (slot offset, nbytes)

    @cached_property
    def nbytes(self) -> int:
        """Sum over parts. With align > 1 the last op of a file may reach past its end."""
        return sum(n for _, n in self.parts)


@dataclass(frozen=True)
class Plane:
    """One tensor kind of the group inside the slot."""

    key: Key
    dtype: str
    shape: tuple[int, ...]  # of one expert
    nbytes: int  # of one expert
    offsets: tuple[int, ...]  # slot offset of each expert, in the order of GroupRead.experts

    @cached_property
    def contiguous(self) -> bool:
        """True if the experts follow each other without a gap: a `[G, ...]` array as it is."""
        first = self.offsets[0]
        return all(o == first + i * self.nbytes for i, o in enumerate(self.offsets))


@dataclass(frozen=True)
class GroupRead:
    """Everything needed to read some experts of one layer into a slot of `slot_nbytes`."""

    layer: int  # ExpertLayer.index
    experts: tuple[int, ...]
    planes: tuple[Plane, ...]
    ops: tuple[ReadOp, ...]  # in file order
    slot_nbytes: int  # a multiple of align and of PLANE_ALIGN
    payload_nbytes: int  # bytes of the experts' tensors
    read_nbytes: int  # bytes the reader will count: payload, alignment, nothing past a file's end
    checks: tuple[RecordCheck, ...] = ()  # of a packed layer: what each expert must hash to


@dataclass(frozen=True)
class _Span:
    """A range of a file and its place in the slot."""

    file: int
    offset: int
    nbytes: int
    slot: int = 0

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


def plan_group(
    layer: ExpertLayer,
    experts: Sequence[int],
    *,
    align: int,
    max_op_nbytes: int = MAX_OP_NBYTES,
    file_sizes: Sequence[int],
) -> GroupRead:
    """Plan the read of `experts` (ascending, distinct) of `layer`.

    Args:
        align: Reader.align; 1 or a power of two.
        max_op_nbytes: upper bound for one op, rounded down to a multiple of align.
        file_sizes: bytes of each checkpoint file, by file index.

    Raises ValueError for arguments that are no plan: these are the caller's bugs.
    """
    ids = _check_experts(layer, experts)
    if align < 1 or align & (align - 1) or max_op_nbytes < align:
        raise ValueError(f"align {align} and max_op_nbytes {max_op_nbytes} do not fit")
    if align == 1:
        planes, spans, slot_nbytes = _planar(layer, ids)
    else:
        planes, spans, slot_nbytes = _images(layer, ids, align)
    limit = max_op_nbytes // align * align
    if layer.record is not None and layer.record.nbytes <= limit:
        limit = limit // layer.record.nbytes * layer.record.nbytes
    ops = tuple(op for run in _adjacent(spans) for op in _cut(run, limit))
    return GroupRead(
        layer=layer.index,
        experts=ids,
        planes=planes,
        ops=ops,
        slot_nbytes=slot_nbytes,
        payload_nbytes=len(ids) * layer.expert_nbytes,
        read_nbytes=sum(_nbytes_inside(op, file_sizes[op.file]) for op in ops),
        checks=record_checks(layer, ids, planes),
    )


def slot_capacity(index: ExpertIndex, group_size: int, align: int) -> int:
    """A slot size that holds any `group_size` experts of any layer, consecutive or scattered.

    An upper bound in closed form: at most two blocks of padding for each expert's each tensor.
    """
    if group_size < 1:
        raise ValueError(f"group_size must be positive, not {group_size}")
    return max(layer_slot_capacity(layer, group_size, align) for layer in index.layers)


def layer_slot_capacity(layer: ExpertLayer, group_size: int, align: int) -> int:
    """The same for one layer."""
    group = min(group_size, layer.num_experts)
    if align == 1:  # the place in the file does not matter
        return _planar_size(layer, group)
    if layer.record is not None:
        return group * _round_up(layer.record.nbytes, align)
    return group * sum(_round_up(t.nbytes, align) + align for t in layer.tensors)


def _check_experts(layer: ExpertLayer, experts: Sequence[int]) -> tuple[int, ...]:
    ids = tuple(int(e) for e in experts)
    if not ids or any(a >= b for a, b in pairwise(ids)):
        raise ValueError(f"experts must be ascending and distinct, not {ids}")
    if ids[0] < 0 or ids[-1] >= layer.num_experts:
        raise ValueError(f"experts {ids} are not all in 0..{layer.num_experts - 1}")
    return ids


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


# --- align == 1: planes first, spans follow -------------------------------------------------


def _planar(layer: ExpertLayer, ids: tuple[int, ...]) -> tuple[tuple[Plane, ...], list[_Span], int]:
    planes, spans, slot = [], [], 0
    for t in layer.tensors:
        offsets = tuple(slot + i * t.nbytes for i in range(len(ids)))
        planes.append(Plane(t.key, t.dtype, t.shape, t.nbytes, offsets))
        spans += (_Span(t.file, start, n, offsets[i]) for i, start, n in _ranges(layer, t, ids))
        slot = _round_up(slot + len(ids) * t.nbytes, PLANE_ALIGN)
    spans.sort(key=lambda s: (s.file, s.offset))
    if layer.record is None:
        return tuple(planes), spans, slot
    return tuple(planes), list(_bridged(spans, slot)), _planar_size(layer, len(ids))


def _planar_size(layer: ExpertLayer, group: int) -> int:
    return planes_nbytes(layer, group) + scrap_nbytes(layer, group)


def planes_nbytes(layer: ExpertLayer, group: int) -> int:
    """Bytes of the planes of `group` experts in a planar slot."""
    return sum(_round_up(group * t.nbytes, PLANE_ALIGN) for t in layer.tensors)


def scrap_nbytes(layer: ExpertLayer, group: int) -> int:
    """Bytes after the planes that take a packed layer's padding."""
    if layer.record is None:
        return 0
    most = RECORD_ALIGN if group > 1 else min(layer.record.inner_gap, RECORD_ALIGN)
    return _round_up(most, PLANE_ALIGN)


def _bridged(spans: Iterable[_Span], scrap: int) -> Iterator[_Span]:
    """With the padding between them, which goes to `scrap`, so that one op can span it."""
    last: _Span | None = None
    for s in spans:
        if last is not None and last.file == s.file and 0 < s.offset - last.end < RECORD_ALIGN:
            yield _Span(s.file, last.end, s.offset - last.end, scrap)
        yield s
        last = s


# --- align > 1: regions of the files first, planes are found in them -------------------------


def _images(
    layer: ExpertLayer, ids: tuple[int, ...], align: int
) -> tuple[tuple[Plane, ...], list[_Span], int]:
    regions = _regions(layer, ids, align)
    spans, slot = [], 0
    for r in regions:
        spans.append(_Span(r.file, r.offset, r.nbytes, slot))
        slot += r.nbytes
    planes = tuple(
        Plane(t.key, t.dtype, t.shape, t.nbytes, tuple(_places(layer, t, ids, spans)))
        for t in layer.tensors
    )
    return planes, spans, _round_up(slot, max(align, PLANE_ALIGN))


def _regions(layer: ExpertLayer, ids: tuple[int, ...], align: int) -> list[_Span]:
    """Aligned, disjoint, non-adjacent ranges that cover the experts, in file order."""
    merged: list[_Span] = []
    bridge = 0 if layer.record is None else RECORD_ALIGN - 1  # never a whole record
    ranges = sorted(
        (t.file, start, n) for t in layer.tensors for _, start, n in _ranges(layer, t, ids)
    )
    for file, start, nbytes in ranges:
        begin, end = start // align * align, _round_up(start + nbytes, align)
        last = merged[-1] if merged else None
        if last is not None and last.file == file and begin <= last.end + bridge:
            merged[-1] = _Span(file, last.offset, max(end, last.end) - last.offset)
        else:
            merged.append(_Span(file, begin, end - begin))
    return merged


def _ranges(
    layer: ExpertLayer, t: ExpertTensor, ids: tuple[int, ...]
) -> Iterator[tuple[int, int, int]]:
    """(place in ids, file offset, nbytes) of each gapless range of the experts of `t`."""
    first = 0
    for i in range(1, len(ids) + 1):
        gapless = layer.record is None and t.stride == t.nbytes
        if gapless and i < len(ids) and ids[i] == ids[i - 1] + 1:
            continue
        yield first, t.offset + layer.position(ids[first]) * t.stride, (i - first) * t.nbytes
        first = i


def _places(
    layer: ExpertLayer, t: ExpertTensor, ids: tuple[int, ...], regions: Sequence[_Span]
) -> Iterator[int]:
    """Slot offset of each expert of `t`."""
    begins = [(r.file, r.offset) for r in regions]
    for e in ids:
        start = t.offset + layer.position(e) * t.stride
        region = regions[bisect_right(begins, (t.file, start)) - 1]
        yield region.slot + start - region.offset


# --- spans -> ops ---------------------------------------------------------------------------


def _adjacent(spans: Iterable[_Span]) -> Iterator[list[_Span]]:
    """Split spans (in file order) into runs without a gap in the file."""
    run: list[_Span] = []
    for s in spans:
        if run and (run[-1].file, run[-1].end) != (s.file, s.offset):
            yield run
            run = []
        run.append(s)
    if run:
        yield run


def _cut(run: Sequence[_Span], limit: int) -> Iterator[ReadOp]:
    """Cut one gapless run into ops of at most `limit` bytes and IOV_MAX parts."""
    parts: list[tuple[int, int]] = []
    start, size = run[0].offset, 0
    for s in run:
        slot, left = s.slot, s.nbytes
        while left:
            if size == limit or len(parts) == IOV_MAX:
                yield ReadOp(s.file, start, tuple(parts))
                start, size, parts = start + size, 0, []
            take = min(left, limit - size)
            if parts and sum(parts[-1]) == slot:
                parts[-1] = (parts[-1][0], parts[-1][1] + take)
            else:
                parts.append((slot, take))
            slot, left, size = slot + take, left - take, size + take
    yield ReadOp(run[0].file, start, tuple(parts))


def _nbytes_inside(op: ReadOp, file_size: int) -> int:
    inside = min(op.nbytes, file_size - op.offset)
    if inside <= 0:
        raise ValueError(f"op at {op.offset} lies past the end of file {op.file} ({file_size})")
    return inside
