"""The cost of a streamed prefill: T_read, T_compute, their overlap, and the break-even prompt N*.

Pure formulas in bytes, seconds and FLOPs (a multiply-add is two; GB is 1e9 bytes). They follow from
design.md, section 1: the experts are read once per segment, whatever the prompt's length, while the
work grows with it. So a short prompt is bound by reads, a long one by compute, and N* lies between.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlx_stream.planner.checks import not_negative, positive


@dataclass(frozen=True)
class TokenWork:
    """FLOPs of a model's forward pass.

    Attributes:
        linear: FLOPs per token in all linear layers, routed experts included (about twice the
            active parameters).
        routed: of those, FLOPs per token in the routed experts.
        attention_pair: FLOPs per (query, key) pair, all layers; see `attention_pair_flops`.
        window: keys that a query sees at most; None for all before it.
    """

    linear: float
    routed: float
    attention_pair: float = 0.0
    window: int | None = None

    def __post_init__(self) -> None:
        positive(linear=self.linear, routed=self.routed)
        not_negative(attention_pair=self.attention_pair)
        not_negative(linear_minus_routed=self.linear - self.routed)
        if self.window is not None:
            positive(window=self.window)


@dataclass(frozen=True)
class Rates:
    """What a machine sustains.

    Attributes:
        read: bytes per second from the SSD.
        flops: FLOP/s of the linear layers.
        attention_flops: FLOP/s of attention; None when it is as fast as the linear layers.
    """

    read: float
    flops: float
    attention_flops: float | None = None

    def __post_init__(self) -> None:
        positive(read=self.read, flops=self.flops)
        if self.attention_flops is not None:
            positive(attention_flops=self.attention_flops)


@dataclass(frozen=True)
class PrefillTime:
    """Seconds of one prompt of `tokens` tokens."""

    tokens: float
    read_seconds: float
    linear_seconds: float
    attention_seconds: float = 0.0

    @property
    def compute_seconds(self) -> float:
        """T_compute: linear layers and attention."""
        return self.linear_seconds + self.attention_seconds

    @property
    def overlapped_seconds(self) -> float:
        """T_max: reads and compute fully overlapped. No schedule is faster."""
        return max(self.read_seconds, self.compute_seconds)

    @property
    def serial_seconds(self) -> float:
        """T_sum: nothing overlapped. At most twice T_max."""
        return self.read_seconds + self.compute_seconds

    @property
    def exposed_read_seconds(self) -> float:
        """What compute waits for reads even with full overlap."""
        return self.overlapped_seconds - self.compute_seconds

    @property
    def bound(self) -> str:
        """``"read"`` or ``"compute"``: which of the two decides T_max."""
        return "read" if self.read_seconds > self.compute_seconds else "compute"

    @property
    def tokens_per_second(self) -> float:
        """Prompt tokens per second with full overlap."""
        return self.tokens / self.overlapped_seconds

    def pipelined_seconds(self, groups: int) -> float:
        """T with `groups` equal read groups, each read while the one before it computes.

        The first read and the last computation have no partner, so a share of the smaller term
        is exposed: T_sum for one group, towards T_max for many.
        """
        positive(groups=groups)
        smaller = min(self.read_seconds, self.compute_seconds)
        return self.overlapped_seconds + smaller / groups


@dataclass(frozen=True)
class BreakEven:
    """N*: the prompt length in tokens from which compute takes as long as the reads.

    Attributes:
        optimistic: all compute hides reads (linear layers and attention).
        conservative: only the routed experts' compute does, as when the reader has no more than
            one layer of buffers and idles while attention runs.
    """

    optimistic: float
    conservative: float


def attention_pair_flops(layers: int, heads: int, key_dim: int, value_dim: int) -> float:
    """FLOPs of one (query, key) pair in all layers: the score and the weighted value.

    ``2 * layers * heads * (key_dim + value_dim)``; softmax is not counted. Latent attention run in
    its absorbed form has key_dim = rank + rope and value_dim = rank.
    """
    positive(layers=layers, heads=heads, key_dim=key_dim, value_dim=value_dim)
    return 2.0 * layers * heads * (key_dim + value_dim)


def causal_pairs(tokens: float, past: float = 0, window: int | None = None) -> float:
    """(query, key) pairs of `tokens` new tokens after `past` cached ones, causal attention."""
    not_negative(tokens=tokens, past=past)
    return _pairs_until(past + tokens, window) - _pairs_until(past, window)


def _pairs_until(tokens: float, window: int | None) -> float:
    if window is None or tokens <= window:
        return tokens * (tokens + 1) / 2
    return window * (window + 1) / 2 + (tokens - window) * window


def read_seconds(nbytes: float, bytes_per_second: float, *, segments: int = 1) -> float:
    """T_read: `nbytes` of experts, once per segment."""
    not_negative(nbytes=nbytes)
    positive(bytes_per_second=bytes_per_second, segments=segments)
    return segments * nbytes / bytes_per_second


def linear_seconds(work: TokenWork, tokens: float, rates: Rates) -> float:
    """The linear term of T_compute: proportional to the prompt."""
    not_negative(tokens=tokens)
    return tokens * work.linear / rates.flops


def attention_seconds(work: TokenWork, tokens: float, rates: Rates, *, past: float = 0) -> float:
    """The attention term of T_compute: quadratic in the prompt, up to the window."""
    rate = rates.flops if rates.attention_flops is None else rates.attention_flops
    return causal_pairs(tokens, past, work.window) * work.attention_pair / rate


def prefill_time(
    nbytes: float,
    work: TokenWork,
    tokens: float,
    rates: Rates,
    *,
    segments: int = 1,
    past: float = 0,
) -> PrefillTime:
    """T_read and T_compute of one layer-major prefill.

    Args:
        nbytes: W, bytes of all routed experts.
        tokens: N, prompt tokens.
        segments: how often the experts are read.
        past: tokens already in the cache.
    """
    positive(tokens=tokens)
    return PrefillTime(
        tokens=tokens,
        read_seconds=read_seconds(nbytes, rates.read, segments=segments),
        linear_seconds=linear_seconds(work, tokens, rates),
        attention_seconds=attention_seconds(work, tokens, rates, past=past),
    )


def break_even(nbytes: float, work: TokenWork, rates: Rates, *, segments: int = 1) -> BreakEven:
    """N* for `nbytes` of experts: the range from all compute to routed experts only."""
    seconds = read_seconds(nbytes, rates.read, segments=segments)
    rate = rates.flops if rates.attention_flops is None else rates.attention_flops
    return BreakEven(
        optimistic=_tokens_taking(
            seconds, work.linear / rates.flops, work.attention_pair / rate, work.window
        ),
        conservative=seconds * rates.flops / work.routed,
    )


def _tokens_taking(seconds: float, token: float, pair: float, window: int | None) -> float:
    """Tokens whose compute takes `seconds`, at so many seconds a token and a pair.

    Solves ``token * N + pair * N * (N + 1) / 2 = seconds`` (without cancellation), and the straight
    line beyond the window.
    """
    slope = token + pair / 2
    tokens = 2 * seconds / (slope + math.sqrt(slope * slope + 2 * pair * seconds))
    if window is not None and tokens > window:
        return (seconds + pair * window * (window - 1) / 2) / (token + pair * window)
    return tokens
