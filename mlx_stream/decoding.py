"""Decoding with guards: a step that fails leaves everything as it was before that step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlx_stream import interrupts
from mlx_stream.allotment import Allotment
from mlx_stream.backends.base import Backend
from mlx_stream.decode.loop import LogitsProcessor, Sampler, decode_tokens
from mlx_stream.decode.metrics import DecodeMetrics
from mlx_stream.decode.speculative import Drafter, Drawn, Rounds
from mlx_stream.decode.step import DecodeSteps
from mlx_stream.prefill.cache_views import CacheSnapshot
from mlx_stream.prefill.receipts import PrefillResult, kernel_counts
from mlx_stream.storage.reader import Reader
from mlx_stream.telemetry import Receipt

Finished = Callable[[Receipt], None]


class GuardedDecode:
    """Makes token generators over one engine's steps. Compute thread only.

    Args:
        finished: given the prefill's receipt with what the tokens cost, when a caller stops.
    """

    def __init__(
        self,
        steps: DecodeSteps,
        allotment: Allotment,
        reader: Reader,
        backend: Backend,
        finished: Finished,
    ) -> None:
        self._steps, self._allotment = steps, allotment
        self._reader, self._backend = reader, backend
        self._finished = finished

    def tokens(
        self,
        result: PrefillResult,
        prompt: Sequence[int],
        *,
        sampler: Sampler,
        processors: Sequence[LogitsProcessor] = (),
    ) -> Generator[tuple[int, mx.array], None, None]:
        """Yield ``(token, logprobs [V])`` without end from where a prefill stopped.

        Raises:
            FileChangedError, ReadError: the checkpoint changed or cannot be read.
        """
        metrics = self._new_metrics()
        cache, step = result.cache, self._step
        tokens = decode_tokens(
            step, cache, result.logits, prompt, sampler=sampler, processors=processors
        )
        try:
            while True:
                yield self._next(tokens, cache, metrics)
        finally:
            self._close(result, metrics)

    def speculative_tokens(
        self,
        result: PrefillResult,
        prompt: Sequence[int],
        drafter: Drafter,
        *,
        sampler: Sampler,
        processors: Sequence[LogitsProcessor] = (),
    ) -> Generator[Drawn, None, None]:
        """As :meth:`tokens`, several tokens a step; stopping between them is allowed.

        Raises:
            CapabilityError: the prompt cache cannot be trimmed; nothing was computed.
        """
        metrics, cache = self._new_metrics(), result.cache
        rounds = Rounds(
            self._step, cache, drafter, prompt=prompt, sampler=sampler, processors=processors
        )
        left = 0
        try:
            last = rounds.first(result.logits)
            yield last
            self._guarded(lambda: drafter.prefill(prompt), cache, metrics)
            while True:
                drawn = self._guarded(lambda t=last.token: rounds.round(t), cache, metrics)
                for place, last in enumerate(drawn, start=1):
                    left = len(drawn) - place
                    yield last
        finally:
            rounds.take_back(left)
            self._close(result, metrics)

    def _new_metrics(self) -> DecodeMetrics:
        return DecodeMetrics(prerouter=self._steps.metrics.prerouter)

    def _close(self, result: PrefillResult, metrics: DecodeMetrics) -> None:
        kernels = kernel_counts(self._backend)
        self._finished(replace(result.receipt, decode=metrics.as_dict(), kernels=kernels))

    def _next(self, tokens: Any, cache: list[Any], metrics: DecodeMetrics) -> Any:
        return self._guarded(lambda: next(tokens), cache, metrics)

    def _guarded(self, step: Callable[[], Any], cache: list[Any], metrics: DecodeMetrics) -> Any:
        snapshot, before = CacheSnapshot(cache, append_only=True), self._reader.counters
        self._steps.request = metrics
        try:
            with interrupts.deferred(), self._backend.compute_scope():
                result = step()
            if self._reader.counters.calls != before.calls:
                self._reader.check_unchanged()
        except BaseException:
            snapshot.restore()
            raise
        return result

    def _step(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        logits = self._steps(tokens, cache)
        last = self._steps.metrics.last
        if last is not None:
            self._allotment.after_step(last)
        return logits
