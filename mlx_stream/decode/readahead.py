"""Reads ahead on predictions, for the exact path: next layer's likely experts, while this one runs.

Owns no memory: guesses live in the expert cache, in slots set aside for them.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import mlx.core as mx
import numpy as np

from mlx_stream.backends.base import ExpertMlp
from mlx_stream.decode.expert_cache import ExpertCache
from mlx_stream.decode.predict import Lookahead, PayMeter, PredictionCounts, PreviousToken
from mlx_stream.decode.slots import Key
from mlx_stream.experts.streamed_experts import StreamedExperts

GUESS_SETS = 2  # slots for guesses, in routed sets
LEAST_SETS = 6  # a cache of fewer routed sets cannot spare slots for guesses
RATE_WEIGHT = 0.1  # of the newest read in the running mean


class ReadAhead:
    """Decides what to read ahead, and keeps the account. Compute thread only.

    Args:
        lookahead: None predicts by the previous token alone.
        following: ``layer index -> the expert layer that runs next``.
        top_k: experts a token.
        always: never switch off.
    """

    def __init__(
        self,
        cache: ExpertCache,
        lookahead: Lookahead | None,
        following: dict[int, StreamedExperts],
        *,
        top_k: int,
        always: bool,
    ) -> None:
        self._cache = cache
        self._lookahead = lookahead
        self._following = following
        self._top_k = top_k
        self._previous = PreviousToken()
        self._expected: dict[int, frozenset[int]] = {}
        self._read_seconds = 0.0  # running mean of one guess's read
        self._saved = self._cost = 0.0
        self._wasted_before = 0
        self.meter = PayMeter(always=always)
        self.counts = PredictionCounts()

    @property
    def active(self) -> bool:
        """Whether to predict in this step; also gives guesses their slots, or takes them back."""
        room = self._cache.capacity >= LEAST_SETS * self._top_k
        active = self.meter.active and room
        self._cache.guess_limit = GUESS_SETS * self._top_k if active else 0
        return active

    def route(self, experts: StreamedExperts, x: mx.array) -> mx.array | None:
        """Lazy ids ``[T, K]`` for the next layer, to be evaluated with this layer's own."""
        if self._lookahead is None:
            return None
        started = time.perf_counter()
        guess = self._lookahead.route(experts, x)
        self._spend(time.perf_counter() - started)
        return guess

    def check(self, mlp: ExpertMlp, needed: Sequence[int]) -> None:
        """The layer has routed: count what was foreseen, before the experts are looked up."""
        layer = mlp.layer.index
        expected = self._expected.pop(layer, None)
        self._previous.note(layer, needed)
        self._cache.collect_guesses()
        if expected is None:
            return
        right = expected.intersection(needed)
        self.counts.predicted += len(expected)
        self.counts.correct += len(right)
        self.counts.routed += len(needed)
        now = time.perf_counter()
        for expert in right:
            record = self._cache.record((layer, expert))
            if record is not None and record.guess:
                lead = now - record.started
                self._save(lead if record.arrival is not None else min(lead, self._read_seconds))

    def start(
        self, experts: StreamedExperts, guess: mx.array | None, in_use: Collection[Key]
    ) -> None:
        """Begin to read what the next layer will probably want, best first."""
        following = self._following.get(experts.mlp.layer.index)
        if following is None:
            return
        layer = following.mlp.layer.index
        if guess is not None:
            wanted = np.unique(np.array(guess)).tolist()
        else:
            wanted = self._previous.experts(layer).tolist()
        if not wanted:
            return
        self._expected[layer] = frozenset(wanted)
        for expert in wanted[: self._cache.guess_limit]:
            if (layer, expert) not in self._cache:
                self._cache.guess(following.mlp, expert, in_use)

    def finish_layer(self, mlp: ExpertMlp, in_use: Collection[Key]) -> None:
        """Its guesses have begun already."""

    def finish_token(self, read_seconds_each: float) -> None:
        """Close the token's account.

        Args:
            read_seconds_each: what one record's read takes, as the reader saw it; 0 if unknown.
        """
        if read_seconds_each:
            old = self._read_seconds or read_seconds_each
            self._read_seconds = (1 - RATE_WEIGHT) * old + RATE_WEIGHT * read_seconds_each
        wasted = self._cache.counts.wasted_nbytes - self._wasted_before
        self._wasted_before = self._cache.counts.wasted_nbytes
        self._spend(self._read_seconds * wasted / self._cache.slot_nbytes)
        self.meter.token(self._saved, self._cost)
        self._saved = self._cost = 0.0

    def _save(self, seconds: float) -> None:
        self._saved += seconds
        self.counts.saved_seconds += seconds

    def _spend(self, seconds: float) -> None:
        self._cost += seconds
        self.counts.cost_seconds += seconds
