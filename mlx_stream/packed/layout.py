"""What the files of a packed folder look like, byte by byte, and where in the source each byte is.

Pure. Two kinds of files: expert files with one record for each expert, and resident files with all
other tensors of a shard, under the shard's own name. A file is a header, then parts; a part is what
one checksum covers: its spans, and zeros between them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from mlx_stream.storage.checkpoint import Checkpoint, TensorInfo
from mlx_stream.storage.expert_index import ExpertIndex, ExpertLayer
from mlx_stream.storage.record_layout import (
    RECORD_ALIGN,
    TENSOR_ALIGN,
    RecordLayout,
    RecordTensor,
    round_up,
)
from mlx_stream.storage.safetensors_header import LENGTH_NBYTES

SHARD_NBYTES = 2 << 30  # of an expert file, unless one layer is larger
RESIDENT_HEADER_ALIGN = 64
NOWHERE = -1  # source of spans that are checked only
LITERAL = -2  # source of the header's span
Where = Callable[[str, int], tuple[int, int]]  # (tensor, expert) -> (source file, offset)


class Span(NamedTuple):
    """Bytes of a file that are one range of the source."""

    at: int  # in the file
    nbytes: int
    part: int  # number of the part
    file: int  # of the source
    offset: int  # in the source file


class Part(NamedTuple):
    """What one checksum covers: the spans in [begin, end)."""

    label: str
    begin: int
    end: int


@dataclass(frozen=True)
class FileLayout:
    """One file. Part 0 is the header; spans ascend; bytes outside of them are zeros."""

    name: str
    header: bytes
    nbytes: int
    parts: tuple[Part, ...]
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class PackPlan:
    """All safetensors of a packed folder; `records` have no checksums yet."""

    records: tuple[RecordLayout, ...]
    experts: tuple[FileLayout, ...]
    resident: tuple[FileLayout, ...]

    @property
    def files(self) -> tuple[FileLayout, ...]:
        """Experts first: they are most of the work."""
        return self.experts + self.resident

    @property
    def nbytes(self) -> int:
        """Of all files."""
        return sum(f.nbytes for f in self.files)


def plan_pack(
    index: ExpertIndex,
    orders: Mapping[str, Sequence[int]],
    *,
    shard_nbytes: int = SHARD_NBYTES,
) -> PackPlan:
    """The files of a packed folder.

    Args:
        orders: by layer name, its experts in file order; layers that are not named keep id order.
        shard_nbytes: most bytes of an expert file that holds more than one layer.
    """
    shards: list[list[ExpertLayer]] = []
    room = 0
    for layer in index.layers:
        nbytes = layer.num_experts * _record_tensors(index.checkpoint, layer)[1]
        if not shards or nbytes > room:
            shards.append([])
            room = shard_nbytes
        shards[-1].append(layer)
        room -= nbytes
    where = source_places(index)
    records: list[RecordLayout] = []
    experts: list[FileLayout] = []
    for n, layers in enumerate(shards, start=1):
        name = f"experts-{n:05d}-of-{len(shards):05d}.safetensors"
        made = [record_layout(index.checkpoint, x, name, orders.get(x.name)) for x in layers]
        records += made
        experts.append(expert_file(name, made, where))
    return PackPlan(tuple(records), tuple(experts), tuple(resident_files(index)))


def record_layout(
    checkpoint: Checkpoint, layer: ExpertLayer, file: str, order: Sequence[int] | None
) -> RecordLayout:
    """The layer's records, without checksums. Raises ValueError for an order that is none."""
    tensors, nbytes = _record_tensors(checkpoint, layer)
    ids = tuple(range(layer.num_experts))
    chosen = None if order is None or tuple(order) == ids else tuple(int(e) for e in order)
    if chosen is not None and tuple(sorted(chosen)) != ids:
        raise ValueError(f"{layer.name}: not an order of {layer.num_experts} experts")
    return RecordLayout(
        layer.name,
        layer.kind,
        file,
        f"{layer.name}.records",
        layer.num_experts,
        nbytes,
        tensors,
        chosen,
        (),
    )


def _record_tensors(
    checkpoint: Checkpoint, layer: ExpertLayer
) -> tuple[tuple[RecordTensor, ...], int]:
    """Tensors of a record by projection, and the record's size. A fused tensor is one tensor."""
    made: list[RecordTensor] = []
    end = 0
    for name in dict.fromkeys(t.name for t in layer.tensors):
        t = checkpoint.tensors[name]
        offset, nbytes = round_up(end, TENSOR_ALIGN), t.nbytes // layer.num_experts
        made.append(RecordTensor(name, t.dtype, t.shape[1:], offset, nbytes))
        end = offset + nbytes
    return tuple(made), round_up(end, RECORD_ALIGN)


def source_places(index: ExpertIndex) -> Where:
    """Where an expert's tensor lies in the source; the source may be packed itself."""
    layers = {t.name: layer for layer in index.layers for t in layer.tensors}
    tensors = index.checkpoint.tensors

    def where(name: str, expert: int) -> tuple[int, int]:
        t, layer = tensors[name], layers[name]
        stride = t.nbytes // layer.num_experts if t.stride is None else t.stride
        return t.file, t.offset + layer.position(expert) * stride

    return where


def nowhere(name: str, expert: int) -> tuple[int, int]:
    """For layouts that are only checked."""
    return NOWHERE, 0


def expert_file(name: str, records: Sequence[RecordLayout], where: Where = nowhere) -> FileLayout:
    """The file of some layers' records."""
    header = build_header(
        [(r.tensor, "U8", (r.num_experts, r.nbytes), r.num_experts * r.nbytes) for r in records],
        {"format": "mlx_stream.packed"},
        RECORD_ALIGN,
    )
    parts, spans = _begin(header)
    at = len(header)
    for r in records:
        for position in range(r.num_experts):
            expert = r.expert_at(position)
            for t in r.tensors:
                spans.append(Span(at + t.offset, t.nbytes, len(parts), *where(t.name, expert)))
            parts.append(Part(f"{r.layer} expert {expert}", at, at + r.nbytes))
            at += r.nbytes
    return FileLayout(name, header, at, tuple(parts), tuple(spans))


def resident_files(index: ExpertIndex) -> list[FileLayout]:
    """What is left of each shard without its expert tensors; none for shards of experts only."""
    checkpoint, experts = index.checkpoint, index.tensor_names
    files = []
    for number, identity in enumerate(checkpoint.files):
        found = [t for t in checkpoint.tensors.values() if t.file == number]
        kept = sorted((t for t in found if t.name not in experts), key=lambda t: t.offset)
        if kept:
            files.append(resident_file(identity.path.name, kept))
    return files


def resident_file(name: str, tensors: Sequence[TensorInfo]) -> FileLayout:
    """A file of these tensors, one after the other."""
    header = build_header(
        [(t.name, t.dtype, t.shape, t.nbytes) for t in tensors],
        {"format": "mlx"},
        RESIDENT_HEADER_ALIGN,
    )
    parts, spans = _begin(header)
    at = len(header)
    for t in tensors:
        if t.nbytes:
            spans.append(Span(at, t.nbytes, len(parts), t.file, t.offset))
        parts.append(Part(t.name, at, at + t.nbytes))
        at += t.nbytes
    return FileLayout(name, header, at, tuple(parts), tuple(spans))


def _begin(header: bytes) -> tuple[list[Part], list[Span]]:
    size = len(header)
    return [Part("header", 0, size)], [Span(0, size, 0, LITERAL, 0)]


def build_header(
    tensors: Sequence[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str], align: int
) -> bytes:
    """A safetensors header of ``(name, dtype, shape, nbytes)``, spaces up to `align`."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name, dtype, shape, nbytes in tensors:
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    size = round_up(LENGTH_NBYTES + len(text), align) - LENGTH_NBYTES
    return size.to_bytes(LENGTH_NBYTES, "little") + text.ljust(size)
