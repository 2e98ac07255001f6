"""One decode step: choose the path, run the model, count.

Paths (design: four paths, one contract): exact, hot, staged; whole-layer is prefill's, and the
engine runs it. A plan says which one a phase asks for and why; the step falls back to exact when
an expert is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from mlx_stream.decode.exact import ExactExecutor
from mlx_stream.decode.expert_cache import ExpertCache
from mlx_stream.decode.mapped import MappedExecutor
from mlx_stream.decode.metrics import DecodeMetrics, StepMetrics
from mlx_stream.decode.options import DecodePlan
from mlx_stream.decode.prerouter import Prerouter
from mlx_stream.decode.staged import TokenAhead
from mlx_stream.experts.streamed_experts import ExecutorSlot, set_executor
from mlx_stream.storage.reader import ReadCounters, Reader
from mlx_stream.timeline import COMPUTE

STREAK = 8  # tokens without a miss before `auto` bets on the next one


class Snapshot(Protocol):
    """Puts a prompt cache back to how it was."""

    def restore(self) -> None:
        """Undo what happened since."""


TakeSnapshot = Callable[[list[Any]], Snapshot]


class DecodeSteps:
    """Runs steps and keeps their metrics. Compute thread only."""

    def __init__(
        self,
        model: nn.Module,
        slot: ExecutorSlot,
        reader: Reader,
        cache: ExpertCache,
        exact: ExactExecutor,
        plan: DecodePlan,
        *,
        take_snapshot: TakeSnapshot,
        mapped: MappedExecutor | None = None,
        token_ahead: TokenAhead | None = None,
        whole_layer: Callable[[mx.array, list[Any]], mx.array] | None = None,
        prerouter: Prerouter | None = None,
        prerouter_reason: str = "off",
    ) -> None:
        self.plan = plan
        self.metrics = DecodeMetrics(prerouter=prerouter_reason)
        self.request: DecodeMetrics | None = None  # counts along, for one request
        self._model, self._slot, self._reader = model, slot, reader
        self._cache, self._exact, self._mapped = cache, exact, mapped
        self._token_ahead, self._whole_layer = token_ahead, whole_layer
        self._prerouter = prerouter
        self._take_snapshot = take_snapshot
        self._streak = 0
        self._counted: ReadCounters | None = None  # what earlier steps have accounted for

    def begin_prompt(self) -> None:
        """What is read from now on is a prompt's, not a step's."""
        self._counted = None

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        """``tokens [1, T]`` -> evaluated logits ``[T, V]``; the prompt cache moves on by T."""
        counts = self._exact.counts
        counts.reset()
        started, before = time.perf_counter(), self._snapshot()
        reads = self._counted or self._reader.counters  # reads ahead go on between steps
        path, logits = self._run(tokens, cache)
        self._note(path, started)
        self._cache.policy.tick()
        wall, after = time.perf_counter() - started, self._reader.counters
        self._counted = after
        hits, misses, *predicted = (b - a for a, b in zip(before, self._snapshot(), strict=True))
        self._streak = 0 if misses else self._streak + 1
        self._close_accounts(after, reads)
        self._count(
            StepMetrics(
                path=path,
                tokens=tokens.shape[1],
                hits=hits,
                misses=misses,
                redone=counts.redone,
                bytes_read=after.bytes - reads.bytes,
                read_calls=after.calls - reads.calls,
                stall_seconds=counts.stall_seconds,
                syncs=counts.syncs,
                predicted=predicted[0],
                predicted_used=predicted[1],
                routed_in_predicted=predicted[2],
                wasted_bytes=predicted[3],
                predicted_layer_steps=counts.predicted_layer_steps,
                checked_experts=counts.checked_experts,
                agreed_experts=counts.agreed_experts,
                waits_avoided=counts.waits_avoided,
                dropped_experts=counts.dropped_experts,
                cache_bytes=self._cache.nbytes,
                wall_seconds=wall,
            )
        )
        return logits

    def _note(self, path: str, started: float) -> None:
        timeline = self._reader.timeline
        if timeline is not None:
            timeline.add(COMPUTE, "token", started, time.perf_counter(), path=path)

    def _count(self, step: StepMetrics) -> None:
        self.metrics.add(step)
        if self.request is not None:
            self.request.add(step)

    def _run(self, tokens: mx.array, cache: list[Any]) -> tuple[str, mx.array]:
        if self._prerouter is not None:
            return self._prerouter(self._model, tokens, cache)
        if self.plan.path == "whole-layer":
            assert self._whole_layer is not None
            self._exact.counts.syncs += 1
            return "whole-layer", self._whole_layer(tokens, cache)
        if self._bets():
            logits = self._run_mapped(tokens, cache)
            if logits is not None:
                return ("staged" if self._token_ahead else "hot"), logits
            self._exact.counts.redone += 1
        return "exact", self._run_exact(tokens, cache)

    def _bets(self) -> bool:
        """Whether to compute as if everything were in memory."""
        if self._mapped is None:
            return False
        return self.plan.path in ("hot", "staged") or self._streak >= STREAK

    def _run_mapped(self, tokens: mx.array, cache: list[Any]) -> mx.array | None:
        mapped = self._mapped
        assert mapped is not None
        snapshot = self._take_snapshot(cache)
        if self._token_ahead is not None:
            self._token_ahead.collect()
        mapped.begin()
        restore = set_executor(self._slot, mapped)
        try:
            logits = self._model(tokens, cache=cache)[0]
            mx.eval(logits, *mapped.pending())
        except BaseException:
            mapped.begin()
            raise
        finally:
            restore()
        self._exact.counts.syncs += 1
        if not mapped.complete():
            mapped.begin()
            snapshot.restore()
            self._streak = 0
            return None
        mapped.commit()
        if self._token_ahead is not None:
            self._token_ahead.start()
        return logits

    def _run_exact(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        logits = self._model(tokens, cache=cache)[0]
        mx.eval(logits)
        self._exact.counts.syncs += 1
        self._exact.finish_step()
        if self._token_ahead is not None:
            self._token_ahead.start()
        return logits

    def _snapshot(self) -> tuple[int, ...]:
        c, ahead = self._cache.counts, self._exact.ahead
        predicted = (0, 0, 0) if ahead is None else ahead.counts.as_tuple()
        return (c.hits, c.misses, *predicted, c.wasted_nbytes)

    def _close_accounts(self, after: Any, before: Any) -> None:
        ahead = self._exact.ahead
        if ahead is not None:
            calls = after.calls - before.calls
            each = (after.busy_seconds - before.busy_seconds) / calls if calls else 0.0
            ahead.finish_token(each)
