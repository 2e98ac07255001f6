"""How many bytes a prefill reads: chunk by chunk or layer by layer, in which bundles.

Bytes throughout; W is the size of all routed experts. Chunk-major is what engines without
streaming do: every chunk passes all layers, and a chunk of a few hundred tokens uses nearly every
expert. Layer-major reads each expert once per segment (design.md, section 2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlx_stream.planner.checks import between, not_negative, positive

DOUBLE = 2  # buffers: one is read while the other computes
_BISECTIONS = 200


@dataclass(frozen=True)
class ReadVolume:
    """Expert bytes of one prompt.

    Attributes:
        chunk_major: read when every chunk passes all layers before the next one.
        layer_major: read when all chunks of a segment pass one layer before the next one.
    """

    chunk_major: float
    layer_major: float

    @property
    def ratio(self) -> float:
        """Bytes that chunk-major reads for each that layer-major reads."""
        return self.chunk_major / self.layer_major


@dataclass(frozen=True)
class Bundle:
    """A read group: experts that are read and computed together.

    Attributes:
        experts: experts in a full bundle.
        nbytes: bytes of a full bundle.
        per_layer: bundles that cover a layer; the last may be smaller.
        buffer_nbytes: bytes of all staging buffers.
    """

    experts: int
    nbytes: int
    per_layer: int
    buffer_nbytes: int


def chunk_major_bytes(tokens: int, chunk_tokens: int, nbytes: float) -> float:
    """``ceil(N / C) * W``: every chunk reads every expert."""
    positive(tokens=tokens, chunk_tokens=chunk_tokens)
    not_negative(nbytes=nbytes)
    return math.ceil(tokens / chunk_tokens) * nbytes


def layer_major_bytes(nbytes: float, segments: int = 1) -> float:
    """``segments * W``, whatever the prompt's length."""
    positive(segments=segments)
    not_negative(nbytes=nbytes)
    return segments * nbytes


def segments_needed(tokens: int, segment_tokens: int) -> int:
    """Segments of a prompt when the held state of `segment_tokens` fits."""
    positive(tokens=tokens, segment_tokens=segment_tokens)
    return math.ceil(tokens / segment_tokens)


def read_volume(
    tokens: int, chunk_tokens: int, nbytes: float, *, segment_tokens: int | None = None
) -> ReadVolume:
    """Both volumes for one prompt, every expert used."""
    segments = 1 if segment_tokens is None else segments_needed(tokens, segment_tokens)
    return ReadVolume(
        chunk_major_bytes(tokens, chunk_tokens, nbytes), layer_major_bytes(nbytes, segments)
    )


def used_chunk_major_bytes(
    tokens: int, chunk_tokens: int, nbytes: float, *, experts: int, top_k: int
) -> float:
    """Expected chunk-major bytes when a chunk reads only the experts it routes to (uniform)."""
    positive(tokens=tokens, chunk_tokens=chunk_tokens)
    full, rest = divmod(tokens, chunk_tokens)
    used = full * (experts - expected_unused(experts, top_k, chunk_tokens))
    used += experts - expected_unused(experts, top_k, rest)
    return nbytes * used / experts


def expected_unused(experts: int, top_k: int, tokens: float) -> float:
    """Expected experts of a layer that `tokens` tokens never use, uniform routing.

    A token picks `top_k` different experts, so it misses a given one with probability ``1 - K / E``
    and the expectation ``E * (1 - K / E) ** N`` is exact for independent tokens.
    """
    positive(experts=experts)
    between(0, experts, top_k=top_k)
    not_negative(tokens=tokens)
    return experts * (1.0 - top_k / experts) ** tokens


def zipf_weights(experts: int, exponent: float) -> np.ndarray:
    """Shares ``rank ** -exponent`` that sum to 1; exponent 0 is uniform. -> [E] float64"""
    positive(experts=experts)
    not_negative(exponent=exponent)
    weights = np.arange(1, experts + 1, dtype=np.float64) ** -exponent
    return weights / weights.sum()


def inclusion_probabilities(weights: Sequence[float] | np.ndarray, top_k: int) -> np.ndarray:
    """Probability that a token uses each expert when it picks `top_k` by weight. -> [E] float64

    ``1 - exp(-c * w)`` with c such that the sum is K: experts arrive as Poisson processes with
    these rates and the token stops when K have come. Exact for equal weights, within a few percent
    otherwise (Rosen's approximation of successive sampling).
    """
    shares = np.asarray(weights, dtype=np.float64)
    between(0, len(shares), top_k=top_k)
    positive(smallest_weight=float(shares.min()))
    if top_k == len(shares):
        return np.ones_like(shares)
    low, high = 0.0, 1.0 / float(shares.min())
    while -np.expm1(-high * shares).sum() < top_k:
        high *= 2.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2.0
        few = -np.expm1(-middle * shares).sum() < top_k
        low, high = (middle, high) if few else (low, middle)
    return -np.expm1(-high * shares)


def expected_unused_skewed(probabilities: Sequence[float] | np.ndarray, tokens: float) -> float:
    """Expected unused experts when a token uses expert e with `probabilities[e]`."""
    not_negative(tokens=tokens)
    chances = np.asarray(probabilities, dtype=np.float64)
    return float(((1.0 - chances) ** tokens).sum())


def experts_per_bundle(
    expert_nbytes: int,
    experts: int,
    *,
    target_nbytes: int,
    memory_nbytes: int | None = None,
    buffers: int = DOUBLE,
) -> int:
    """Experts of a read group: about `target_nbytes` large, all buffers within `memory_nbytes`.

    0 when not even single experts fit the memory.
    """
    positive(expert_nbytes=expert_nbytes, experts=experts, target_nbytes=target_nbytes)
    positive(buffers=buffers)
    size = max(1, min(experts, target_nbytes // expert_nbytes))
    if memory_nbytes is None:
        return size
    not_negative(memory_nbytes=memory_nbytes)
    return min(size, memory_nbytes // (buffers * expert_nbytes))


def double_buffer_bytes(
    bundle_experts: int, expert_nbytes: int, *, buffers: int = DOUBLE, align: int = 1
) -> int:
    """Bytes of the staging buffers: one bundle computes while the next is read.

    Args:
        align: each buffer is rounded up to this many bytes, as cache-bypassing reads need.
    """
    positive(expert_nbytes=expert_nbytes, buffers=buffers, align=align)
    not_negative(bundle_experts=bundle_experts)
    return buffers * (-(-bundle_experts * expert_nbytes // align) * align)


def bundle(expert_nbytes: int, experts: int, bundle_experts: int, *, align: int = 1) -> Bundle:
    """The sizes that follow from `bundle_experts` experts per read group, double-buffered."""
    positive(experts=experts)
    between(1, experts, bundle_experts=bundle_experts)
    return Bundle(
        experts=bundle_experts,
        nbytes=bundle_experts * expert_nbytes,
        per_layer=-(-experts // bundle_experts),
        buffer_nbytes=double_buffer_bytes(bundle_experts, expert_nbytes, align=align),
    )
