"""Finds out, on a few tokens and without experts, whether a model can be resumed at a boundary.

Three chunks run through the whole model, then again from every boundary that will be used, with
nothing but what a checkpoint would hold. Logits and caches must come out bit by bit: a model that
carries more from layer to layer than its layers return is refused, by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_stream.errors import CapabilityError
from mlx_stream.experts.streamed_experts import ExecutorSlot, StreamedExperts, set_executor
from mlx_stream.prefill.boundary import ChunkRun, LayerBoundaries
from mlx_stream.prefill.cache_views import cache_arrays, cache_view
from mlx_stream.prefill.stand_ins import stand_in

CHUNKS = ((0, 5), (5, 8), (8, 9))


class _EchoExperts:
    """An executor whose experts answer with half their input: nothing is read."""

    def __call__(self, experts: StreamedExperts, x: mx.array, indices: mx.array) -> mx.array:
        half = (x.reshape(*indices.shape[:-1], 1, x.shape[-1]) * 0.5).astype(x.dtype)
        return mx.broadcast_to(half, (*indices.shape, x.shape[-1]))


def check_boundaries(
    model: nn.Module,
    family: str,
    layers: LayerBoundaries,
    boundaries: Sequence[int],
    slot: ExecutorSlot,
    scope: Callable[[], AbstractContextManager[None]],
    make_cache: Callable[[], list[Any]],
) -> None:
    """Try every boundary; afterwards `layers.touched` says which layer uses which cache.

    Args:
        layers: their views must be in place.

    Raises:
        CapabilityError: the model cannot be resumed at one of them.
    """
    restore = set_executor(slot, _EchoExperts())
    try:
        with scope():
            probe = _Probe(model, layers, make_cache)
            layers.capture = frozenset(boundaries)
            whole = probe.run([ChunkRun([]) for _ in CHUNKS], make_cache(), None)
            layers.capture = frozenset()
            for boundary in boundaries:
                problem = probe.difference(whole, boundary)
                if problem is not None:
                    raise _refused(family, boundary, problem)
    finally:
        layers.capture = frozenset()
        layers.forget()
        restore()


class _Probe:
    def __init__(
        self, model: nn.Module, layers: LayerBoundaries, make_cache: Callable[[], list[Any]]
    ) -> None:
        self._model, self._layers, self._make_cache = model, layers, make_cache

    def run(self, runs: list[ChunkRun], cache: list[Any], source: Any) -> Any:
        """Chunk after chunk; returns ``(runs, cache, logits of the last chunk)``."""
        logits = None
        for n, (start, stop) in enumerate(CHUNKS):
            views = [cache_view(c, start) for c in cache]
            if source is not None:
                earlier, finished = source
                for entry in finished:
                    views[entry] = stand_in(views[entry], earlier[n].seen[entry])
            runs[n] = ChunkRun(views, runs[n].skip_to, runs[n].kept)
            self._layers.enter(runs[n])
            tokens = mx.arange(start, stop, dtype=mx.uint32)[None]
            logits = self._model(tokens, cache=views)
            mx.eval(logits, cache_arrays(cache))
        return runs, cache, logits

    def difference(self, whole: Any, boundary: int) -> str | None:
        """What differs when the model goes on from a boundary; None if nothing does."""
        runs, cache, logits = whole
        finished = self._layers.finished(boundary)
        again = self._make_cache()
        for entry in finished:
            again[entry] = cache[entry]
        if any(boundary not in run.outputs for run in runs):
            return "some chunks do not pass this layer"
        resumed = [ChunkRun([], boundary, run.outputs[boundary]) for run in runs]
        try:
            _, _, got = self.run(resumed, again, (runs, finished))
        except (ValueError, TypeError, AttributeError, IndexError, KeyError) as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if not _same(got, logits):
            return "other logits"
        pairs = cache_arrays(again), cache_arrays(cache)
        if len(pairs[0]) != len(pairs[1]) or not all(map(_same, *pairs)):
            return "other keys and values"
        return None


def _same(a: mx.array, b: mx.array) -> bool:
    return a.shape == b.shape and bool(mx.array_equal(a, b, equal_nan=True))


def _refused(family: str, boundary: int, problem: str) -> CapabilityError:
    return CapabilityError(
        f"a prefill of {family} cannot be resumed: its layers depend on more than what a "
        "checkpoint holds",
        tensor=f"decoder layer {boundary}",
        expected="the same logits and caches when going on from there",
        actual=problem,
        remedy="run this model without --checkpoint-dir",
    )
