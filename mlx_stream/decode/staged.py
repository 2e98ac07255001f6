"""Reads ahead for the staged path: a token's experts, named before the token runs.

Two sets of guess slots take turns: one is being filled for the next token while the step that runs
reads the other. Whoever names the experts (:class:`TokenPredictor`) only hints; what was not named
and is not in memory sends the step to the exact path.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from mlx_stream.backends.base import ExpertMlp
from mlx_stream.decode.expert_cache import ExpertCache
from mlx_stream.decode.step_counts import RoutingObserver

SPARE_SHARE = 4  # at most a quarter of the cache is for guesses


class TokenPredictor(Protocol):
    """Names experts for the token that comes next."""

    def note(self, layer: int, experts: Sequence[int]) -> None:
        """What a layer routed the last token to."""

    def experts(self, layer: int) -> Sequence[int]:
        """Ids the next token is likely to use in a layer, best first."""


class RecentTokens:
    """The experts of the last few tokens, latest first."""

    def __init__(self, tokens: int = 4) -> None:
        self._tokens = tokens
        self._last: dict[int, list[tuple[int, ...]]] = {}

    def note(self, layer: int, experts: Sequence[int]) -> None:
        """Remember a token's experts."""
        self._last[layer] = [tuple(experts), *self._last.get(layer, [])][: self._tokens]

    def experts(self, layer: int) -> Sequence[int]:
        """Without repeats."""
        return list(dict.fromkeys(e for token in self._last.get(layer, []) for e in token))


class TokenAhead:
    """Fills guess slots between steps. Compute thread only."""

    def __init__(
        self,
        cache: ExpertCache,
        mlps: Sequence[ExpertMlp],
        predictor: TokenPredictor,
        *,
        top_k: int,
    ) -> None:
        self._cache, self._mlps, self._predictor = cache, list(mlps), predictor
        self._top_k = top_k

    def watching(self, observer: RoutingObserver | None) -> RoutingObserver:
        """Also tells the predictor what layers route to."""

        def watch(layer: int, ids: np.ndarray, in_prefill: bool) -> None:
            for row in ids:
                self._predictor.note(layer, row.tolist())
            if observer is not None:
                observer(layer, ids, in_prefill)

        return watch

    def collect(self) -> None:
        """Before a step: what has arrived may be used."""
        self._cache.collect_guesses()

    def start(self) -> None:
        """After a step: begin to read what the next token will probably want."""
        cache = self._cache
        want = 2 * self._top_k * len(self._mlps)
        cache.guess_limit = min(want, cache.capacity // SPARE_SHARE)
        if not cache.guess_limit:
            return
        for mlp in self._mlps:
            layer = mlp.layer.index
            absent = [e for e in self._predictor.experts(layer) if (layer, e) not in cache]
            for expert in absent[: self._top_k]:
                cache.guess(mlp, expert, ())
