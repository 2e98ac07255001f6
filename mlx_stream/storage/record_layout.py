"""Expert records of the packed layout: where a layer's tensors lie inside one expert's record.

Pure data, shared by the manifest (storage/packed_manifest.py), the index, read planning and the
packer. A record holds the tensors of one expert in a fixed order, with zeros between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

RECORD_ALIGN = 16384  # of a record in its file, and of its size: a page of every system
TENSOR_ALIGN = 64  # of a tensor in its record


@dataclass(frozen=True)
class RecordTensor:
    """One tensor of the source inside every record of a layer."""

    name: str  # of the stacked tensor in the source
    dtype: str
    shape: tuple[int, ...]  # of one expert
    offset: int  # in the record
    nbytes: int  # of one expert


@dataclass(frozen=True)
class RecordLayout:
    """The records of one expert layer.

    Attributes:
        layer: prefix of the layer's tensors.
        file: name of the file that holds the records, as one U8 tensor called `tensor`.
        nbytes: of one record, a multiple of RECORD_ALIGN.
        order: expert of each record, in file order; None is id order.
        digests: xxh3-64 of each expert's tensors in record order, by expert id.
    """

    layer: str
    kind: str
    file: str
    tensor: str
    num_experts: int
    nbytes: int
    tensors: tuple[RecordTensor, ...]
    order: tuple[int, ...] | None
    digests: tuple[int, ...]

    @cached_property
    def positions(self) -> tuple[int, ...] | None:
        """Record of each expert; None when they are in id order."""
        if self.order is None:
            return None
        places = [0] * self.num_experts
        for position, expert in enumerate(self.order):
            places[expert] = position
        return tuple(places)

    @cached_property
    def payload_nbytes(self) -> int:
        """Bytes of one expert's tensors, padding left out."""
        return sum(t.nbytes for t in self.tensors)

    @cached_property
    def inner_gap(self) -> int:
        """Most bytes of padding between two tensors of a record."""
        ends = [(t.offset, t.offset + t.nbytes) for t in self.tensors]
        return max((b[0] - a[1] for a, b in pairwise(ends)), default=0)

    def position(self, expert: int) -> int:
        """Number of the expert's record in the file."""
        return expert if self.positions is None else self.positions[expert]

    def expert_at(self, position: int) -> int:
        """The expert whose record has this number."""
        return position if self.order is None else self.order[position]


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple that is at least `n`."""
    return -(-n // multiple) * multiple
