"""Reads of experts that a Prerouter has named for the next step: certain, so none is wasted.

A slot that is filled early is lost to what was there. So the next layer's experts are read as soon
as the layer before it has computed, when records that it used once may leave; those of later layers
before that only into slots that are empty, or that make up a small part of the cache. A small cache
then reads about as many bytes as without reading ahead, and a large one is a token ahead. All go
behind what a layer that still routes itself asks for. Owns no memory: until their layer comes the
records are guesses in the expert cache, which is told not to give them up while another slot can be
had, and to spare the layers that route themselves: only their misses stop the token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

import mlx.core as mx

from mlx_stream.backends.base import ExpertMlp
from mlx_stream.decode.expert_cache import ExpertCache
from mlx_stream.decode.predict import PredictionCounts
from mlx_stream.decode.slots import Key
from mlx_stream.decode.spared import NO_LAYERS
from mlx_stream.decode.step_counts import StepCounts
from mlx_stream.experts.streamed_experts import StreamedExperts
from mlx_stream.storage.reader import Reader

AHEAD_SHARE = 16  # one slot in so many may be full of what later layers will need
SPARED_SHARE = 1.5  # of the cache, times the share of the layers that route themselves


class PreroutedReads:
    """Fills slots for one step's predicted experts. Compute thread only.

    Args:
        counts: of the running step.
        layers: indices of all expert layers.
        top_k: experts a token; so many slots at least are left to what is read on demand.

    Attributes:
        held: records of the plan whose layer has not come yet; changed in place.
        counts: predictions are used as they are: there is nothing to count here.
    """

    def __init__(
        self,
        cache: ExpertCache,
        reader: Reader,
        counts: StepCounts,
        *,
        layers: Collection[int],
        top_k: int,
    ) -> None:
        self._cache, self._reader, self._step = cache, reader, counts
        self._layers, self._top_k = frozenset(layers), top_k
        self._wanted: list[tuple[ExpertMlp, int]] = []
        self._missing: deque[tuple[ExpertMlp, int]] = deque()
        self._alone = NO_LAYERS  # layers that route themselves while others do not
        self._capacity = 0  # of the cache, when the plan was fitted to it
        self.held: set[Key] = set()
        self.counts = PredictionCounts()

    def plan(self, layers: Sequence[tuple[ExpertMlp, Sequence[int]]]) -> None:
        """The experts of the next step's predicted layers, in the order they run."""
        self._wanted = [(mlp, expert) for mlp, ids in layers for expert in sorted(set(ids))]
        self._alone = self._layers.difference(mlp.layer.index for mlp, _ in layers)
        self.held.clear()
        self.held.update((mlp.layer.index, expert) for mlp, expert in self._wanted)
        self._fit()

    def clear(self) -> None:
        """Nothing is wanted any more; what was read ahead gives way to what is needed."""
        self._wanted, self._alone = [], NO_LAYERS
        self.held.clear()
        self._fit()

    def _fit(self) -> None:
        """The plan, to the cache as it is: resized, it has lost what was read ahead."""
        cache = self._cache
        self._capacity = cache.capacity
        keys = [((mlp.layer.index, expert), (mlp, expert)) for mlp, expert in self._wanted]
        self._missing = deque(w for key, w in keys if key in self.held and key not in cache)
        cache.guess_limit = max(0, min(len(keys), cache.capacity - self._top_k))
        share = SPARED_SHARE * len(self._alone) / len(self._layers)
        cache.spared.spare(self._alone, int(min(1.0, share) * cache.capacity))

    def fill(self, in_use: Collection[Key] = (), following: int | None = None) -> None:
        """Begin as many reads as there is room for; the rest follows as layers compute.

        Args:
            following: the layer that runs next, whose reads may not be put off.
        """
        cache = self._cache
        if cache.capacity != self._capacity:
            self._fit()
        missing = self._missing
        if not missing:
            return
        cache.collect_guesses()
        most = cache.capacity // AHEAD_SHARE
        pinned = self.held.union(in_use)
        with self._reader.behind():
            while missing and cache.store.may_read_ahead():
                mlp, expert = missing[0]
                later = mlp.layer.index != following
                if later and not cache.room and cache.guessed >= most:
                    return
                if (mlp.layer.index, expert) not in cache and not cache.guess(mlp, expert, pinned):
                    return
                missing.popleft()

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
        for expert in needed:
            if (layer, expert) in self.held:
                record = self._cache.record((layer, expert))
                if record is not None and record.guess:
                    arrival = record.arrival
                    self._step.waits_avoided += arrival is None or arrival.done()
                self.held.discard((layer, expert))
        while self._missing and self._missing[0][0].layer.index == layer:
            self._missing.popleft()  # read on demand, now

    def start(
        self, experts: StreamedExperts, guess: mx.array | None, in_use: Collection[Key]
    ) -> None:
        """The layer's own reads have begun."""
        self.fill(in_use)

    def finish_layer(self, mlp: ExpertMlp, in_use: Collection[Key]) -> None:
        """Its records may leave now."""
        self.fill(in_use, mlp.layer.index + 1)

    def finish_token(self, read_seconds_each: float) -> None:
        """There is no account to close."""
