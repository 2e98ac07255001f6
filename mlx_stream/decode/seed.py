"""Seed the decode cache with what prefill routed to, while it is in memory anyway.

Costs memory traffic and no read. Who is kept is a policy's choice (seed_policy.py); a
static hot list adds its scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from mlx_stream.backends.base import ExpertMlp, HostBuffer
from mlx_stream.decode.expert_cache import ExpertCache
from mlx_stream.decode.hot_list import HotList
from mlx_stream.decode.seed_policy import best_experts, layer_share, seed_scores
from mlx_stream.decode.step_counts import RoutingObserver
from mlx_stream.storage.read_plan import GroupRead

# Copies run on the compute thread; beyond a few routed sets, or a few tens of megabytes a layer,
# they cost more than they save.
ROUTED_SETS = 2
LAYER_NBYTES = 48 << 20


class PromptSeeder:
    """Keeps experts of every layer while they stream by; every layer has an equal share.

    Args:
        layers: expert layers of the model.
        policy: one of SEED_POLICIES.
        hot_list: scores that are added to the prompt's own.
        observer: told the routing of every layer.
    """

    def __init__(
        self,
        cache: ExpertCache,
        layers: int,
        policy: str,
        *,
        hot_list: HotList | None = None,
        observer: RoutingObserver | None = None,
    ) -> None:
        self._cache = cache
        self._layers = layers
        self._policy = policy
        self._hot = {h.index: h.scores_by_id() for h in (hot_list.layers if hot_list else ())}
        self._observer = observer
        self._seen = 0
        self._scores: dict[int, np.ndarray] = {}
        self.kept = 0

    def choose(self, mlp: ExpertMlp, indices: Sequence[np.ndarray]) -> frozenset[int]:
        """The layer's share of experts, from the routed ids of each chunk ``[C, K]``."""
        routed = np.concatenate(list(indices))
        if self._observer is not None:
            self._observer(mlp.layer.index, routed, True)
        share = self._share(routed.shape[1])
        scores = seed_scores(self._policy, routed, mlp.layer.num_experts)
        if mlp.layer.index in self._hot:
            scores = scores + self._hot[mlp.layer.index]
        self._scores[mlp.layer.index] = scores
        return frozenset(best_experts(scores, share))

    def keep(
        self, mlp: ExpertMlp, experts: Iterable[int], read: GroupRead, buffer: HostBuffer
    ) -> None:
        """Copy the chosen experts; costs memory traffic, no read."""
        scores = self._scores[mlp.layer.index]
        for expert in experts:
            self.kept += self._cache.copy_in(mlp, expert, read, buffer, float(scores[expert]))

    def _share(self, top_k: int) -> int:
        share = layer_share(self._cache.capacity, self._seen, self._layers)
        self._seen = (self._seen + 1) % self._layers
        return min(share, max(ROUTED_SETS * top_k, LAYER_NBYTES // self._cache.slot_nbytes))
