"""The engine: assembles a streamed model with its reader, budget and expert cache.

Owns the model's resident weights, the reader's files and threads, and the expert cache. Prompts
come in as token ids and leave as logits and a prompt cache; text is runtime.py's. Used from one
thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_stream import interrupts
from mlx_stream.backends.select import select_backend
from mlx_stream.budget import MemoryBudget
from mlx_stream.config import StreamConfig
from mlx_stream.decode.exact import ExactExecutor
from mlx_stream.decode.expert_cache import ExpertCache, record_nbytes
from mlx_stream.decode.loop import LogitsProcessor, Sampler, decode_tokens
from mlx_stream.decode.seed import RecentTokensSeeder
from mlx_stream.errors import MlxStreamError
from mlx_stream.experts.staging import StagingRing
from mlx_stream.experts.streamed_experts import set_executor
from mlx_stream.loader import load_streamed_model, load_tokenizer_if_any
from mlx_stream.planner.fit import Traits, plan_prefill
from mlx_stream.planner.free_memory import default_budget
from mlx_stream.prefill.cache_views import CacheSnapshot, cache_offset, check_prompt_cache
from mlx_stream.prefill.layer_major import LayerMajorPrefill
from mlx_stream.prefill.schedule import PrefillPlan, PrefillProgress
from mlx_stream.prompts import check_token_ids, empty_prompt
from mlx_stream.storage.checkpoint import open_checkpoint
from mlx_stream.storage.expert_index import build_expert_index
from mlx_stream.storage.read_plan import slot_capacity
from mlx_stream.storage.reader import Reader
from mlx_stream.telemetry import Receipt

Progress = Callable[[PrefillProgress], None]
DECODE_RESERVE_TOKENS = 256


@dataclass(frozen=True)
class PrefillResult:
    """What a prefill leaves behind.

    Attributes:
        logits: ``[V]`` of the last position.
        cache: an mlx-lm prompt cache; mlx-lm itself can go on from it.
        receipt: bytes and seconds, as counted.
    """

    logits: mx.array
    cache: list[Any]
    receipt: Receipt


class Engine:
    """One loaded checkpoint, ready to prefill and decode token ids."""

    def __init__(self, path: Path, config: StreamConfig) -> None:
        self.path = path
        self.config = config
        self.last_receipt: Receipt | None = None
        self._closers: list[Callable[[], object]] = []
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        index = build_expert_index(open_checkpoint(self.path))
        self.backend = select_backend(self.config.backend)
        self._closers.append(self.backend.close)
        total, self.budget_reason = self.config.memory_budget, "as asked"
        if total is None:
            total, self.budget_reason = default_budget(self.backend.memory().limit)
        self.budget = MemoryBudget(total)
        self._loaded = load_streamed_model(
            index,
            self.backend,
            self.budget,
            trust_remote_code=self.config.trust_remote_code,
        )
        self.model = self._loaded.model
        self.index = self._loaded.index
        self._shape = self._loaded.shape
        self._mlps = [s.mlp for s in self._loaded.streamed]
        self._closers.append(self.backend.prepare_model(self.model, self._shape.vocab))
        self.reader = Reader(
            index.checkpoint, io=self.config.io, threads=self.config.reader_threads
        )
        self._closers.append(self.reader.close)
        self._traits = self._make_traits()
        self._cache = self._make_expert_cache()
        self._closers.append(self._cache.close)
        self._exact = ExactExecutor(self.backend, self._cache)
        set_executor(self._loaded.slot, self._exact)
        self.tokenizer = load_tokenizer_if_any(
            self.path, self._loaded.config, self.config.trust_remote_code
        )

    def _make_traits(self) -> Traits:
        return Traits(
            itemsize=self._loaded.dtype.size,
            resident=self._loaded.resident_nbytes,
            scratch=self.backend.scratch_nbytes(self._mlps),
            align=self.reader.align,
            combined=self._loaded.combined_layers == len(self._mlps),
            decode_tokens=DECODE_RESERVE_TOKENS,
            union_tokens=self.config.union_tokens,
        )

    def _make_expert_cache(self) -> ExpertCache:
        """One record for now; every plan says what the cache may hold."""
        align = self.reader.align
        slot = record_nbytes(self._mlps, align, slot_capacity(self.index, 1, align))
        self.budget.reserve("expert cache", slot)
        return ExpertCache(self.backend, self.reader, slot_nbytes=slot, capacity=1)

    def plan(self, prompt_tokens: int, *, past_tokens: int = 0) -> PrefillPlan:
        """The plan that a prompt of this length would follow.

        Raises:
            BudgetError: it does not fit.
            MlxStreamError: the prompt is empty, or the engine was closed.
        """
        if prompt_tokens < 1:
            raise empty_prompt()
        if not self._closers:
            raise MlxStreamError(
                "the model is closed", remedy="load it again, or stay inside the with-block"
            )
        return plan_prefill(
            self.index,
            self._shape,
            self._traits,
            prompt_tokens=prompt_tokens,
            budget=self.budget.total,
            chunk_tokens=self.config.chunk_tokens,
            past_tokens=past_tokens,
        )

    @interrupts.deferred()
    def prefill(
        self,
        tokens: Sequence[int] | np.ndarray | mx.array,
        cache: list[Any] | None = None,
        *,
        progress: Progress | None = None,
    ) -> PrefillResult:
        """Run a prompt through the model, layer by layer.

        Args:
            tokens: at least one token id.
            cache: an mlx-lm prompt cache to go on from; updated in place, and put back as it was
                when the prefill fails or is interrupted. None makes a new one.
            progress: called after each layer.

        Raises:
            BudgetError: the prompt does not fit the memory budget; nothing was read.
            FileChangedError, ReadError: the checkpoint changed or cannot be read.
        """
        ids = check_token_ids(tokens, self._shape.vocab)
        self.reader.check_unchanged()
        if cache is not None:
            check_prompt_cache(cache, make_prompt_cache(self.model))
        past = cache_offset(cache) if cache is not None else 0
        plan = self.plan(len(ids), past_tokens=past)
        snapshot = CacheSnapshot(cache) if cache is not None else None
        cache = make_prompt_cache(self.model) if cache is None else cache
        self._grant(plan)
        try:
            try:
                logits, receipt = self.run_plan(plan, ids, cache, progress=progress)
            finally:
                self._settle_budget()
            self.reader.check_unchanged()
            interrupts.check()
        except BaseException:
            if snapshot is not None:
                snapshot.restore()
            raise
        self.last_receipt = receipt
        return PrefillResult(logits, cache, receipt)

    def run_plan(
        self,
        plan: PrefillPlan,
        ids: np.ndarray,
        cache: list[Any] | None = None,
        *,
        ring: StagingRing | None = None,
        progress: Progress | None = None,
    ) -> tuple[mx.array, Receipt]:
        """Execute a plan; :meth:`prefill` is this with checks, budget and clean-up around it.

        Args:
            ring: staging to use, and to close, instead of the plan's own (benchmarks).
        """
        cache = make_prompt_cache(self.model) if cache is None else cache
        started, before = time.perf_counter(), self.reader.counters
        mx.reset_peak_memory()
        seeder = RecentTokensSeeder(self._cache, len(self._mlps))
        ring = ring or StagingRing(self.backend, self.reader, plan.slot_nbytes, plan.slots)
        try:
            job = LayerMajorPrefill(
                self.model,
                self._loaded.streamed,
                self.backend,
                self.reader,
                ring,
                self._loaded.slot,
                fallback=self._exact,
                seeder=seeder,
                progress=progress,
            )
            with self.backend.compute_scope():
                logits = job.run(plan, ids, cache)
            wall, after = time.perf_counter() - started, self.reader.counters
            peak = self.backend.memory().peak
        finally:
            ring.close()
        stall = job.counts.stall_seconds
        return logits, Receipt(
            prompt_tokens=plan.prompt_tokens,
            segments=len(plan.segments),
            chunk_tokens=plan.chunk_tokens,
            mode=plan.mode,
            bytes_read=after.bytes - before.bytes,
            distinct_expert_bytes=job.counts.distinct_expert_bytes,
            read_calls=after.calls - before.calls,
            read_seconds=after.busy_seconds - before.busy_seconds,
            compute_seconds=wall - stall,
            stall_seconds=stall,
            wall_seconds=wall,
            peak_bytes=peak,
            budget_bytes=self.budget.total,
            io_mode=self.reader.io_mode,
            backend=self.backend.name,
            cached_experts=seeder.kept,
            weighted_layers=self._loaded.combined_layers,
            kernels=dict(Counter(f"{c.path}: {c.reason}" for c in self.backend.choices.values())),
        )

    def decode(
        self,
        result: PrefillResult,
        prompt: Sequence[int],
        *,
        sampler: Sampler,
        processors: Sequence[LogitsProcessor] = (),
    ) -> Generator[tuple[int, mx.array], None, None]:
        """Yield ``(token, logprobs [V])`` without end from where a prefill stopped.

        A step that fails leaves the cache as it was before that step.

        Raises:
            FileChangedError, ReadError: the checkpoint changed or cannot be read.
        """
        tokens = decode_tokens(
            self.model, result.cache, result.logits, prompt, sampler=sampler, processors=processors
        )
        while True:
            snapshot, before = CacheSnapshot(result.cache, append_only=True), self.reader.counters
            try:
                with interrupts.deferred(), self.backend.compute_scope():
                    token = next(tokens)
                if self.reader.counters.calls != before.calls:
                    self.reader.check_unchanged()
            except BaseException:
                snapshot.restore()
                raise
            yield token

    @property
    def peak_nbytes(self) -> int:
        """Highest sum of MLX allocations and host buffers since the last prefill began."""
        return self.backend.memory().peak

    def _grant(self, plan: PrefillPlan) -> None:
        """Ask the budget for everything that the plan will allocate, cache last."""
        memory = plan.memory
        self._resize_cache(memory.expert_cache)
        self.budget.release("kv cache")
        self.budget.reserve("kv cache", memory.kv)
        self.budget.reserve(
            "prefill", memory.staging + memory.held + memory.transient + memory.scratch
        )

    def _settle_budget(self) -> None:
        """Prefill memory is free again: the expert cache may grow into it during decode."""
        self.budget.release("prefill")
        spare = self.budget.available - self._traits.scratch
        self._resize_cache(self._cache.capacity * self._cache.slot_nbytes + max(0, spare))

    def _resize_cache(self, nbytes: int) -> None:
        records = sum(m.layer.num_experts for m in self._mlps)
        capacity = max(1, min(records, nbytes // self._cache.slot_nbytes))
        self._cache.resize(capacity)
        self.budget.release("expert cache")
        self.budget.reserve("expert cache", capacity * self._cache.slot_nbytes)

    def close(self) -> None:
        """Release files, threads and memory; safe to call twice."""
        while self._closers:
            self._closers.pop()()
