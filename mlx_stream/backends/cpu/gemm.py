"""One projection through BLAS: a block of weights is dequantized, then multiplied, while in cache.

The choices here (block sizes, memory order by row count) were measured with OpenBLAS, AVX-512.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TypeVar

import numpy as np

from mlx_stream.backends.cpu.dequant import Spec, dequantize
from mlx_stream.backends.cpu.formats import to_float32
from mlx_stream.backends.cpu.operand import PADDING, Layout, fill_weight, layout_of

Value = TypeVar("Value")

# Output rows dequantized at a time; a multiple of every group size. More rows a block mean fewer
# numpy calls, so less waiting of two workers for the interpreter lock: at 32 rows an expert 384
# took 4.3 ms, 128 took 6.6 ms; beyond that the block leaves the cache.
W_BLOCK_ROWS = 384
# Activation rows multiplied at a time; weights are dequantized again for each block.
ROW_BLOCK = 512
# Below this many rows, products small enough for OpenBLAS's kernel that packs nothing are
# 2 to 3 times faster than its general one; that kernel takes at most 10^6 multiplications.
SMALL_ROWS = 32
SMALL_PRODUCT = 1_000_000


def blocks(total: int, size: int) -> list[slice]:
    """Slices of at most `size` that cover range(total)."""
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def even_blocks(total: int, size: int, parts: int) -> list[slice]:
    """As `blocks`, with a count that is a multiple of `parts` and sizes that differ little."""
    count = parts * -(-total // (parts * size))
    edges = [total * i // count // 8 * 8 for i in range(count)] + [total]
    return [slice(a, b) for a, b in pairwise(edges) if b > a]


class Arena:
    """Hands out pieces of one uint8 buffer, 64-byte aligned. The caller keeps the buffer."""

    def __init__(self, memory: np.ndarray) -> None:
        self._memory = memory
        self._used = 0

    def float32(self, shape: tuple[int, ...]) -> np.ndarray:
        """The next piece as float32; valid until :meth:`reset`."""
        nbytes = 4 * math.prod(shape)
        start, self._used = self._used, self._used + -(-nbytes // 64) * 64
        return self._memory[start : start + nbytes].view(np.float32).reshape(shape)

    def reset(self) -> None:
        """Start over: the pieces handed out before are no longer valid."""
        self._used = 0


def row_stride(rows: int) -> int:
    """Elements from one row of an [n, R] matrix to the next: padded against cache aliasing."""
    return rows + PADDING if rows >= 2 * SMALL_ROWS else rows


def padded(size: int, rows: int, allocate: Callable[[tuple[int, ...]], np.ndarray]) -> np.ndarray:
    """An [size, R] matrix with row_stride(R)."""
    return allocate((size, row_stride(rows)))[:, :rows]


def activation_operand(
    layout: Layout, rows: int, allocate: Callable[[tuple[int, ...]], np.ndarray]
) -> np.ndarray:
    """Memory of an x operand [columns, R], in the order the product wants for R rows."""
    if rows < SMALL_ROWS:
        return allocate((rows, layout.columns)).T
    return padded(layout.columns, rows, allocate)


def copy_transposed(source: np.ndarray, out: np.ndarray) -> None:
    """out [R, N] = source.T, source [N, R] with padded rows, a cache-sized part at a time."""
    for part in blocks(len(source), 256):
        np.copyto(out[:, part], source[part].T)


def by_projection(keyed: Mapping[tuple[str, str], Value]) -> dict[str, dict[str, Value]]:
    """{(projection, part): value} as {projection: {part: value}}."""
    nested: dict[str, dict[str, Value]] = {}
    for (name, part), value in keyed.items():
        nested.setdefault(name, {})[part] = value
    return nested


@dataclass(frozen=True)
class Projection:
    """One linear map of an expert: its tensors' name, packing and dimensions."""

    name: str
    spec: Spec
    input_dims: int  # K
    output_dims: int  # N

    @cached_property
    def layout(self) -> Layout:
        return layout_of(self.spec, self.input_dims)

    @property
    def scratch_nbytes(self) -> int:
        """Arena bytes `apply` needs."""
        rows = min(W_BLOCK_ROWS, self.output_dims)
        return 4 * (rows * self.layout.columns + self.layout.weight_scratch(rows)) + 128

    def apply(
        self,
        parts: Mapping[str, np.ndarray],
        dtypes: Mapping[str, str],
        x: np.ndarray,
        rows: slice,
        out: np.ndarray,
        arena: Arena,
    ) -> None:
        """out [n, R] = w[rows] @ x + bias[rows]. x: the operand [columns, R]; resets the arena."""
        if self._usable_as_is(parts["weight"]):
            w = parts["weight"][rows]
        else:
            count = rows.stop - rows.start
            arena.reset()
            w = arena.float32((count, self.layout.columns))
            scratch = arena.float32((self.layout.weight_scratch(count),))
            fill_weight(self.layout, parts, dtypes, self.spec, rows, w, scratch)
        multiply(w, x, out)
        if "bias" in parts:
            out += to_float32(parts["bias"][rows], dtypes["bias"])[:, None]

    def apply_to_rows(
        self,
        parts: Mapping[str, np.ndarray],
        dtypes: Mapping[str, str],
        x: np.ndarray,
        rows: slice,
        out: np.ndarray,
        arena: Arena,
    ) -> None:
        """out [T, n] = x [T, K] @ w[rows].T + bias[rows]: no operand needed, best for many rows."""
        if self._usable_as_is(parts["weight"]):
            w = parts["weight"][rows]
        else:
            arena.reset()
            w = arena.float32((rows.stop - rows.start, self.input_dims))
            dequantize(parts, dtypes, self.spec, w, rows)
        np.matmul(x, w.T, out=out)
        if "bias" in parts:
            out += to_float32(parts["bias"][rows], dtypes["bias"])

    def _usable_as_is(self, weight: np.ndarray) -> bool:
        flags = weight.flags
        return weight.dtype == np.float32 and flags.aligned and flags.c_contiguous


def multiply(w: np.ndarray, x: np.ndarray, out: np.ndarray) -> None:
    """out [n, R] = w [n, K] @ x [K, R], in pieces that suit BLAS when there are few rows."""
    columns, rows = x.shape
    if rows >= SMALL_ROWS:
        np.matmul(w, x, out=out)
        return
    step = max(8, SMALL_PRODUCT // (rows * columns) // 8 * 8)
    for piece in blocks(len(w), step):
        np.matmul(w[piece], x, out=out[piece])
