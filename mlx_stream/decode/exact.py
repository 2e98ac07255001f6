"""The exact path: read the experts the router asked for, from the cache or the file.

Slow and always right. Works with any cache of one record or more: the routed set is then computed
in parts. The outputs go to their ``[T, K, D]`` places, so results do not depend on what was cached.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_stream import interrupts
from mlx_stream.backends.base import Backend, ChunkInput, ExpertMlp, LayerComputation
from mlx_stream.decode.expert_cache import ExpertCache, Record
from mlx_stream.experts.streamed_experts import StreamedExperts


class ExactExecutor:
    """Computes expert calls outside prefill. Compute thread only."""

    def __init__(self, backend: Backend, cache: ExpertCache) -> None:
        self._backend = backend
        self._cache = cache
        self.stall_seconds = 0.0

    def __call__(self, experts: StreamedExperts, x: mx.array, indices: mx.array) -> Any:
        interrupts.check()
        flat_x = x.reshape(-1, x.shape[-1])
        flat_ids = indices.reshape(-1, indices.shape[-1])
        mx.eval(flat_x, flat_ids)
        chunk = ChunkInput(flat_x, np.array(flat_ids, copy=True), None)
        computation = self._backend.begin_layer(experts.mlp, [chunk])
        needed = np.unique(chunk.indices).tolist()
        try:
            self._compute(experts.mlp, needed, computation)
        except BaseException:
            self._cache.abandon_pending()
            raise
        (y,) = computation.outputs()
        return y.reshape(*indices.shape, y.shape[-1])

    def _compute(
        self, mlp: ExpertMlp, needed: Sequence[int], computation: LayerComputation
    ) -> None:
        """Hits compute while misses are read; slots are reused when the cache is small."""
        hits, misses = [], []
        for expert in needed:
            record = self._cache.lookup(mlp, expert)
            (hits if record is not None else misses).append(record or expert)
        pinned = {record.key for record in hits}
        pending = self._start(mlp, misses, pinned)
        if hits:
            computation.add([record.published for record in hits]).wait()
        pinned.clear()
        if not pending:  # the hits may have held every slot
            pending = self._start(mlp, misses, pinned)
        while pending:
            started = time.perf_counter()
            for record in pending:
                self._cache.finish_read(record)
            self.stall_seconds += time.perf_counter() - started
            computation.add([record.published for record in pending]).wait()
            pinned.clear()
            pending = self._start(mlp, misses, pinned)

    def _start(
        self, mlp: ExpertMlp, misses: list[int], pinned: set[tuple[int, int]]
    ) -> list[Record]:
        """Start as many reads as there are slots; takes them off `misses`."""
        started: list[Record] = []
        while misses:
            record = self._cache.start_read(mlp, misses[0], pinned)
            if record is None:
                break
            misses.pop(0)
            pinned.add(record.key)
            started.append(record)
        assert started or not misses or pinned, "no slot although nothing is pinned"
        return started
