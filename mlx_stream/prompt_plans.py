"""Plans prompts for one engine: what the model keeps in memory, and what the budget leaves."""

from __future__ import annotations

from dataclasses import replace

from mlx_stream.backends.base import Backend
from mlx_stream.budget import MemoryBudget
from mlx_stream.config import StreamConfig
from mlx_stream.decode.decoder import Decoder
from mlx_stream.kv.caches import KvSupport
from mlx_stream.kv.options import KvOptions
from mlx_stream.loader import LoadedModel
from mlx_stream.planner.fit import plan_prefill
from mlx_stream.prefill.schedule import PrefillPlan
from mlx_stream.prompts import empty_prompt

DECODE_RESERVE_TOKENS = 256
EXTRAS = ("draft model", "adapters")  # owners of the budget that stay in memory with the weights


class PromptPlans:
    """Made once for an engine. Compute thread only.

    Args:
        align: of reads, in bytes.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        backend: Backend,
        budget: MemoryBudget,
        kv: KvSupport,
        config: StreamConfig,
        *,
        align: int,
    ) -> None:
        self._loaded, self._budget, self._kv, self._config = loaded, budget, kv, config
        self.scratch = backend.scratch_nbytes([s.mlp for s in loaded.streamed])
        self._traits = loaded.traits(
            config, scratch=self.scratch, align=align, decode_tokens=DECODE_RESERVE_TOKENS
        )

    def know(self, decoder: Decoder) -> None:
        """What the expert cache takes besides its records."""
        overhead = decoder.cache.store.overhead_nbytes
        self._traits = replace(self._traits, cache_overhead=overhead, kv_window=self._kv.window)

    def plan(self, prompt_tokens: int, past_tokens: int, kv: KvOptions) -> PrefillPlan:
        """The plan that a prompt would follow.

        Raises:
            BudgetError: it does not fit.
            MlxStreamError: the prompt is empty.
        """
        if prompt_tokens < 1:
            raise empty_prompt()
        extras = sum(self._budget.owner(name) for name in EXTRAS)
        resident = self._loaded.resident_nbytes + extras
        return plan_prefill(
            self._loaded.index,
            self._loaded.shape,
            replace(self._traits, resident=resident, kv=self._kv.planned(kv)),
            prompt_tokens=prompt_tokens,
            budget=self._budget.total,
            chunk_tokens=self._config.chunk_tokens,
            past_tokens=past_tokens,
        )
