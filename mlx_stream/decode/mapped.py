"""The hot and staged paths: a whole step without the router's choice coming back to the host.

Experts are gathered from stacked slots through a slot map on the device. The step is computed as if
everything were in memory; flags say whether it was, and are read once, with the logits. When an
expert was missing the step's result is thrown away and the exact path takes the step again: a
missing expert is never computed with.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from mlx_stream import interrupts
from mlx_stream.backends.base import ABSENT, Backend, ExpertMlp, ResidentSlots
from mlx_stream.decode.expert_cache import ExpertCache
from mlx_stream.decode.planar_slots import PlanarSlots
from mlx_stream.decode.step_counts import RoutingObserver
from mlx_stream.experts.streamed_experts import StreamedExperts


class MappedExecutor:
    """Computes expert calls lazily from the stacked slots. Compute thread only.

    Between :meth:`begin` and :meth:`commit` or :meth:`begin` the cache must not change.
    """

    def __init__(self, backend: Backend, cache: ExpertCache) -> None:
        assert isinstance(cache.store, PlanarSlots)
        self._backend = backend
        self._cache = cache
        self._store = cache.store
        self._routed: list[tuple[ExpertMlp, mx.array]] = []
        self._missing: list[mx.array] = []
        self.observer: RoutingObserver | None = None

    def begin(self) -> None:
        """Forget the step before."""
        self._routed.clear()
        self._missing.clear()

    def __call__(self, experts: StreamedExperts, x: mx.array, indices: mx.array) -> Any:
        interrupts.check()
        mlp = experts.mlp
        flat_x = x.reshape(-1, x.shape[-1])
        flat_ids = indices.reshape(-1, indices.shape[-1])
        slots = self._slots(mlp)
        self._routed.append((mlp, flat_ids))
        if self._cache.residency.count(mlp.layer.index) < mlp.layer.num_experts:
            self._missing.append((slots.slot_map[flat_ids] == ABSENT).any())
        y = self._backend.mapped_mlp(mlp, slots, flat_x, flat_ids)
        return y.reshape(*indices.shape, y.shape[-1])

    def pending(self) -> list[mx.array]:
        """What must be evaluated together with the step's logits."""
        return [ids for _, ids in self._routed] + self._missing

    def complete(self) -> bool:
        """Whether every expert was in memory; after `pending` was evaluated."""
        return not any(bool(flag.item()) for flag in self._missing)

    def commit(self) -> None:
        """Count the step's experts as used."""
        for mlp, ids in self._routed:
            host = np.array(ids)
            if self.observer is not None:
                self.observer(mlp.layer.index, host, False)
            for expert in np.unique(host).tolist():
                self._cache.lookup(mlp, expert)
        self.begin()

    def _slots(self, mlp: ExpertMlp) -> ResidentSlots:
        layer, maps = mlp.layer.index, self._store.maps
        known = maps.get(layer)
        if self._cache.residency.take_changed(layer) or known is None:
            host = np.full(mlp.layer.num_experts, ABSENT, dtype=np.int32)
            for expert in range(mlp.layer.num_experts):
                record = self._cache.record((layer, expert))
                if record is not None and record.arrival is None:
                    host[expert] = record.slot
            store = self._store
            maps[layer] = known = ResidentSlots(
                mx.array(host), host, store.planes, store.memory, store.starts
            )
        return known
