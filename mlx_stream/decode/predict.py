"""Prediction without training: which experts the next layer will want, before it has routed.

Two sources. Lookahead runs the next layer's own router on this layer's state; since MLX is lazy and
the block is left where it calls its experts, nothing but the router is computed. The previous
token's experts cost nothing. Predicted experts are hints: they are read ahead, never used in place
of the router's choice.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_stream.experts.streamed_experts import (
    ExecutorSlot,
    StreamedExperts,
    parent_block,
    set_executor,
)

log = logging.getLogger(__name__)

WINDOW_TOKENS = 32  # an account is taken after so many tokens
REST_TOKENS = 512  # a predictor that did not pay is tried again after so many


class _Routed(Exception):
    """Not an error: it carries the router's choice out of a block."""

    def __init__(self, indices: mx.array) -> None:
        super().__init__()
        self.indices = indices


def _leave_block(experts: StreamedExperts, x: mx.array, indices: mx.array) -> None:
    raise _Routed(indices)


class Lookahead:
    """The next expert layer's router, applied to this layer's input.

    Args:
        streamed: expert layers in the order they run.
        hidden: width of the hidden state; layers whose experts see another width are not predicted.
    """

    def __init__(
        self,
        model: nn.Module,
        streamed: Sequence[StreamedExperts],
        slot: ExecutorSlot,
        *,
        hidden: int,
        dtype: mx.Dtype,
    ) -> None:
        self._slot = slot
        self._next: dict[int, tuple[StreamedExperts, nn.Module]] = {}
        for here, there in pairwise(streamed):
            block = parent_block(model, there)
            if block is None or here.mlp.layer.input_dims != hidden:
                continue
            if self._routes(there, block, mx.zeros((1, 1, hidden), dtype=dtype)):
                self._next[here.mlp.layer.index] = (there, block)

    @property
    def layers(self) -> int:
        """Layers that are predicted."""
        return len(self._next)

    def next_layer(self, experts: StreamedExperts) -> StreamedExperts | None:
        """Whose experts :meth:`route` names."""
        found = self._next.get(experts.mlp.layer.index)
        return None if found is None else found[0]

    def route(self, experts: StreamedExperts, x: mx.array) -> mx.array | None:
        """Lazy ``[T, K]`` expert ids of the next layer from ``x [..., D]``, or None."""
        found = self._next.get(experts.mlp.layer.index)
        if found is None:
            return None
        return self._indices(found[1], x.reshape(1, -1, x.shape[-1]))

    def _routes(self, there: StreamedExperts, block: nn.Module, x: mx.array) -> bool:
        """Whether the block can be asked: some take more than the hidden state."""
        try:
            indices = self._indices(block, x)
            mx.eval(indices)
        except Exception as error:
            log.debug("no lookahead into %s: %s", there.mlp.layer.name, error)
            return False
        return indices is not None

    def _indices(self, block: nn.Module, x: mx.array) -> mx.array | None:
        restore = set_executor(self._slot, _leave_block)
        try:
            block(x)
        except _Routed as routed:
            return routed.indices.reshape(-1, routed.indices.shape[-1])
        finally:
            restore()
        return None


class PreviousToken:
    """The experts that the last token used, by layer."""

    def __init__(self) -> None:
        self._last: dict[int, np.ndarray] = {}

    def note(self, layer: int, experts: Sequence[int] | np.ndarray) -> None:
        """What a layer just routed to."""
        self._last[layer] = np.asarray(experts)

    def experts(self, layer: int) -> np.ndarray:
        """Ids, possibly none."""
        return self._last.get(layer, np.empty(0, dtype=np.int64))


@dataclass
class PredictionCounts:
    """Since the engine was opened.

    Attributes:
        predicted: experts named for layers that then ran.
        correct: of these, routed to.
        routed: experts routed to in predicted layers; recall is correct / routed.
        saved_seconds: of waiting, estimated from when each read began and when it was needed.
        cost_seconds: spent on predicting, and the disk's time for guesses nobody used.
    """

    predicted: int = 0
    correct: int = 0
    routed: int = 0
    saved_seconds: float = 0.0
    cost_seconds: float = 0.0

    @property
    def recall(self) -> float:
        """Of the experts that were routed to, the share that was predicted."""
        return self.correct / self.routed if self.routed else 0.0

    def as_tuple(self) -> tuple[int, int, int]:
        """``(predicted, correct, routed)``."""
        return self.predicted, self.correct, self.routed


class PayMeter:
    """Switches prediction off when it costs more than it saves, and tries it again later."""

    def __init__(self, *, always: bool) -> None:
        self._always = always
        self._saved = self._cost = 0.0
        self._tokens = 0
        self._resting = 0
        self.switched_off = 0

    @property
    def active(self) -> bool:
        """Whether to predict now."""
        return self._always or not self._resting

    def token(self, saved_seconds: float, cost_seconds: float) -> None:
        """Account for one token."""
        if self._resting:
            self._resting -= 1
            return
        self._saved += saved_seconds
        self._cost += cost_seconds
        self._tokens += 1
        if self._tokens >= WINDOW_TOKENS:
            if self._saved <= self._cost and not self._always:
                self._resting = REST_TOKENS
                self.switched_off += 1
            self._saved = self._cost = 0.0
            self._tokens = 0
