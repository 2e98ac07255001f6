"""State that grows with the prompt: activations of suspended chunks, and keys and values.

Bytes. In a layer-major prefill every chunk is suspended at a layer's experts, so all tokens of a
segment hold their activations at once (design.md, section 2).
"""

from __future__ import annotations

from dataclasses import dataclass

from mlx_stream.planner.checks import not_negative, positive
from mlx_stream.planner.fit import HELD_VECTORS
from mlx_stream.planner.model_shape import ModelShape

LIVE_LAYERS = 2  # with eviction: one layer attends while the one before it is written out


@dataclass(frozen=True)
class HeldState:
    """Activations held by the suspended chunks of one segment, in bytes.

    Attributes:
        vectors: residual streams, normed input and output of every token.
        deferred: unweighted outputs of every token's experts, where they are combined later.
        masks: full attention masks, in families that build them.
    """

    vectors: int
    deferred: int = 0
    masks: int = 0

    @property
    def total(self) -> int:
        """Sum of all parts."""
        return self.vectors + self.deferred + self.masks


@dataclass(frozen=True)
class KvState:
    """Keys and values of a prompt, in bytes.

    Attributes:
        layers: attention layers.
        layer_nbytes: of one layer.
    """

    layers: int
    layer_nbytes: float

    @property
    def kept(self) -> float:
        """All layers in memory, as decoding right after the prompt needs them."""
        return self.layers * self.layer_nbytes

    def evicted(self, live_layers: int = LIVE_LAYERS) -> float:
        """At the peak, when a layer's cache leaves memory once the next layer is reached."""
        positive(live_layers=live_layers)
        return min(self.layers, live_layers) * self.layer_nbytes

    def traffic(self, *, decodes_after: bool) -> float:
        """SSD bytes that eviction costs: everything written once, and read back to decode."""
        return self.kept * (2 if decodes_after else 1)


def held_vectors_bytes(
    tokens: int, hidden: int, itemsize: int, *, streams: int = 1, vectors: float = HELD_VECTORS
) -> int:
    """Bytes of the per-token activations of `tokens` suspended tokens.

    Args:
        streams: residual streams: 1, or as many as a model with hyper-connections carries.
        vectors: hidden vectors per token and stream, measured (see fit.HELD_VECTORS).
    """
    not_negative(tokens=tokens)
    positive(hidden=hidden, itemsize=itemsize, streams=streams, vectors=vectors)
    return int(vectors * streams * hidden * itemsize * tokens)


def held_state(
    shape: ModelShape,
    tokens: int,
    itemsize: int,
    *,
    past_tokens: int = 0,
    prompt_tokens: int | None = None,
    combined: bool = True,
) -> HeldState:
    """What one segment of `tokens` tokens holds, by family: streams, top-k, masks.

    Args:
        prompt_tokens: tokens of all segments; those of this one by default.
        combined: whether all expert outputs are weighted inside the stream.
    """
    seen = past_tokens + (tokens if prompt_tokens is None else prompt_tokens)
    return HeldState(
        vectors=held_vectors_bytes(tokens, shape.hidden, itemsize, streams=shape.streams),
        deferred=0 if combined else tokens * shape.top_k * shape.hidden * itemsize,
        masks=tokens * seen // 2 if shape.full_masks else 0,
    )


def kv_state(shape: ModelShape, tokens: int, itemsize: float) -> KvState:
    """Keys and values of `tokens` tokens, unquantized or at a mean of `itemsize` bytes a value."""
    not_negative(tokens=tokens)
    positive(itemsize=itemsize)
    layers = max(1, shape.layers)
    return KvState(layers, shape.kv_values * tokens * itemsize / layers)


def tokens_that_fit(
    shape: ModelShape, memory_nbytes: int, itemsize: int, *, keep_kv: bool = True
) -> int:
    """The longest single-segment prompt whose activations, keys and values fit `memory_nbytes`."""
    not_negative(memory_nbytes=memory_nbytes)
    low, high = 0, 1
    while _state_bytes(shape, high, itemsize, keep_kv) <= memory_nbytes:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if _state_bytes(shape, middle, itemsize, keep_kv) <= memory_nbytes:
            low = middle
        else:
            high = middle
    return low


def _state_bytes(shape: ModelShape, tokens: int, itemsize: int, keep_kv: bool) -> float:
    kv = kv_state(shape, tokens, itemsize)
    return held_state(shape, tokens, itemsize).total + (kv.kept if keep_kv else kv.evicted())
