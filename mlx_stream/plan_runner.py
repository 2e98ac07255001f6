"""Executes a prefill plan on a loaded model, and accounts for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_stream.backends.base import Backend
from mlx_stream.budget import MemoryBudget
from mlx_stream.decode.decoder import Decoder
from mlx_stream.decode.exact import ChunkWatch
from mlx_stream.errors import CapabilityError
from mlx_stream.experts.staging import StagingRing
from mlx_stream.loader import LoadedModel
from mlx_stream.prefill.layer_major import LayerMajorPrefill, PrefillCounts
from mlx_stream.prefill.receipts import make_receipt
from mlx_stream.prefill.schedule import PrefillPlan, PrefillProgress
from mlx_stream.resume.options import KeepOptions
from mlx_stream.run_hooks import RunHooks
from mlx_stream.storage.reader import Reader
from mlx_stream.telemetry import Receipt


class PlanRunner:
    """Owns nothing but the staging of a running plan. Compute thread only."""

    def __init__(
        self,
        loaded: LoadedModel,
        backend: Backend,
        reader: Reader,
        budget: MemoryBudget,
        decoder: Decoder,
    ) -> None:
        self._loaded, self._backend, self._reader = loaded, backend, reader
        self._budget, self._decoder = budget, decoder
        self.keep: KeepOptions | None = None  # checkpoints of the prompts from now on
        self.adapter: str | None = None  # fingerprint of the one in force

    def run(
        self,
        plan: PrefillPlan,
        ids: np.ndarray,
        cache: list[Any],
        *,
        ring: StagingRing | None = None,
        progress: Callable[[PrefillProgress], None] | None = None,
    ) -> tuple[mx.array, Receipt]:
        """The last position's logits ``[V]`` and the receipt; the prompt cache moves on.

        Args:
            ring: staging to use, and to close, instead of the plan's own.
        """
        self._decoder.steps.begin_prompt()
        prerouter = self._decoder.prerouter
        if prerouter is None:
            return self._run(plan, ids, cache, ring, progress, None)
        watch = prerouter.begin_prefill(cache)
        if watch is not None and self.keep is not None:
            raise CapabilityError(
                "a prefill whose last position feeds a Prerouter cannot be resumed",
                expected="--prerouter off with prefill checkpoints",
                actual=f"the Prerouter {prerouter.spec.name}",
                remedy="run with --prerouter off, or without checkpoints",
            )
        done = self._run(plan, ids, cache, ring, progress, watch)
        with self._backend.compute_scope():
            prerouter.end_prefill(cache)
        return done

    def _run(
        self,
        plan: PrefillPlan,
        ids: np.ndarray,
        cache: list[Any],
        ring: StagingRing | None,
        progress: Callable[[PrefillProgress], None] | None,
        watch: ChunkWatch | None,
    ) -> tuple[mx.array, Receipt]:
        if plan.mode == "cached":
            return self._run_cached(plan, ids, cache, progress, watch)
        started, before = time.perf_counter(), self._reader.counters
        mx.reset_peak_memory()
        seeder = self._decoder.make_seeder()
        hooks = RunHooks(
            plan, ids, cache, self._loaded, self._backend, self.keep, adapter=self.adapter
        )
        try:
            ring = ring or StagingRing(self._backend, self._reader, plan.slot_nbytes, plan.slots)
            job = LayerMajorPrefill(
                self._loaded.model,
                self._loaded.streamed,
                self._backend,
                self._reader,
                ring,
                self._loaded.slot,
                fallback=self._decoder.exact,
                seeder=seeder,
                progress=progress,
                hooks=hooks,
                watch=watch,
            )
            with self._backend.compute_scope():
                logits = job.run(plan, ids, cache)
            ring.close()
            hooks.finish()
            wall, after = time.perf_counter() - started, self._reader.counters
            peak = self._backend.memory().peak
        finally:
            if ring is not None:
                ring.close()
            hooks.close()
        return logits, make_receipt(
            plan,
            job.counts,
            self._backend,
            (before, after),
            wall_seconds=wall,
            peak_bytes=peak,
            budget_bytes=self._budget.total,
            io_mode=self._reader.io_mode,
            cached_experts=seeder.kept,
            weighted_layers=self._loaded.combined_layers,
            resumed_layers=hooks.resumed_layers,
            notes=hooks.notes,
        )

    def _run_cached(
        self,
        plan: PrefillPlan,
        ids: np.ndarray,
        cache: list[Any],
        progress: Callable[[PrefillProgress], None] | None,
        watch: ChunkWatch | None,
    ) -> tuple[mx.array, Receipt]:
        """A few tokens at once as decode computes them: only what is not cached is read."""
        started, before = time.perf_counter(), self._reader.counters
        mx.reset_peak_memory()
        exact, counts = self._decoder.exact, PrefillCounts()
        exact.counts.reset()
        observer, mlps = exact.observer, {s.mlp.layer.index: s.mlp for s in self._loaded.streamed}

        def note(layer: int, routed: np.ndarray, prefill: bool) -> None:
            counts.add(mlps[layer], np.unique(routed))
            if observer is not None:
                observer(layer, routed, True)

        exact.observer, exact.watch = note, watch
        try:
            with self._backend.compute_scope():
                logits = self._loaded.model(mx.array(ids[None]), cache=cache)[0, -1]
                mx.eval(logits)
            exact.finish_step()
        finally:
            exact.observer, exact.watch = observer, None
        counts.stall_seconds = exact.counts.stall_seconds
        after, wall = self._reader.counters, time.perf_counter() - started
        if progress is not None:
            nbytes, layers = after.bytes - before.bytes, len(mlps)
            progress(PrefillProgress(0, 1, layers, layers, nbytes, nbytes, wall))
        return logits, make_receipt(
            plan,
            counts,
            self._backend,
            (before, after),
            wall_seconds=wall,
            peak_bytes=self._backend.memory().peak,
            budget_bytes=self._budget.total,
            io_mode=self._reader.io_mode,
            cached_experts=0,
            weighted_layers=0,
        )
