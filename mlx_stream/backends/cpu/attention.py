"""Prompt attention through BLAS: blocks of queries against blocks of keys, softmax on the way.

Owns the replacement of mx.fast.scaled_dot_product_attention while a context is open. No
[H, Tq, Tk] array exists: a worker holds one block of scores and folds it into running maxima,
sums and outputs. Inputs other than float32 prompts go to the original function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_stream.backends.cpu.arrays import as_numpy, empty_array, evaluated
from mlx_stream.backends.cpu.gemm import Arena, blocks
from mlx_stream.backends.cpu.override import override
from mlx_stream.backends.cpu.pool import WorkerPool

MIN_QUERIES = 16  # fewer: MLX's own path is as fast
SCORE_ROWS = 512  # rows of a block: queries times the heads that share their keys
KEY_BLOCK = 1024
MASKED = np.finfo(np.float32).min  # MLX's value: a row masked everywhere averages all values


@contextmanager
def attention_override(pool: WorkerPool) -> Iterator[None]:
    """Route float32 prompt attention through numpy while the context is open. Nests."""
    with override(mx.fast, "scaled_dot_product_attention", partial(_attention_with, pool)):
        yield


def _attention_with(pool: WorkerPool, original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def attention(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        *,
        scale: float,
        mask: Any = None,
        sinks: mx.array | None = None,
        **options: Any,
    ) -> mx.array:
        if options or not _supported(q, k, v, mask, sinks):
            return original(q, k, v, scale=scale, mask=mask, sinks=sinks, **options)
        return _attend(q, k, v, scale, mask, sinks, pool)

    return attention


def scratch_nbytes(key_dims: int, value_dims: int, threads: int) -> int:
    """Most bytes of scratch the workers hold during one attention call."""
    return threads * _task_nbytes(key_dims, value_dims)


def _task_nbytes(key_dims: int, value_dims: int) -> int:
    rows, keys = SCORE_ROWS, KEY_BLOCK
    floats = rows * (keys + key_dims + 2 * value_dims + 5) + key_dims * keys
    return 4 * floats + 64 * 16


def _supported(q: mx.array, k: mx.array, v: mx.array, mask: Any, sinks: mx.array | None) -> bool:
    arrays = (q, k, v) if sinks is None else (q, k, v, sinks)
    if any(array.dtype != mx.float32 for array in arrays):
        return False
    if q.ndim != 4 or q.shape[2] < MIN_QUERIES or q.shape[1] % k.shape[1]:
        return False
    if isinstance(mask, str):
        return mask == "causal" and q.shape[2] <= k.shape[2] and evaluated(q, k, v, sinks)
    if mask is not None and not isinstance(mask, mx.array):
        return False
    known = mask is None or mask.dtype in (mx.bool_, mx.float32)
    return known and evaluated(q, k, v, mask, sinks)


@dataclass(frozen=True)
class _Problem:
    """One call: float32 views, shapes in the names' comments."""

    q: np.ndarray  # [B, H, Tq, Dk]
    k: np.ndarray  # [B, Hkv, Tk, Dk]
    v: np.ndarray  # [B, Hkv, Tk, Dv]
    out: np.ndarray  # [B, H, Tq, Dv]
    scale: np.float32
    causal: bool
    mask: np.ndarray | None  # [B or 1, H or 1, Tq, Tk], bool or float32
    sinks: np.ndarray | None  # [H]

    @property
    def shared(self) -> int:
        """Query heads per key head."""
        return self.q.shape[1] // self.k.shape[1]


def _attend(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    mask: Any,
    sinks: mx.array | None,
    pool: WorkerPool,
) -> mx.array:
    batch, heads, queries, _ = q.shape
    # Laid out by token, so that the model's transpose back to [B, T, H * D] copies nothing.
    result, view = empty_array((batch, queries, heads, v.shape[-1]))
    array_mask = None
    if isinstance(mask, mx.array):
        array_mask = as_numpy(mask)
        array_mask = array_mask.reshape((1,) * (4 - array_mask.ndim) + array_mask.shape)
        shape = (*array_mask.shape[:2], queries, k.shape[2])
        array_mask = np.broadcast_to(array_mask, shape)
    problem = _Problem(
        q=as_numpy(q),
        k=as_numpy(k),
        v=as_numpy(v),
        out=view.transpose(0, 2, 1, 3),
        scale=np.float32(scale),
        causal=isinstance(mask, str),
        mask=array_mask,
        sinks=None if sinks is None else as_numpy(sinks),
    )
    size = max(1, SCORE_ROWS // problem.shared)
    tasks = [
        (b, head, part)
        for part in reversed(blocks(queries, size))  # causal: the longest first
        for b in range(batch)
        for head in range(k.shape[1])
    ]
    nbytes = _task_nbytes(q.shape[-1], v.shape[-1])
    pool.map_ordered(lambda task: _attend_block(problem, *task, Arena(pool.scratch(nbytes))), tasks)
    return result.transpose(0, 2, 1, 3)


def _attend_block(problem: _Problem, b: int, kv_head: int, part: slice, arena: Arena) -> None:
    """Queries `part` of all heads that share kv_head, against all keys they may see."""
    shared, count = problem.shared, part.stop - part.start
    heads = slice(kv_head * shared, (kv_head + 1) * shared)
    rows, (keys, value_dims) = shared * count, problem.v.shape[2:]
    q = arena.float32((shared, count, problem.q.shape[-1]))
    np.multiply(problem.q[b, heads, part], problem.scale, out=q)
    q = q.reshape(rows, -1)
    softmax = _RunningSoftmax(rows, value_dims, arena)
    if problem.sinks is not None:
        softmax.start_with(np.repeat(problem.sinks[heads], count)[:, None])
    masker = _Masker.of(problem, b, heads, part)
    transposed = arena.float32((KEY_BLOCK * q.shape[-1],))
    memory = arena.float32((rows * KEY_BLOCK,))
    for block in blocks(min(keys, masker.visible), KEY_BLOCK):
        width = block.stop - block.start
        if masker.skips(block):
            continue
        k = transposed[: width * q.shape[-1]].reshape(-1, width)
        np.copyto(k, problem.k[b, kv_head, block].T)
        scores = memory[: rows * width].reshape(rows, width)
        np.matmul(q, k, out=scores)
        masker.apply(scores.reshape(shared, count, width), block)
        softmax.add(scores, problem.v[b, kv_head, block])
    softmax.finish(problem.out[b, heads, part])


class _RunningSoftmax:
    """softmax(scores) @ values over blocks of keys: rescaled when a row's maximum grows."""

    def __init__(self, rows: int, value_dims: int, arena: Arena) -> None:
        self.maximum = arena.float32((rows, 1))
        self.total = arena.float32((rows, 1))
        self.output = arena.float32((rows, value_dims))
        self._maximum = arena.float32((rows, 1))
        self._total = arena.float32((rows, 1))
        self._product = arena.float32((rows, value_dims))
        self.maximum.fill(MASKED)  # not -inf: a row of -inf must give nan, not a warning
        self.total.fill(0)
        self.output.fill(0)

    def start_with(self, sinks: np.ndarray) -> None:
        """A virtual key with score `sinks` [rows, 1] and value 0."""
        np.copyto(self.maximum, sinks)
        self.total.fill(1)

    def add(self, scores: np.ndarray, values: np.ndarray) -> None:
        """Fold in scores [rows, keys] (overwritten) and values [keys, Dv]."""
        rescale = self._maximum
        np.max(scores, axis=1, keepdims=True, out=rescale)
        np.maximum(rescale, self.maximum, out=rescale)
        np.subtract(scores, rescale, out=scores)
        np.exp(scores, out=scores)
        np.sum(scores, axis=1, keepdims=True, out=self._total)
        np.matmul(scores, values, out=self._product)
        self.maximum, self._maximum = rescale, self.maximum
        np.subtract(self._maximum, self.maximum, out=self._maximum)
        factor = np.exp(self._maximum, out=self._maximum)
        np.multiply(self.total, factor, out=self.total)
        np.add(self.total, self._total, out=self.total)
        np.multiply(self.output, factor, out=self.output)
        np.add(self.output, self._product, out=self.output)

    def finish(self, out: np.ndarray) -> None:
        """out: [heads, queries, Dv], any strides."""
        with np.errstate(invalid="ignore"):  # 0 / 0 = nan, as in MLX, for a row of -inf
            np.divide(self.output, self.total, out=self.output)
        np.copyto(out, self.output.reshape(out.shape))


@dataclass(frozen=True)
class _Masker:
    """What one block of queries may see."""

    visible: int  # keys from here on are seen by no query of the block
    diagonal: int | None  # causal: query i of the block sees keys <= diagonal + i
    mask: np.ndarray | None  # [H or 1, queries, Tk]
    may_skip: bool  # every query sees some key, so blocks nobody sees add exactly 0

    @classmethod
    def of(cls, problem: _Problem, b: int, heads: slice, part: slice) -> _Masker:
        queries, keys = problem.q.shape[2], problem.k.shape[2]
        if problem.causal:
            offset = keys - queries
            return cls(offset + part.stop, offset + part.start, None, False)
        if problem.mask is None:
            return cls(keys, None, None, False)
        mask = problem.mask[b if problem.mask.shape[0] > 1 else 0]
        mask = mask[heads if mask.shape[0] > 1 else slice(0, 1), part]
        may_skip = mask.dtype == bool and bool(mask.any(axis=-1).all())
        return cls(keys, None, mask, may_skip)

    def skips(self, block: slice) -> bool:
        return self.may_skip and not self.mask[..., block].any()

    def apply(self, scores: np.ndarray, block: slice) -> None:
        """Mask scores [heads, queries, keys of the block] in place."""
        if self.diagonal is not None and block.stop > self.diagonal + 1:
            first = max(block.start, self.diagonal + 1)
            key = np.arange(first, block.stop)
            hidden = key > self.diagonal + np.arange(scores.shape[1])[:, None]
            np.copyto(scores[..., first - block.start :], MASKED, where=hidden)
        if self.mask is None:
            return
        mask = self.mask[..., block]
        if mask.dtype == bool:
            if not mask.all():
                np.copyto(scores, MASKED, where=~mask)
        else:
            np.add(scores, mask, out=scores)
