"""What bounds decoding: bytes per token from the SSD and from memory.

Tokens per second, bytes, seconds. Upper bounds by bandwidth alone: a token uses `top_k` experts in
every layer, those not in memory come from the SSD, and every active weight is read from memory
once. Latency and compute come on top (benchmarks/decode_budget.py measures them).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mlx_stream.planner.checks import between, not_negative, positive


@dataclass(frozen=True)
class DecodeBound:
    """Bounds of decoding speed in tokens per second; infinite where nothing bounds.

    Attributes:
        storage: by what misses read from the SSD.
        memory: by the active weights and the KV cache read from memory.
    """

    storage: float
    memory: float

    @property
    def overlapped(self) -> float:
        """Both at once: misses are read while resident experts compute."""
        return min(self.storage, self.memory)

    @property
    def serial(self) -> float:
        """One after the other: reads are waited for."""
        seconds = 1 / self.storage + 1 / self.memory
        return math.inf if seconds == 0 else 1 / seconds

    @property
    def bound(self) -> str:
        """``"storage"`` or ``"memory"``."""
        return "storage" if self.storage < self.memory else "memory"


def routed_bytes_per_token(layers: int, top_k: int, expert_nbytes: float) -> float:
    """Bytes of the experts that one token uses in all its expert layers."""
    not_negative(layers=layers, top_k=top_k, expert_nbytes=expert_nbytes)
    return layers * top_k * expert_nbytes


def uncached_tokens_per_second(bytes_per_second: float, routed_nbytes: float) -> float:
    """Bound without any cache: every routed expert of every token is read."""
    return cached_tokens_per_second(bytes_per_second, routed_nbytes, 0.0)


def cached_tokens_per_second(
    bytes_per_second: float, routed_nbytes: float, hit_rate: float
) -> float:
    """``BW / ((1 - h) * bytes routed per token)``: only misses are read; infinite at h = 1."""
    positive(bytes_per_second=bytes_per_second, routed_nbytes=routed_nbytes)
    between(0, 1, hit_rate=hit_rate)
    missed = (1.0 - hit_rate) * routed_nbytes
    return math.inf if missed == 0 else bytes_per_second / missed


def hit_rate_needed(
    tokens_per_second: float, bytes_per_second: float, routed_nbytes: float
) -> float:
    """The smallest hit rate whose storage bound reaches `tokens_per_second`, 0 to below 1."""
    positive(tokens_per_second=tokens_per_second, bytes_per_second=bytes_per_second)
    positive(routed_nbytes=routed_nbytes)
    return max(0.0, 1.0 - bytes_per_second / (tokens_per_second * routed_nbytes))


def uniform_hit_rate(cache_nbytes: float, expert_nbytes: float) -> float:
    """Hit rate under uniform routing: the share of all experts that the cache holds.

    Args:
        expert_nbytes: W, bytes of all routed experts.
    """
    not_negative(cache_nbytes=cache_nbytes)
    positive(expert_nbytes=expert_nbytes)
    return min(1.0, cache_nbytes / expert_nbytes)


def hottest_hit_rate(probabilities: np.ndarray, cached: int) -> float:
    """Hit rate when the `cached` most used experts of a layer stay in memory.

    The best a cache can do that knows frequencies but not the next token.

    Args:
        probabilities: chance that a token uses each expert, as `inclusion_probabilities` gives.
    """
    between(0, len(probabilities), cached=cached)
    ranked = np.sort(np.asarray(probabilities, dtype=np.float64))[::-1]
    return float(ranked[:cached].sum() / ranked.sum())


def decode_bound(
    *,
    read_bytes_per_second: float,
    memory_bytes_per_second: float,
    routed_nbytes: float,
    dense_nbytes: float,
    hit_rate: float,
    kv_nbytes: float = 0.0,
) -> DecodeBound:
    """Both bounds of one model on one machine.

    Args:
        routed_nbytes: experts that one token uses.
        dense_nbytes: all other weights that one token uses.
        kv_nbytes: keys and values that one token attends to.
    """
    positive(memory_bytes_per_second=memory_bytes_per_second)
    not_negative(dense_nbytes=dense_nbytes, kv_nbytes=kv_nbytes)
    return DecodeBound(
        storage=cached_tokens_per_second(read_bytes_per_second, routed_nbytes, hit_rate),
        memory=memory_bytes_per_second / (routed_nbytes + dense_nbytes + kv_nbytes),
    )
