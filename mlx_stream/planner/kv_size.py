"""Upper bounds of what keys and values take, plain, limited or quantized."""

from __future__ import annotations

from dataclasses import dataclass

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
    """

    held: int
    layer: int
    scores: int = 0


def kv_size(
    shape: ModelShape,
    kv: KvOptions,
    itemsize: int,
    *,
    total_tokens: int,
    decode_tokens: int,
    chunk_tokens: int,
    segments: int,
) -> KvSize:
    """Keys and values of a prompt with what came before it, and room for `decode_tokens` more.

    A limited cache holds its limit and one chunk. A quantized one counts as such only when every
    layer is quantized before the next one is reached: in one segment, from the start on.

    Args:
        itemsize: bytes of an unquantized value.
        total_tokens: prompt and past.
    """
    tokens = total_tokens + decode_tokens
    if kv.max_kv_size is not None:
        tokens = min(tokens, kv.max_kv_size + chunk_tokens)
    tokens = -(-tokens // KV_STEP) * KV_STEP
    held = shape.kv_values * tokens * itemsize
    layer = held // max(1, shape.layers)
    if kv.kv_bits is None:
        return KvSize(held, layer)
    # The first chunk attends before anything is quantized.
    rows = 1 if chunk_tokens >= total_tokens - 1 else chunk_tokens
    scores = SCORE_COPIES * rows * total_tokens * shape.heads * itemsize
    if segments == 1 and total_tokens - 1 >= kv.quantized_kv_start:
        held = int(shape.kv_values * tokens * kv.quantized_nbytes(itemsize))
    return KvSize(held, layer, scores)
