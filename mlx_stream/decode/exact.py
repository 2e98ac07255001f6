"""The exact path: read the experts the router asked for, from the cache or the file.

Always right, with any cache of one record or more: the routed set is then computed in parts. The
outputs go to their ``[T, K, D]`` places, so results do not depend on what was cached. One host sync
a layer: the router's choice comes back together with all work that came before it. Misses are read
while the experts in memory compute, and with prediction on, the next layer's likely experts after
them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_stream import interrupts
from mlx_stream.backends.base import Backend, ChunkInput, ExpertMlp, Fence, LayerComputation
from mlx_stream.decode.expert_cache import ExpertCache
from mlx_stream.decode.readahead import ReadAhead
from mlx_stream.decode.slots import Key, Record
from mlx_stream.decode.step_counts import RoutingObserver, StepCounts
from mlx_stream.experts.streamed_experts import StreamedExperts
from mlx_stream.timeline import COMPUTE, Timeline


class ExactExecutor:
    """Computes expert calls outside prefill. Compute thread only.

    Attributes:
        counts: what the current step cost so far; the caller resets them.
        ahead: reads ahead on predictions, or None.
        observer: called with every layer's routing.
    """

    def __init__(self, backend: Backend, cache: ExpertCache, counts: StepCounts) -> None:
        self._backend = backend
        self._cache = cache
        self.counts = counts
        self.ahead: ReadAhead | None = None
        self.observer: RoutingObserver | None = None
        self.timeline: Timeline | None = None
        # Work that may still run on the device, and the records it reads.
        self._fences: list[Fence] = []
        self._in_use: set[Key] = set()

    def __call__(self, experts: StreamedExperts, x: mx.array, indices: mx.array) -> Any:
        interrupts.check()
        flat_x = x.reshape(-1, x.shape[-1])
        flat_ids = indices.reshape(-1, indices.shape[-1])
        ahead = self.ahead if self.ahead is not None and self.ahead.active else None
        guess = ahead.route(experts, x) if ahead is not None else None
        mx.eval([flat_x, flat_ids] if guess is None else [flat_x, flat_ids, guess])
        self.counts.syncs += 1
        self._settle(expected=True)
        ids = np.array(flat_ids, copy=True)
        if self.observer is not None:
            self.observer(experts.mlp.layer.index, ids, False)
        chunk = ChunkInput(flat_x, ids, None)
        computation = self._backend.begin_decode(experts.mlp, chunk)
        needed = np.unique(ids).tolist()
        try:
            if ahead is not None:
                ahead.check(experts.mlp, needed)
            self._compute(experts, needed, computation, guess, ahead)
        except BaseException:
            self._cache.abandon_pending()
            self._fences.clear()
            self._in_use.clear()
            raise
        (y,) = computation.outputs()
        return y.reshape(*indices.shape, y.shape[-1])

    def finish_step(self) -> None:
        """After the step's logits were evaluated: nothing is in use any more."""
        self._settle(expected=True)

    def _compute(
        self,
        experts: StreamedExperts,
        needed: Sequence[int],
        computation: LayerComputation,
        guess: mx.array | None,
        ahead: ReadAhead | None,
    ) -> None:
        """Hits compute while misses are read; slots are reused when the cache is small."""
        mlp = experts.mlp
        hits, pending, misses = self._look_up(mlp, needed)
        self._in_use.update(r.key for r in hits)
        self._in_use.update(r.key for r in pending)
        pending += self._start(mlp, misses)
        if ahead is not None:
            ahead.start(experts, guess, self._in_use)
        if hits:
            self._add(mlp, computation, hits)
        while pending or misses:
            if not pending:  # the records in use hold every slot
                self._settle(expected=False)
                pending = self._start(mlp, misses)
                assert pending, "no slot although nothing is in use"
            self._add(mlp, computation, self._next_ready(pending))
            pending += self._start(mlp, misses)

    def _look_up(
        self, mlp: ExpertMlp, needed: Sequence[int]
    ) -> tuple[list[Record], list[Record], list[int]]:
        hits, pending, misses = [], [], []
        for expert in needed:
            record = self._cache.lookup(mlp, expert)
            if record is None:
                misses.append(expert)
            else:
                (hits if record.arrival is None else pending).append(record)
        return hits, pending, misses

    def _start(self, mlp: ExpertMlp, misses: list[int]) -> list[Record]:
        """Start as many reads as there are slots; takes them off `misses`."""
        started: list[Record] = []
        while misses:
            record = self._cache.start_read(mlp, misses[0], self._in_use)
            if record is None:
                break
            misses.pop(0)
            self._in_use.add(record.key)
            started.append(record)
        return started

    def _next_ready(self, pending: list[Record]) -> list[Record]:
        """Wait for the oldest read; takes it and those that came with it off `pending`."""
        started = time.perf_counter()
        ready = [pending.pop(0)]
        self._cache.finish_read(ready[0])
        now = time.perf_counter()
        self.counts.stall_seconds += now - started
        if self.timeline is not None:
            self.timeline.add(COMPUTE, "stall", started, now, layer=ready[0].key[0])
        for record in [r for r in pending if r.arrival is None or r.arrival.done()]:
            pending.remove(record)
            self._cache.finish_read(record)
            ready.append(record)
        return ready

    def _add(
        self, mlp: ExpertMlp, computation: LayerComputation, records: Sequence[Record]
    ) -> None:
        fence = computation.add(self._cache.store.groups(mlp, records))
        if fence.passed():
            self._in_use.difference_update(r.key for r in records)
        else:
            self._fences.append(fence)

    def _settle(self, *, expected: bool) -> None:
        """Nothing reads a record after this. Right after a sync it waits for nothing."""
        if self._fences and not expected:
            self.counts.syncs += 1
        for fence in self._fences:
            fence.wait()
        self._fences.clear()
        self._in_use.clear()
