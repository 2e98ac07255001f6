"""Which tensors of a source make up one expert, and their bytes for a few experts at a time.

An expert is either tensors of its own (``experts.17.w1.weight``) or a row of stacked ones (``[E,
...]``, in whatever orientation). For a few experts both are given as if there were no others:
numbers from 0, first dimensions as long as the choice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_stream.convert.arrays import FROM_FILE, from_bytes
from mlx_stream.errors import UnsupportedModelError
from mlx_stream.packed.layout import FileLayout, Part, Span
from mlx_stream.packed.pieces import PieceSource
from mlx_stream.storage.checkpoint import Checkpoint, TensorInfo
from mlx_stream.storage.record_layout import TENSOR_ALIGN, round_up

_NUMBERED = re.compile(r"(?P<head>(?:.*\.)?(?:experts|moe\.mlp)\.)(?P<expert>\d+)(?P<tail>\..+)")
_LAYER = re.compile(r"(?:^|\.)(\d+)\.")
_STACK = re.compile(r"(^|\.)(experts|switch_mlp|switch_glu)\.")


def layer_number(name: str) -> int:
    """The first number among a name's parts, which is the layer's in every family; -1 without."""
    found = _LAYER.search(name)
    return int(found[1]) if found else -1


def require_loadable(checkpoint: Checkpoint) -> None:
    """Raises UnsupportedModelError for a dtype that MLX cannot load."""
    for t in checkpoint.tensors.values():
        if t.dtype not in FROM_FILE:
            raise UnsupportedModelError(
                "a tensor has a dtype that MLX cannot load",
                file=checkpoint.files[t.file].path,
                tensor=t.name,
                expected=", ".join(FROM_FILE),
                actual=t.dtype,
                remedy="convert the checkpoint to bfloat16 first",
            )


@dataclass(frozen=True)
class Piecewise:
    """One tensor of a choice of experts: what it is called there, and the source of each row."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    rows: tuple[tuple[int, int], ...]  # (file, offset)
    row_nbytes: int

    @property
    def nbytes(self) -> int:
        return self.row_nbytes * len(self.rows)


class ExpertInputs:
    """The expert tensors of a source, by layer.

    Args:
        checkpoint: of dtypes that `require_loadable` lets pass.
        counts: by layer number, how many experts it has.
    """

    def __init__(self, checkpoint: Checkpoint, counts: Mapping[int, int]) -> None:
        self._checkpoint = checkpoint
        self._counts = counts
        self._numbered: dict[int, dict[tuple[str, str], dict[int, TensorInfo]]] = {}
        self._stacked: dict[int, list[TensorInfo]] = {}
        self._resident: list[TensorInfo] = []
        for t in checkpoint.tensors.values():
            self._sort(t)

    def _sort(self, t: TensorInfo) -> None:
        layer = layer_number(t.name)
        count = self._counts.get(layer)
        if m := _NUMBERED.fullmatch(t.name):
            kinds = self._numbered.setdefault(layer, {})
            kinds.setdefault((m["head"], m["tail"]), {})[int(m["expert"])] = t
        elif count and t.shape[:1] == (count,) and (len(t.shape) > 2 or _STACK.search(t.name)):
            self._stacked.setdefault(layer, []).append(t)
        else:
            self._resident.append(t)

    def stand_ins(self, experts: int) -> dict[str, mx.array]:
        """Zeros that are never evaluated, for every tensor, with so many experts in each layer."""
        found = {t.name: _zeros(t.name, t.dtype, t.shape)[1] for t in self._resident}
        for layer in self._numbered.keys() | self._stacked.keys():
            first = range(min(experts, self._counts.get(layer, experts)))
            found.update(_zeros(p.name, p.dtype, p.shape) for p in self.of(layer, first))
        return found

    def of(self, layer: int, experts: Sequence[int]) -> list[Piecewise]:
        """The tensors of some experts of a layer, renumbered from 0.

        Raises:
            UnsupportedModelError: one of them has no tensor where others have.
        """
        made = []
        for (head, tail), owned in self._numbered.get(layer, {}).items():
            for number, expert in enumerate(experts):
                t = owned.get(expert)
                if t is None:
                    self._fail_missing(f"{head}{expert}{tail}", next(iter(owned.values())))
                place = ((t.file, t.offset),)
                made.append(Piecewise(f"{head}{number}{tail}", t.dtype, t.shape, place, t.nbytes))
        for t in self._stacked.get(layer, []):
            each = t.nbytes // t.shape[0]
            rows = tuple((t.file, self._row(t, e, each)) for e in experts)
            shape = (len(experts), *t.shape[1:])
            made.append(Piecewise(t.name, t.dtype, shape, rows, each))
        return made

    def _row(self, t: TensorInfo, expert: int, each: int) -> int:
        if t.stride is None:
            return t.offset + expert * each
        record = next(
            r for r in self._checkpoint.records.values() if t.name.startswith(f"{r.layer}.")
        )
        return t.offset + record.position(expert) * t.stride

    def _fail_missing(self, name: str, sibling: TensorInfo) -> None:
        raise UnsupportedModelError(
            "an expert has not the tensors that the others have",
            file=self._checkpoint.files[sibling.file].path,
            tensor=name,
            expected=f"as {sibling.name}",
            actual="in no file of the checkpoint",
            remedy="finish the download: a shard is missing or from another version",
        )

    def nbytes(self, layer: int) -> int:
        """Bytes of one expert of the layer as they are in the source."""
        return sum(p.nbytes for p in self.of(layer, [0]))

    def read(
        self, layer: int, choices: Sequence[Sequence[int]], pieces: PieceSource
    ) -> Iterator[dict[str, mx.array]]:
        """The arrays of each choice of experts in turn; the next one's bytes are on their way."""
        wanted = [self.of(layer, experts) for experts in choices]
        ends, spans, at = [], [], 0
        for tensors in wanted:
            for p in tensors:
                for file, offset in p.rows:
                    if p.row_nbytes:
                        spans.append(Span(at, p.row_nbytes, 0, file, offset))
                    at += p.row_nbytes
                at = round_up(at, TENSOR_ALIGN)
            ends.append(at)
        layout = FileLayout(f"layer {layer}", b"", at, (Part("experts", 0, at),), tuple(spans))
        stream = _Stream(pieces, layout)
        begin = 0
        for tensors, end in zip(wanted, ends, strict=True):
            yield _arrays(tensors, stream.take(end - begin))
            begin = end


def _zeros(name: str, dtype: str, shape: tuple[int, ...]) -> tuple[str, mx.array]:
    return name, mx.zeros(shape, dtype=FROM_FILE[dtype])


def _arrays(tensors: Sequence[Piecewise], data: np.ndarray) -> dict[str, mx.array]:
    found, at = {}, 0
    for p in tensors:
        found[p.name] = from_bytes(data[at : at + p.nbytes], p.dtype, p.shape)
        at = round_up(at + p.nbytes, TENSOR_ALIGN)
    return found


class _Stream:
    """The bytes of a layout, taken in lengths that have nothing to do with its pieces."""

    def __init__(self, pieces: PieceSource, layout: FileLayout) -> None:
        self._pieces = pieces.assemble(layout)
        self._left = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> np.ndarray:
        data, filled = np.empty(nbytes, np.uint8), 0
        while filled < nbytes:
            if not len(self._left):
                self._left = next(self._pieces).data
            count = min(nbytes - filled, len(self._left))
            data[filled : filled + count] = self._left[:count]
            self._left = self._left[count:]
            filled += count
        return data
