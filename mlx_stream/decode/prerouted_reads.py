"""Reads of experts that a Prerouter has named for the next step: certain, so none is wasted.

They begin when the step before ends, in the order of the layers, and go behind what a layer that
still routes itself asks for. Owns no memory: until their layer comes the records are guesses in
the expert cache, which is told not to give them up while another slot can be had.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_stream.backends.base import ExpertMlp
from mlx_stream.decode.expert_cache import ExpertCache
from mlx_stream.decode.predict import PredictionCounts
from mlx_stream.decode.slots import Key
from mlx_stream.decode.step_counts import StepCounts
from mlx_stream.experts.streamed_experts import StreamedExperts
from mlx_stream.storage.reader import Reader


@dataclass(frozen=True)
class _Wanted:
    mlp: ExpertMlp
    expert: int

    @property
    def key(self) -> Key:
        return (self.mlp.layer.index, self.expert)


class PreroutedReads:
    """Fills slots for one step's predicted experts. Compute thread only.

    Args:
        counts: of the running step.
        top_k: experts a token; so many slots at least are left to what is read on demand.

    Attributes:
        held: records of the plan whose layer has not come yet; changed in place.
        counts: predictions are used as they are: there is nothing to count here.
    """

    def __init__(
        self, cache: ExpertCache, reader: Reader, counts: StepCounts, *, top_k: int
    ) -> None:
        self._cache, self._reader, self._step = cache, reader, counts
        self._top_k = top_k
        self._wanted: list[_Wanted] = []
        self._recent: dict[int, set[Key]] = {}  # what layers that route themselves used last
        self.held: set[Key] = set()
        self.counts = PredictionCounts()

    def plan(self, layers: Sequence[tuple[ExpertMlp, np.ndarray]]) -> None:
        """The experts ``[K]`` of the next step's predicted layers, in the order they run."""
        self._wanted = [_Wanted(mlp, e) for mlp, ids in layers for e in np.unique(ids).tolist()]
        self.held.clear()
        self.held.update(w.key for w in self._wanted)

    def clear(self) -> None:
        """Nothing is wanted any more; what was read ahead gives way to what is needed."""
        self._wanted.clear()
        self._recent.clear()
        self.held.clear()
        self._cache.guess_limit = 0

    def fill(self, in_use: Collection[Key] = ()) -> None:
        """Begin as many reads as there is room for; the rest follows as layers take theirs."""
        cache = self._cache
        cache.collect_guesses()
        if not self._wanted:
            return
        cache.guess_limit = max(0, min(len(self._wanted), cache.capacity - self._top_k))
        # Layers that route themselves ran first, so theirs look least used; they run first again.
        pinned = self.held.union(in_use, *self._recent.values())
        with self._reader.behind():
            for wanted in self._wanted:
                if wanted.key in cache:
                    continue
                if not cache.store.may_read_ahead():
                    return
                if not cache.guess(wanted.mlp, wanted.expert, pinned):
                    return

    # --- what the exact path asks (see exact.Ahead) -------------------------------------------

    @property
    def active(self) -> bool:
        """Always."""
        return True

    def route(self, experts: StreamedExperts, x: mx.array) -> mx.array | None:
        """Nothing is asked of the next layer: the plan is there, or there is none."""
        return None

    def check(self, mlp: ExpertMlp, needed: Sequence[int]) -> None:
        """A layer's experts are about to be looked up."""
        layer = mlp.layer.index
        planned = [e for e in needed if (layer, e) in self.held]
        if not planned:
            self._recent[layer] = {(layer, e) for e in needed}
            return
        self._recent.pop(layer, None)
        for expert in planned:
            record = self._cache.record((layer, expert))
            if record is not None and record.guess:
                arrival = record.arrival
                self._step.waits_avoided += arrival is None or arrival.done()
        self.held.difference_update((layer, e) for e in planned)
        self._wanted = [w for w in self._wanted if w.mlp.layer.index != layer]

    def start(
        self, experts: StreamedExperts, guess: mx.array | None, in_use: Collection[Key]
    ) -> None:
        """The layer's own reads have begun."""
        self.fill(in_use)

    def finish_token(self, read_seconds_each: float) -> None:
        """There is no account to close."""
