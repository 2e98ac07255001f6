"""Resident dense layers through numpy's BLAS instead of MLX's CPU matmul.

Owns the swap of nn.Linear and nn.QuantizedLinear in a model's tree. Float32 activations with a
few rows or more take the BLAS path; everything else calls the original layer. So do small products:
BLAS must wait for its input and wake the workers, while MLX adds a product to what it does anyway.
MLX is touched on the calling thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_stream.backends.cpu.arrays import as_numpy, empty_array, evaluated
from mlx_stream.backends.cpu.gemm import (
    W_BLOCK_ROWS,
    Arena,
    Projection,
    activation_operand,
    copy_transposed,
    even_blocks,
    padded,
    row_stride,
)
from mlx_stream.backends.cpu.operand import fill_activation
from mlx_stream.backends.cpu.pool import WorkerPool
from mlx_stream.storage.quant_spec import QuantSpec

MIN_ROWS = 2  # a single row of a quantized layer is as fast in MLX
DIRECT_ROWS = 256  # from here x @ w.T on the rows as they lie beats the transposed form
LAZY_PRODUCTS = 1 << 17  # multiplications of float32 that MLX does in half the time of a BLAS call

_DTYPE_NAMES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.uint8: "U8",
}


class BlasLinear(nn.Module):
    """A linear layer that keeps the original as its child `inner` and multiplies through BLAS.

    Attributes of the original (weight, bits, ...) are readable on the wrapper.
    """

    def __init__(self, inner: nn.Module, pool: WorkerPool, min_rows: int | None = None) -> None:
        super().__init__()
        if min_rows is None:
            min_rows = MIN_ROWS if isinstance(inner, nn.QuantizedLinear) else 1
        self.inner = inner
        self._pool = pool
        self._min_rows = min_rows
        plain = not isinstance(inner, nn.QuantizedLinear) and inner.weight.dtype == mx.float32
        self._lazy_rows = LAZY_PRODUCTS // max(1, inner.weight.size) if plain else 0
        self._bound: _Bound | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "inner":
                raise
            return getattr(self.inner, name)

    def __call__(self, x: mx.array) -> mx.array:
        """x: [..., K] -> [..., N]."""
        rows = x.size // max(1, x.shape[-1])
        lazy = rows < self._min_rows or rows <= self._lazy_rows
        if lazy or x.dtype != mx.float32 or not evaluated(x):
            return self.inner(x)
        bound = self._weights()
        projection = bound.projection
        x_rows = as_numpy(x).reshape(rows, projection.input_dims)
        y, y_view = empty_array((*x.shape[:-1], projection.output_dims))
        y_rows = y_view.reshape(rows, projection.output_dims)
        run = _apply_direct if rows >= DIRECT_ROWS else _apply_transposed
        run(bound, x_rows, y_rows, self._pool)
        return y

    def _weights(self) -> _Bound:
        """The layer's description and views, rebuilt when a parameter was replaced."""
        source = {name: value for name, value in self.inner.items() if isinstance(value, mx.array)}
        if self._bound is None or not self._bound.views(source):
            self._bound = _Bound(self.inner, source)
        return self._bound


class _Bound:
    """A layer as numpy sees it: zero-copy views of the arrays in `source`."""

    def __init__(self, layer: nn.Module, source: dict[str, mx.array]) -> None:
        self.source = source
        self.projection = _describe(layer)
        self.weights = {name: as_numpy(value) for name, value in source.items()}
        self.dtypes = {name: _DTYPE_NAMES[value.dtype] for name, value in source.items()}

    def views(self, source: dict[str, mx.array]) -> bool:
        """Whether these views still show exactly these arrays."""
        return source.keys() == self.source.keys() and all(
            source[name] is self.source[name] for name in source
        )


def _describe(layer: nn.Module) -> Projection:
    outputs, words = layer["weight"].shape
    if isinstance(layer, nn.QuantizedLinear):
        spec = QuantSpec(layer.mode, layer.bits, layer.group_size)
        return Projection("dense", spec, words * 32 // layer.bits, outputs)
    return Projection("dense", QuantSpec("none", 8 * layer["weight"].itemsize, 0), words, outputs)


def _apply_direct(bound: _Bound, x: np.ndarray, y: np.ndarray, pool: WorkerPool) -> None:
    """y [T, N] = x [T, K] @ w.T, every worker a block of output columns."""
    projection = bound.projection

    def run(rows: slice) -> None:
        arena = Arena(pool.scratch(projection.scratch_nbytes))
        projection.apply_to_rows(bound.weights, bound.dtypes, x, rows, y[:, rows], arena)

    pool.map_ordered(run, even_blocks(projection.output_dims, W_BLOCK_ROWS, pool.threads))


def _apply_transposed(bound: _Bound, x: np.ndarray, y: np.ndarray, pool: WorkerPool) -> None:
    """The same through yT = w @ xT: faster for few rows, at the price of two transposes."""
    count, projection = len(x), bound.projection
    operand = activation_operand(projection.layout, count, lambda s: np.empty(s, np.float32))
    fill_activation(projection.layout, x.T, operand)
    out_nbytes = 4 * W_BLOCK_ROWS * row_stride(count)

    def run(rows: slice) -> None:
        memory = pool.scratch(out_nbytes + projection.scratch_nbytes)
        out = padded(rows.stop - rows.start, count, Arena(memory[:out_nbytes]).float32)
        arena = Arena(memory[out_nbytes:])
        projection.apply(bound.weights, bound.dtypes, operand, rows, out, arena)
        copy_transposed(out, y[:, rows])

    pool.map_ordered(run, even_blocks(projection.output_dims, W_BLOCK_ROWS, pool.threads))


def install_dense(
    model: nn.Module, pool: WorkerPool, *, skip: Callable[[str, nn.Module], bool]
) -> Callable[[], None]:
    """Swap every nn.Linear and nn.QuantizedLinear (exact types) for a BlasLinear.

    skip(path, layer) keeps a layer as it is. Returns a function that puts the originals back.
    """
    swapped: list[tuple[Any, Any, nn.Module]] = []
    wrappers: dict[int, BlasLinear] = {}  # a layer shared by two parents stays shared
    for container, key, path, layer in list(_linear_slots(model, "", set())):
        if not skip(path, layer):
            if id(layer) not in wrappers:
                wrappers[id(layer)] = BlasLinear(layer, pool)
            container[key] = wrappers[id(layer)]
            swapped.append((container, key, layer))

    def uninstall() -> None:
        while swapped:
            container, key, layer = swapped.pop()
            container[key] = layer

    return uninstall


def _linear_slots(
    container: Any, prefix: str, seen: set[int]
) -> Iterator[tuple[Any, Any, str, nn.Module]]:
    """(container, key, path, layer) of every linear layer under a module, dict or list."""
    if id(container) in seen:
        return
    seen.add(id(container))
    pairs = container.items() if isinstance(container, dict) else enumerate(container)
    for key, value in pairs:
        path = f"{prefix}{key}"
        if type(value) in (nn.Linear, nn.QuantizedLinear):
            if not isinstance(container, tuple):
                yield container, key, path, value
        elif isinstance(value, dict | list | tuple) and not isinstance(value, BlasLinear):
            yield from _linear_slots(value, f"{path}.", seen)
