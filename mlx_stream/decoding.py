"""Decoding with guards: a step that fails leaves everything as it was before that step."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import mlx.core as mx

from mlx_stream import interrupts
from mlx_stream.allotment import Allotment
from mlx_stream.backends.base import Backend
from mlx_stream.decode.loop import LogitsProcessor, Sampler, decode_tokens
from mlx_stream.decode.metrics import DecodeMetrics
from mlx_stream.decode.step import DecodeSteps
from mlx_stream.prefill.cache_views import CacheSnapshot
from mlx_stream.storage.reader import Reader

Finished = Callable[[DecodeMetrics], None]


class GuardedDecode:
    """Makes token generators over one engine's steps. Compute thread only."""

    def __init__(
        self, steps: DecodeSteps, allotment: Allotment, reader: Reader, backend: Backend
    ) -> None:
        self._steps, self._allotment = steps, allotment
        self._reader, self._backend = reader, backend

    def tokens(
        self,
        cache: list[Any],
        logits: mx.array,
        prompt: Sequence[int],
        *,
        sampler: Sampler,
        processors: Sequence[LogitsProcessor] = (),
        finished: Finished,
    ) -> Generator[tuple[int, mx.array], None, None]:
        """Yield ``(token, logprobs [V])`` without end.

        Args:
            finished: told what these tokens cost, when the caller stops.

        Raises:
            FileChangedError, ReadError: the checkpoint changed or cannot be read.
        """
        metrics = DecodeMetrics()
        tokens = decode_tokens(
            self._step, cache, logits, prompt, sampler=sampler, processors=processors
        )
        try:
            while True:
                yield self._next(tokens, cache, metrics)
        finally:
            finished(metrics)

    def _next(self, tokens: Any, cache: list[Any], metrics: DecodeMetrics) -> Any:
        snapshot, before = CacheSnapshot(cache, append_only=True), self._reader.counters
        self._steps.request = metrics
        try:
            with interrupts.deferred(), self._backend.compute_scope():
                token = next(tokens)
            if self._reader.counters.calls != before.calls:
                self._reader.check_unchanged()
        except BaseException:
            snapshot.restore()
            raise
        return token

    def _step(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        logits = self._steps(tokens, cache)
        last = self._steps.metrics.last
        if last is not None:
            self._allotment.after_step(last)
        return logits
