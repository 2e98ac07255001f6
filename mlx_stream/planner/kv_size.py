"""Upper bounds of what keys and values take, plain, limited or quantized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from mlx_stream.kv.options import KvOptions
from mlx_stream.planner.model_shape import ModelShape

KV_STEP = 256  # mlx-lm grows its caches in steps of this many tokens
SCORE_COPIES = 3  # quantized attention holds its scores, masked and as shares


@dataclass(frozen=True)
class KvSize:
    """Bytes.

    Attributes:
        held: all layers' keys and values.
        layer: one layer's, unquantized: it exists twice for a moment when it grows.
        scores: what quantized attention adds to a chunk's activations.
        stored: all layers' once prefill is over, wherever they are.
    """

    held: int
    layer: int
    scores: int = 0
    stored: int = 0


def kv_size(
    shape: ModelShape,
    kv: KvOptions,
    itemsize: int,
    *,
    total_tokens: int,
    decode_tokens: int,
    chunk_tokens: int,
    segments: int,
    live: int = 1,
    window: int = 0,
) -> KvSize:
    """Keys and values of a prompt with what came before it, and room for `decode_tokens` more.

    A limited cache holds its limit and one chunk. A quantized one counts as such only when every
    layer is quantized before the next one is reached: in one segment, from the start on.

    Args:
        itemsize: bytes of an unquantized value.
        total_tokens: prompt and past.
        live: layers whose keys and values are in memory at once when they are evicted.
        window: tokens that the layers with a sliding window keep; those are not evicted.
    """
    tokens = total_tokens + decode_tokens
    if kv.max_kv_size is not None:
        tokens = min(tokens, kv.max_kv_size + chunk_tokens)
    tokens = -(-tokens // KV_STEP) * KV_STEP
    held = shape.kv_values * tokens * itemsize
    layer = held // max(1, shape.layers)
    if kv.kv_evict == "disk":
        per_token = shape.kv_values * itemsize
        windows = per_token * min(tokens, window + chunk_tokens + KV_STEP) if window else 0
        return KvSize(min(held, live * layer + windows), layer, stored=held)
    if kv.kv_evict == "quantize":
        return _quantized_after(shape, kv, itemsize, tokens, held, live, total_tokens)
    if kv.kv_bits is None:
        return KvSize(held, layer, stored=held)
    # The first chunk attends before anything is quantized.
    rows = 1 if chunk_tokens >= total_tokens - 1 else chunk_tokens
    scores = SCORE_COPIES * rows * total_tokens * shape.heads * itemsize
    if segments == 1 and total_tokens - 1 >= kv.quantized_kv_start:
        held = int(shape.kv_values * tokens * kv.quantized_nbytes(itemsize))
    return KvSize(held, layer, scores, held)


def _quantized_after(
    shape: ModelShape,
    kv: KvOptions,
    itemsize: int,
    tokens: int,
    held: int,
    live: int,
    total_tokens: int,
) -> KvSize:
    """Layers are quantized when the prompt has passed them."""
    layer = held // max(1, shape.layers)
    if total_tokens < kv.quantized_kv_start:
        return KvSize(held, layer, stored=held)
    small = int(shape.kv_values * tokens * kv.quantized_nbytes(itemsize))
    scores = SCORE_COPIES * total_tokens * shape.heads * itemsize
    return KvSize(min(held, small + live * layer), layer, scores, small)


def live_layers(names: Sequence[str], layers: int) -> int:
    """Decoder layers between two meetings of the chunks, at most: their caches are in memory.

    Args:
        names: of the expert layers, such as ``model.layers.3.mlp.switch_mlp``.
    """
    numbers = [int(part) for name in names for part in name.split(".") if part.isdecimal()]
    if len(numbers) != len(names):
        return layers
    marks = [-1, *numbers, max(layers - 1, numbers[-1])]
    return max(1, *(b - a for a, b in pairwise(marks)))
