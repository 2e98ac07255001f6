"""Layers whose records are worth more than others: their misses are waited for.

With predicted routing the reads of predicted layers begin ahead, so that a miss there costs bytes
only. In the other layers the token stands still. So the victim is looked for elsewhere first, as
long as the spared layers hold no more records than they are granted.
"""

from __future__ import annotations

from collections.abc import Collection

from mlx_stream.decode.policy import EvictionPolicy
from mlx_stream.decode.residency import Residency
from mlx_stream.decode.slots import Key

NO_LAYERS: frozenset[int] = frozenset()


class SparedLayers:
    """Stands between a cache and its policy when a victim is chosen.

    Attributes:
        layers: their indices.
        limit: records of them all that are spared; with more than these they are like any other.
    """

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self.layers = NO_LAYERS
        self.limit = 0

    def spare(self, layers: frozenset[int], limit: int) -> None:
        """From now on; no layers: nothing is spared."""
        self.layers, self.limit = layers, limit

    def victim(self, policy: EvictionPolicy, pinned: Collection[Key]) -> Key | None:
        """Who leaves; a spared record only when there is no other. None when all are pinned."""
        held = sum(map(self._residency.count, self.layers))
        if self.layers and held <= self.limit:
            found = policy.victim(pinned, self.layers)
            if found is not None:
                return found
        return policy.victim(pinned)
