"""The exact path: read the experts the router asked for, from the cache or the file.

Always right, with any cache of one record or more: the routed set is then computed in parts. The
outputs go to their ``[T, K, D]`` places, so results do not depend on what was cached. One host sync
a layer: the router's choice comes back together with all work that came before it. Misses are read
while the experts in memory compute, and with prediction on, the next layer's likely experts after
them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from mlx_stream import interrupts
from mlx_stream.backends.base import Backend, ChunkInput, ExpertMlp, Fence, LayerComputation
from mlx_stream.decode.expert_cache import ExpertCache
from mlx_stream.decode.predict import PredictionCounts
from mlx_stream.decode.slots import Key, Record
from mlx_stream.decode.step_counts import RoutingObserver, StepCounts
from mlx_stream.experts.streamed_experts import StreamedExperts
from mlx_stream.timeline import COMPUTE, Timeline

ChunkWatch = Callable[[ExpertMlp, Sequence[ChunkInput]], None]
"""Called with a layer and its chunks, in the order of the prompt."""


class Ahead(Protocol):
    """Reads ahead while layers compute; see readahead.py and prerouted_reads.py."""

    counts: PredictionCounts

    @property
    def active(self) -> bool:
        """Whether to ask it in this step."""

    def route(self, experts: StreamedExperts, x: mx.array) -> mx.array | None:
        """Lazy ids ``[T, K]`` to be evaluated with the layer's own, or None."""

    def check(self, mlp: ExpertMlp, needed: Sequence[int]) -> None:
        """The layer has routed; its experts have not been looked up yet."""

    def start(
        self, experts: StreamedExperts, guess: mx.array | None, in_use: Collection[Key]
    ) -> None:
        """The layer's own reads have begun: begin others."""

    def finish_layer(self, mlp: ExpertMlp, in_use: Collection[Key]) -> None:
        """The layer has computed, all but the records in use: more of them may leave."""

    def finish_token(self, read_seconds_each: float) -> None:
        """The step is over."""


class ExactExecutor:
    """Computes expert calls outside prefill. Compute thread only.

    Attributes:
        counts: what the current step cost so far; the caller resets them.
        ahead: reads ahead on predictions, or None.
        held: records that a miss pushes out only when there is no other slot.
        observer: called with every layer's routing.
        watch: called with every layer's input and routing while a prompt runs through.
    """

    def __init__(self, backend: Backend, cache: ExpertCache, counts: StepCounts) -> None:
        self._backend = backend
        self._cache = cache
        self.counts = counts
        self.ahead: Ahead | None = None
        self.held: Collection[Key] = frozenset()
        self.observer: RoutingObserver | None = None
        self.watch: ChunkWatch | None = None
        self.timeline: Timeline | None = None
        # Work that may still run on the device, and the records it reads.
        self._fences: list[Fence] = []
        self._in_use: set[Key] = set()
        self._added = 0  # records of the layer that computed

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
        y = self._run(experts, flat_x, ids, guess, ahead)
        return y.reshape(*indices.shape, y.shape[-1])

    def given(self, experts: StreamedExperts, x: mx.array, ids: np.ndarray) -> mx.array:
        """``[T, K, D]`` for routing ``ids [T, K]`` that the host knows: nothing is read back."""
        interrupts.check()
        flat_x = x.reshape(-1, x.shape[-1])
        if "planes" not in self._backend.capabilities:  # the host computes, once it has prepared
            mx.async_eval(flat_x)
            self.counts.syncs += 1
            self._settle(expected=True)
        y = self._run(experts, flat_x, ids, None, self.ahead)
        self.counts.dropped_experts += len(set(ids.ravel().tolist())) - self._added
        return y

    def _run(
        self,
        experts: StreamedExperts,
        flat_x: mx.array,
        ids: np.ndarray,
        guess: mx.array | None,
        ahead: Ahead | None,
    ) -> mx.array:
        if self.observer is not None:
            self.observer(experts.mlp.layer.index, ids, False)
        chunk = ChunkInput(flat_x, ids, None)
        if self.watch is not None:
            self.watch(experts.mlp, [chunk])
        computation = self._backend.begin_decode(experts.mlp, chunk)
        needed = np.unique(ids).tolist()
        self._added = 0
        try:
            if ahead is not None:
                ahead.check(experts.mlp, needed)
            self._compute(experts, needed, computation, guess, ahead)
            if ahead is not None:
                ahead.finish_layer(experts.mlp, self._in_use)
        except BaseException:
            self._cache.abandon_pending()
            self._fences.clear()
            self._in_use.clear()
            raise
        (y,) = computation.outputs()
        return y

    def finish_step(self) -> None:
        """After the step's logits were evaluated: nothing is in use any more."""
        self._settle(expected=True)

    def _compute(
        self,
        experts: StreamedExperts,
        needed: Sequence[int],
        computation: LayerComputation,
        guess: mx.array | None,
        ahead: Ahead | None,
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
            record = self._cache.start_read(mlp, misses[0], self._in_use.union(self.held))
            if record is None and self.held:
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
        self._added += len(records)
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
