"""RMSNorm and RoPE of prompts through numpy on all cores; MLX's CPU versions use one thread.

Owns the replacement of mx.fast.rms_norm and mx.fast.rope while a context is open. Broadcast
factors are spread out by plain copies first: ufuncs are fast only on contiguous arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_stream.backends.cpu.arrays import as_numpy, empty_array, evaluated
from mlx_stream.backends.cpu.gemm import Arena, blocks
from mlx_stream.backends.cpu.override import override
from mlx_stream.backends.cpu.pool import WorkerPool

MIN_ELEMENTS = 1 << 16  # fewer: waking the workers costs more than it saves
BLOCK_ELEMENTS = 1 << 16  # of one task: a few arrays of this size stay in L2


@contextmanager
def elementwise_override(pool: WorkerPool) -> Iterator[None]:
    """Route large float32 rms_norm and rope calls through numpy while the context is open."""
    with (
        override(mx.fast, "rms_norm", partial(_rms_norm_with, pool)),
        override(mx.fast, "rope", partial(_rope_with, pool)),
    ):
        yield


def scratch_nbytes(threads: int) -> int:
    """Most bytes of scratch the workers hold during one call, for rows of up to 64 Ki elements."""
    return threads * (3 * 4 * BLOCK_ELEMENTS + 256)


def _rms_norm_with(pool: WorkerPool, original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def rms_norm(x: mx.array, weight: mx.array | None, eps: float, **options: Any) -> mx.array:
        if options or not _large(x) or (weight is not None and weight.ndim != 1):
            return original(x, weight, eps, **options)
        gain = np.ones(x.shape[-1], np.float32)
        if weight is not None:
            gain = np.array(weight.astype(mx.float32))
        return _rms_norm(x, gain, eps, pool)

    return rms_norm


def _rope_with(pool: WorkerPool, original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def rope(x: mx.array, dims: int, **options: Any) -> mx.array:
        known = {"traditional", "base", "scale", "offset", "freqs"}
        plain = not options.get("traditional") and isinstance(options.get("offset"), int)
        if not plain or options.keys() - known or not _large(x) or x.ndim != 4 or dims % 2:
            return original(x, dims, **options)
        cosine, sine = _angles(x.shape[2], dims, **options)
        return _rope(x, cosine, sine, pool)

    return rope


def _large(x: mx.array) -> bool:
    fits = x.size >= MIN_ELEMENTS and x.shape[-1] <= BLOCK_ELEMENTS
    return fits and x.dtype == mx.float32 and evaluated(x)


def _rms_norm(x: mx.array, gain: np.ndarray, eps: float, pool: WorkerPool) -> mx.array:
    """x / sqrt(mean(x^2) + eps) * gain over the last axis."""
    result, out = empty_array(x.shape)
    dims = x.shape[-1]
    source, target = as_numpy(x).reshape(-1, dims), out.reshape(-1, dims)
    size = max(1, BLOCK_ELEMENTS // dims)
    gains = np.tile(gain, (min(size, len(source)), 1))

    def run(rows: slice) -> None:
        part = source[rows]
        factor = np.einsum("nd,nd->n", part, part)  # [n]
        np.multiply(factor, np.float32(1 / dims), out=factor)
        np.add(factor, np.float32(eps), out=factor)
        np.sqrt(factor, out=factor)
        np.reciprocal(factor, out=factor)
        spread = Arena(pool.scratch(part.nbytes)).float32(part.shape)
        np.copyto(spread, factor[:, None])
        np.multiply(part, spread, out=spread)
        np.multiply(spread, gains[: len(part)], out=target[rows])

    pool.map_ordered(run, blocks(len(source), size))
    return result


def _angles(
    tokens: int,
    dims: int,
    *,
    base: float | None,
    scale: float,
    offset: int,
    freqs: mx.array | None = None,
    **_: Any,
) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [T, dims / 2], by the operations MLX uses, so that the angles are the same."""
    half = dims // 2
    positions = (mx.arange(tokens, dtype=mx.float32) + offset) * scale
    if freqs is None:
        inverse = mx.exp(mx.arange(0, -half, -1, dtype=mx.float32) * (math.log(base) / half))
    else:
        inverse = 1 / freqs
    theta = positions[:, None] * inverse
    return np.array(mx.cos(theta)), np.array(mx.sin(theta))


def _rope(x: mx.array, cosine: np.ndarray, sine: np.ndarray, pool: WorkerPool) -> mx.array:
    """Rotate the halves of the first 2 * half elements of x [B, H, T, D]."""
    batch, heads, tokens, dims = x.shape
    half = cosine.shape[1]
    # By token, as the projection before and the attention after have it.
    result, out = empty_array((batch, tokens, heads, dims))
    source = as_numpy(x).transpose(0, 2, 1, 3)
    size = max(1, BLOCK_ELEMENTS // (heads * dims))

    def run(task: tuple[int, slice]) -> None:
        b, part = task
        shape = (part.stop - part.start, heads, 2, half)
        arena = Arena(pool.scratch(3 * (4 * math.prod(shape) + 64)))
        straight, crossed, factor = (arena.float32(shape) for _ in range(3))
        rotary = source[b, part, :, : 2 * half].reshape(shape)
        np.copyto(straight, rotary)
        np.copyto(crossed, rotary[:, :, ::-1])
        np.copyto(factor, cosine[part, None, None])
        np.multiply(straight, factor, out=straight)
        np.copyto(factor[:, :, 0], -sine[part, None])
        np.copyto(factor[:, :, 1], sine[part, None])
        np.multiply(crossed, factor, out=crossed)
        np.add(straight, crossed, out=straight)
        target = out[b, part]
        np.copyto(target[..., : 2 * half], straight.reshape(*shape[:2], -1))
        np.copyto(target[..., 2 * half :], source[b, part, :, 2 * half :])

    pool.map_ordered(run, [(b, part) for b in range(batch) for part in blocks(tokens, size)])
    return result.transpose(0, 2, 1, 3)
