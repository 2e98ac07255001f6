"""Seed the decode cache with what prefill routed to last, while it is in memory anyway."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from mlx_stream.backends.base import ExpertMlp, HostBuffer
from mlx_stream.decode.expert_cache import ExpertCache
from mlx_stream.storage.read_plan import GroupRead

RECENT_TOKENS = 64
# Copies run on the compute thread; beyond a few routed sets, or a few tens of megabytes a layer,
# they cost more than they save.
ROUTED_SETS = 2
LAYER_NBYTES = 48 << 20


class RecentTokensSeeder:
    """Keeps the experts of the last prompt token, then the most used ones of the tokens before.

    Later tokens weigh more.

    Every layer gets an equal share of the cache's records, at most a few routed sets.
    """

    def __init__(self, cache: ExpertCache, layers: int) -> None:
        self._cache = cache
        self._layers = layers
        self._seen = 0
        self.kept = 0

    def choose(self, mlp: ExpertMlp, indices: Sequence[np.ndarray]) -> frozenset[int]:
        """The layer's share of experts, by weighted counts over the recent tokens."""
        share = (self._cache.capacity * (self._seen + 1)) // self._layers
        share -= (self._cache.capacity * self._seen) // self._layers
        self._seen = (self._seen + 1) % self._layers
        cheap = max(ROUTED_SETS * indices[0].shape[1], LAYER_NBYTES // self._cache.slot_nbytes)
        share = min(share, cheap)
        recent = _last_rows(indices, RECENT_TOKENS)
        weights = np.arange(1, len(recent) + 1, dtype=np.float64)
        scores = np.bincount(
            recent.reshape(-1),
            weights=np.repeat(weights, recent.shape[1]),
            minlength=mlp.layer.num_experts,
        )
        scores[recent[-1]] += scores.sum()  # what the very last token used comes first
        best = np.argsort(-scores, kind="stable")[:share]
        return frozenset(int(e) for e in best if scores[e] > 0)

    def keep(
        self, mlp: ExpertMlp, experts: Iterable[int], read: GroupRead, buffer: HostBuffer
    ) -> None:
        """Copy the chosen experts; costs memory traffic, no read."""
        for expert in experts:
            self.kept += self._cache.copy_in(mlp, expert, read, buffer)


def _last_rows(indices: Sequence[np.ndarray], rows: int) -> np.ndarray:
    """The last `rows` rows over consecutive chunks, ``[rows, K]``."""
    taken: list[np.ndarray] = []
    for chunk in reversed(indices):
        taken.append(chunk[-rows:])
        rows -= len(taken[-1])
        if rows <= 0:
            break
    return np.concatenate(taken[::-1])
