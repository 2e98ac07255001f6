"""Layer-major prefill: all tokens pass layer L before any passes L+1, so experts are read once.

While the chunks of layer L compute, reader threads already fill the staging slots with the next
groups in file order, across layer boundaries. Execution follows a PrefillPlan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_stream.backends.base import Backend, ChunkInput, ExpertMlp, HostBuffer, LayerComputation
from mlx_stream.errors import RendezvousError
from mlx_stream.experts.staging import StagingRing
from mlx_stream.experts.streamed_experts import (
    Executor,
    ExecutorSlot,
    StreamedExperts,
    set_executor,
)
from mlx_stream.prefill.cache_views import cache_arrays, cache_offset, cache_view
from mlx_stream.prefill.hooks import PrefillHooks
from mlx_stream.prefill.rendezvous import Arrival, ChunkExecutor, Rendezvous
from mlx_stream.prefill.schedule import PrefillPlan, PrefillProgress
from mlx_stream.storage.read_plan import GroupRead, plan_group
from mlx_stream.storage.reader import Reader
from mlx_stream.timeline import span


class ExpertSeeder(Protocol):
    """Decides which experts stay in memory for decode while they stream by."""

    def choose(self, mlp: ExpertMlp, indices: Sequence[np.ndarray]) -> frozenset[int]:
        """Experts of this layer to keep, from the routed ids of each chunk ``[C, K]``."""

    def keep(
        self, mlp: ExpertMlp, experts: Iterable[int], read: GroupRead, buffer: HostBuffer
    ) -> None:
        """Copy experts out of a filled slot."""


@dataclass
class PrefillCounts:
    """What happened, for the receipt."""

    used: dict[int, np.ndarray] = field(default_factory=dict)
    distinct_expert_bytes: int = 0
    stall_seconds: float = 0.0
    kv_peak_bytes: int = 0  # of caches in memory, when chunks meet

    def add(self, mlp: ExpertMlp, experts: np.ndarray) -> None:
        """Count experts that tokens used; each once per prompt."""
        seen = self.used.setdefault(mlp.layer.index, np.zeros(mlp.layer.num_experts, dtype=bool))
        fresh = experts[~seen[experts]]
        seen[fresh] = True
        self.distinct_expert_bytes += len(fresh) * mlp.layer.expert_nbytes


class LayerMajorPrefill:
    """Runs one prompt by plan. The model's caches are updated in place.

    Args:
        model: an mlx-lm model whose switch layers are StreamedExperts.
        streamed: those modules, in layer order.
        ring: staging slots, sized by the plan.
        fallback: executor for expert calls outside a chunk.
        progress: called after every layer, and must not raise.
        hooks: look on, and may start the prefill further on.
        watch: called with every layer and its chunks, before they are computed.
    """

    def __init__(
        self,
        model: nn.Module,
        streamed: Sequence[StreamedExperts],
        backend: Backend,
        reader: Reader,
        ring: StagingRing,
        slot: ExecutorSlot,
        *,
        fallback: Executor | None = None,
        seeder: ExpertSeeder | None = None,
        progress: Callable[[PrefillProgress], None] | None = None,
        hooks: PrefillHooks | None = None,
        watch: Callable[[ExpertMlp, Sequence[ChunkInput]], None] | None = None,
    ) -> None:
        self._model = model
        self._streamed = list(streamed)
        self._backend = backend
        self._reader = reader
        self._ring = ring
        self._slot = slot
        self._executor = ChunkExecutor(fallback)
        self._seeder = seeder
        self._progress = progress
        self._hooks = hooks or PrefillHooks()
        self._watch = watch
        self._first = (0, 0)  # segment and expert layer to start with
        self._past = 0  # tokens in the cache before the prompt
        self._timeline = reader.timeline
        self.counts = PrefillCounts()

    def run(self, plan: PrefillPlan, tokens: np.ndarray, cache: list[Any]) -> mx.array:
        """Prefill `tokens` ``[N]`` onto `cache`; returns the last position's logits ``[V]``.

        On any exception reads are cancelled and every chunk is ended before it propagates; the
        cache is then in an undefined state (see CacheSnapshot).
        """
        assert len(tokens) == plan.prompt_tokens
        started, bytes_before = time.perf_counter(), self._reader.counters.bytes
        restore = set_executor(self._slot, self._executor)
        logits: mx.array | None = None
        self._past = cache_offset(cache)
        try:
            self._first = self._hooks.begin(cache)
            if plan.mode == "stream":
                self._ring.enqueue(self._stream_reads(plan))
            for number in range(self._first[0], len(plan.segments)):
                report = self._reporter(plan, number, started, bytes_before)
                logits = self._run_segment(plan, number, tokens, cache, report)
            self._ring.drain()
        except BaseException:
            self._ring.cancel()
            raise
        finally:
            restore()
            self.counts.stall_seconds = self._ring.stall_seconds
        assert logits is not None
        return logits

    def _stream_reads(self, plan: PrefillPlan) -> Iterator[GroupRead]:
        """Every group of every layer in file order, once per segment."""
        reads = [
            [
                self._group_read(experts.mlp, experts.mlp.layer.experts_at(range(a, b)))
                for a, b in layer.groups
            ]
            for experts, layer in zip(self._streamed, plan.layers, strict=True)
        ]
        first, done = self._first
        for number in range(first, len(plan.segments)):
            for of_layer in reads[done if number == first else 0 :]:
                yield from of_layer

    def _group_read(self, mlp: ExpertMlp, experts: Sequence[int]) -> GroupRead:
        return plan_group(
            mlp.layer, experts, align=self._reader.align, file_sizes=self._reader.file_sizes
        )

    def _run_segment(
        self,
        plan: PrefillPlan,
        number: int,
        tokens: np.ndarray,
        cache: list[Any],
        report: Callable[[int], None],
    ) -> mx.array | None:
        segment = plan.segments[number]
        last: list[mx.array] = []

        def body(chunk: int, start: int, stop: int) -> None:
            views = [cache_view(c, self._past + start) for c in cache]
            views = self._hooks.enter_chunk(number, chunk, views)
            logits = self._model(mx.array(tokens[None, start:stop]), cache=views)
            if stop == plan.prompt_tokens:
                last.append(logits[0, -1])

        def nothing(_: int) -> None:
            return

        bodies = [partial(body, n, a, b) for n, (a, b) in enumerate(segment.chunks)]
        with Rendezvous(bodies) as rendezvous:
            layer = self._first[1] if number == self._first[0] else 0
            with span(self._timeline, "attention", layer=layer):
                more = rendezvous.start(nothing)
            while more:
                self._settle(cache)
                self._hooks.meeting(number, segment, layer, cache)
                with span(self._timeline, "experts", layer=layer):
                    outputs = self._run_layer(plan, layer, rendezvous.arrivals())
                layer += 1
                with span(self._timeline, "attention", layer=layer):
                    more = rendezvous.resume(outputs, nothing)
                report(layer)
        if layer != len(self._streamed):
            raise RendezvousError(
                "the model ended before its last expert layer",
                expected=f"{len(self._streamed)} expert layers",
                actual=layer,
                remedy="pass a prompt cache of this very model",
            )
        mx.eval(last)
        self._settle(cache)
        self._hooks.end_segment(number, segment, cache)
        return last[0] if last else None

    def _settle(self, cache: list[Any]) -> None:
        arrays = cache_arrays(cache)
        mx.eval(arrays)
        held = sum(a.nbytes for a in arrays)
        self.counts.kv_peak_bytes = max(self.counts.kv_peak_bytes, held)

    def _run_layer(self, plan: PrefillPlan, layer: int, arrivals: list[Arrival]) -> list[mx.array]:
        mlp = arrivals[0].experts.mlp
        expected = self._streamed[layer].mlp if layer < len(self._streamed) else None
        if mlp is not expected:
            raise RendezvousError(
                "the model runs its expert layers in another order than the plan",
                tensor=mlp.layer.name,
                expected=expected.layer.name if expected else "the end of the model",
                actual=mlp.layer.name,
                remedy="report this model family; mlx_lm runs it without streaming",
            )
        indices = [a.indices for a in arrivals]
        used = np.unique(np.concatenate([i.reshape(-1) for i in indices]))
        chunks = [ChunkInput(a.x, a.indices, a.scores) for a in arrivals]
        if self._watch is not None:
            self._watch(mlp, chunks)
        computation = self._backend.begin_layer(mlp, chunks)
        self.counts.add(mlp, used)
        groups = len(plan.layers[layer].groups)
        if plan.mode == "union":
            reads = [
                self._group_read(mlp, used[i : i + plan.group_size].tolist())
                for i in range(0, len(used), plan.group_size)
            ]
            groups = len(reads)
            self._ring.enqueue(reads)
        keep = self._seeder.choose(mlp, indices) if self._seeder else frozenset()
        for _ in range(groups):
            self._run_group(mlp, computation, keep)
        outputs = computation.outputs()
        mx.eval(outputs)
        return outputs

    def _run_group(
        self, mlp: ExpertMlp, computation: LayerComputation, keep: frozenset[int]
    ) -> None:
        with span(self._timeline, "stall", layer=mlp.layer.index):
            slot = self._ring.next()
        read = slot.read
        assert read is not None
        assert read.layer == mlp.layer.index, "reads and layers out of step"
        fence = computation.add([self._backend.publish(mlp, read, slot.buffer)])
        stay = keep.intersection(read.experts)
        if stay and self._seeder is not None:
            self._seeder.keep(mlp, sorted(stay), read, slot.buffer)
        self._ring.release(slot, fence)

    def _reporter(
        self, plan: PrefillPlan, segment: int, started: float, bytes_before: int
    ) -> Callable[[int], None]:
        def report(layer: int) -> None:
            if self._progress is not None:
                self._progress(
                    PrefillProgress(
                        segment=segment,
                        segments=len(plan.segments),
                        layer=layer,
                        layers=len(plan.layers),
                        bytes_read=self._reader.counters.bytes - bytes_before,
                        bytes_planned=plan.planned_read_nbytes,
                        seconds=time.perf_counter() - started,
                    )
                )

        return report
