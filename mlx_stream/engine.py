"""The engine: assembles a streamed model with its reader, budget and expert cache.

Owns all of them. Prompts come in as token ids and leave as logits and a prompt cache; text is
runtime.py's. Used from one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_stream import interrupts
from mlx_stream.adapters.adapter_set import AdapterSet
from mlx_stream.adapting import AUTO, Adapter, EngineAdapters
from mlx_stream.allotment import Allotment
from mlx_stream.backends.select import select_backend
from mlx_stream.budget import MemoryBudget
from mlx_stream.config import StreamConfig, parse_bytes
from mlx_stream.decode.decoder import Decoder, StreamedModel
from mlx_stream.decode.metrics import DecodeMetrics
from mlx_stream.decode.options import DecodeOptions
from mlx_stream.decode.speculative import Drafter, Drawn
from mlx_stream.decoding import GuardedDecode
from mlx_stream.drafting import check_can_draft, open_drafter
from mlx_stream.errors import MlxStreamError
from mlx_stream.experts.staging import StagingRing
from mlx_stream.experts.streamed_experts import set_executor
from mlx_stream.kv.caches import KvSupport, settle
from mlx_stream.kv.options import PLAIN, KvOptions
from mlx_stream.loader import load_streamed_model, load_tokenizer_if_any
from mlx_stream.plan_runner import PlanRunner
from mlx_stream.planner.free_memory import default_budget
from mlx_stream.prefill.cache_views import CacheSnapshot, cache_offset, check_prompt_cache
from mlx_stream.prefill.receipts import PrefillResult
from mlx_stream.prefill.schedule import PrefillPlan, PrefillProgress
from mlx_stream.prerouting import prepare_prerouter
from mlx_stream.prompt_plans import PromptPlans
from mlx_stream.prompts import check_token_ids
from mlx_stream.storage.expert_index import build_expert_index
from mlx_stream.storage.reader import Reader, reader_options
from mlx_stream.storage.resident_check import open_checked
from mlx_stream.telemetry import Receipt
from mlx_stream.timeline import Timeline

__all__ = ["Engine", "PrefillResult", "Progress"]

Progress = Callable[[PrefillProgress], None]
CACHED_TOKENS = 32  # a turn up to this long runs from the expert cache, as decode does


class Engine:
    """One loaded checkpoint, ready to prefill and decode token ids."""

    def __init__(self, path: Path, config: StreamConfig) -> None:
        self.path = path
        self.config = config
        self.last_receipt: Receipt | None = None
        self._drafter: Drafter | None = None
        self._closers: list[Callable[[], object]] = []
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        self._decode_options = DecodeOptions.of(self.config)
        index = build_expert_index(open_checked(self.path, self.config.verify))
        self.backend = select_backend(self.config.backend)
        self._closers.append(self.backend.close)
        total, self.budget_reason = self.config.memory_budget, "as asked"
        if total is None:
            total, self.budget_reason = default_budget(self.backend.memory().limit)
        self.budget = MemoryBudget(total)
        loaded = load_streamed_model(
            index, self.backend, self.budget, trust_remote_code=self.config.trust_remote_code
        )
        self._loaded, self._prerouting = prepare_prerouter(
            loaded, self._decode_options, self.backend, self.budget
        )
        self.model = self._loaded.model
        self.index = self._loaded.index
        self._shape = self._loaded.shape
        self._mlps = [s.mlp for s in self._loaded.streamed]
        self._closers.append(self.backend.prepare_model(self.model, self._shape.vocab))
        self.reader = Reader(index.checkpoint, **reader_options(self.config))
        self._closers.append(self.reader.close)
        self.kv = KvSupport(self.model, self._loaded.slot, self.backend.compute_scope)
        held = (self._loaded, self.backend, self.budget, self.kv, self.config)
        self._plans = PromptPlans(*held, align=self.reader.align)
        self.decoder = self._make_decoder()
        self._plans.know(self.decoder)
        self._closers.append(self.decoder.close)
        asked = self.config.memory_budget is not None
        self._allotment = Allotment(self.budget, self.decoder, self._plans.scratch, asked=asked)
        self._guarded = GuardedDecode(
            self.decoder.steps,
            self._allotment,
            self.reader,
            self.backend,
            partial(setattr, self, "last_receipt"),
        )
        parts = (self.backend, self.reader, self.budget, self.decoder)
        self.runner = PlanRunner(self._loaded, *parts)
        set_executor(self._loaded.slot, self.decoder.exact)
        self.adapters = EngineAdapters(
            AdapterSet(self.model, self.backend, self.budget), self._allotment.make_room
        )
        self._closers.append(self.adapters.close)
        self.adapters.open_default(self.config, self.path, self._prerouting.opened)
        self.tokenizer = load_tokenizer_if_any(
            self.path, self._loaded.config, self.config.trust_remote_code
        )

    def _make_decoder(self) -> Decoder:
        """With one cached record for now; every plan says what the cache may hold."""
        return Decoder(
            self.backend,
            self.reader,
            StreamedModel.of(self._loaded),
            self._decode_options,
            take_snapshot=partial(CacheSnapshot, append_only=True),
            whole_layer=self._step_by_prefill,
            prerouting=self._prerouting,
        )

    def plan(
        self, prompt_tokens: int, *, past_tokens: int = 0, kv: KvOptions = PLAIN
    ) -> PrefillPlan:
        """The plan that a prompt of this length would follow.

        Raises:
            BudgetError: it does not fit.
            MlxStreamError: the prompt is empty, or the engine was closed.
        """
        if not self._closers:
            raise MlxStreamError(
                "the model is closed", remedy="load it again, or stay inside the with-block"
            )
        return self._plans.plan(prompt_tokens, past_tokens, kv)

    @interrupts.deferred()
    def prefill(
        self,
        tokens: Sequence[int] | np.ndarray | mx.array,
        cache: list[Any] | None = None,
        *,
        kv: KvOptions = PLAIN,
        adapter: Adapter = AUTO,
        progress: Progress | None = None,
    ) -> PrefillResult:
        """Run a prompt through the model, layer by layer.

        Args:
            tokens: at least one token id.
            cache: an mlx-lm prompt cache to go on from; updated in place, and put back as it was
                when the prefill fails or is interrupted. None makes a new one.
            adapter: see :meth:`EngineAdapters.choose`; decoding goes on with it.
            progress: called after each layer.

        Raises:
            BudgetError: the prompt does not fit the memory budget; nothing was read.
            KvCacheError: the model or the cache cannot follow `kv`; nothing was read.
            FileChangedError, ReadError: the checkpoint changed or cannot be read.
        """
        ids = check_token_ids(tokens, self._shape.vocab)
        self.reader.check_unchanged()
        if cache is not None:
            check_prompt_cache(cache, make_prompt_cache(self.model))
        adapter = self.adapters.choose(adapter)
        self.adapters.check(cache, adapter)
        past = cache_offset(cache)
        plan = self.plan(len(ids), past_tokens=past, kv=kv)
        if past and len(ids) <= CACHED_TOKENS and len(self.decoder.cache) > 1:
            plan = replace(plan, mode="cached")
        cache = self.kv.prepare(cache, kv)
        snapshot = CacheSnapshot(cache)
        try:
            with self.adapters.using(adapter):
                self.runner.adapter = self.adapters.fingerprint(adapter)
                logits, receipt = self.run_granted(plan, ids, cache, progress=progress)
            settle(cache)
            self.reader.check_unchanged()
            interrupts.check()
        except BaseException:
            snapshot.restore()
            raise
        self.adapters.mark(cache, adapter)
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
        return self.runner.run(plan, ids, cache, ring=ring, progress=progress)

    def run_granted(
        self,
        plan: PrefillPlan,
        ids: np.ndarray,
        cache: list[Any],
        *,
        progress: Progress | None = None,
    ) -> tuple[mx.array, Receipt]:
        """As :meth:`run_plan`, with the plan's memory asked of the budget and given back.

        Raises:
            BudgetError: it does not fit; nothing was read.
        """
        self._allotment.grant(plan)
        try:
            return self.run_plan(plan, ids, cache, progress=progress)
        finally:
            self._allotment.settle()

    def decode(
        self, result: PrefillResult, prompt: Sequence[int], **options: Any
    ) -> Generator[tuple[int, mx.array], None, None]:
        """Yield ``(token, logprobs [V])`` without end; see :meth:`GuardedDecode.tokens`.

        When the caller stops, the last receipt says what the tokens cost.
        """
        return self.adapters.following(
            result.cache, self._guarded.tokens(result, prompt, **options)
        )

    def decode_speculative(
        self, result: PrefillResult, prompt: Sequence[int], **options: Any
    ) -> Generator[Drawn, None, None]:
        """As :meth:`decode`, with the loaded draft model's proposals.

        Raises:
            CapabilityError: the prompt cache cannot be trimmed; nothing was computed.
        """
        assert self._drafter is not None, "no draft model was loaded"
        drawn = self._guarded.speculative_tokens(result, prompt, self._drafter, **options)
        return self.adapters.following(result.cache, drawn)

    def load_draft(self, path: Path, tokens: int) -> None:
        """Hold a draft model for :meth:`decode_speculative`; see :func:`load_draft_model`.

        Raises:
            CapabilityError: the model, the draft or the decode path cannot verify several tokens
                and forget some of them; nothing was loaded.
        """
        check_can_draft(self.model, self.decoder.plan)
        self._allotment.make_room()
        self._drafter, undo = open_drafter(
            path,
            tokens,
            self.backend,
            self.budget,
            vocab=self._shape.vocab,
            trust_remote_code=self.config.trust_remote_code,
        )
        self._closers.insert(1, undo)

    @property
    def drafts(self) -> bool:
        """Whether a draft model is loaded."""
        return self._drafter is not None

    def record(self, timeline: Timeline | None) -> None:
        """Note reads and compute phases from now on; None stops."""
        self.reader.timeline = self.decoder.exact.timeline = timeline

    @interrupts.deferred()
    def change_budget(self, total: int | str) -> None:
        """Another memory budget from now on, in bytes.

        Raises:
            BudgetError: it is smaller than what must stay in memory; nothing changes.
        """
        self._allotment.change_total(parse_bytes(total))

    @property
    def peak_nbytes(self) -> int:
        """Highest sum of MLX allocations and host buffers since the last prefill began."""
        return self.backend.memory().peak

    def _step_by_prefill(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """A decode step by the whole-layer path; only the last position's logits, ``[1, V]``."""
        ids = np.array(tokens[0])
        plan = replace(self.plan(len(ids), past_tokens=cache_offset(cache)), mode="stream")
        return self.run_granted(plan, ids, cache)[0][None]

    @property
    def request_metrics(self) -> DecodeMetrics:
        """The same for the last request alone."""
        return self.decoder.steps.request or DecodeMetrics()

    @property
    def decode_metrics(self) -> DecodeMetrics:
        """What decode has cost since the engine was opened, step by step."""
        return self.decoder.steps.metrics

    def close(self) -> None:
        """Release files, threads and memory; safe to call twice."""
        while self._closers:
            self._closers.pop()()
