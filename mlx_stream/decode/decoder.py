"""Everything decode needs, assembled: cache, seeds, paths, prediction, metrics.

Owns the expert cache. The engine says how many bytes it may take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_stream.backends.base import Backend, ExpertMlp
from mlx_stream.decode.exact import ExactExecutor
from mlx_stream.decode.expert_cache import ExpertCache
from mlx_stream.decode.hot_list import HotList
from mlx_stream.decode.mapped import MappedExecutor
from mlx_stream.decode.options import DecodeOptions, DecodePlan, plan_decode
from mlx_stream.decode.planar_slots import PlanarSlots, most_slots, one_layout
from mlx_stream.decode.policy import make_policy
from mlx_stream.decode.predict import Lookahead
from mlx_stream.decode.prerouted_reads import PreroutedReads
from mlx_stream.decode.prerouter import Prerouter
from mlx_stream.decode.readahead import ReadAhead
from mlx_stream.decode.seed import PromptSeeder
from mlx_stream.decode.slots import RecordSlots, SlotStore, record_nbytes
from mlx_stream.decode.staged import RecentTokens, TokenAhead
from mlx_stream.decode.step import DecodeSteps, TakeSnapshot
from mlx_stream.decode.step_counts import RoutingObserver, StepCounts
from mlx_stream.errors import CapabilityError
from mlx_stream.experts.streamed_experts import ExecutorSlot, StreamedExperts
from mlx_stream.prerouter.opening import OpenPrerouter
from mlx_stream.storage.read_plan import layer_slot_capacity
from mlx_stream.storage.reader import Reader

WholeLayer = Callable[[mx.array, list[Any]], mx.array]


@dataclass(frozen=True)
class StreamedModel:
    """What decode must know of a loaded model.

    Attributes:
        streamed: expert layers in the order they run.
        hidden: width of the hidden state.
        dtype: of the activations.
        top_k: experts a token.
    """

    model: nn.Module
    streamed: Sequence[StreamedExperts]
    slot: ExecutorSlot
    hidden: int
    dtype: mx.Dtype
    top_k: int

    @classmethod
    def of(cls, loaded: Any) -> StreamedModel:
        """From what the loader returns."""
        shape = loaded.shape
        return cls(
            loaded.model, loaded.streamed, loaded.slot, shape.hidden, loaded.dtype, shape.top_k
        )

    @property
    def mlps(self) -> list[ExpertMlp]:
        """The expert layers' bytes and maths."""
        return [s.mlp for s in self.streamed]


@dataclass(frozen=True)
class Prerouting:
    """Whether routing is predicted, and by what.

    Attributes:
        opened: None when it is not.
        reason: for people.
        cache_offset: tokens in a prompt cache.
    """

    opened: OpenPrerouter | None
    reason: str
    cache_offset: Callable[[list[Any]], int]


class Decoder:
    """Assembled once for an engine. Compute thread only.

    Args:
        take_snapshot: how to undo a step on a prompt cache.
        whole_layer: runs a step as prefill runs a prompt.
        prerouting: None routes every layer by itself.

    Raises:
        CapabilityError: the path needs stacked slots, and the layers differ.
        MlxStreamError: the hot list is not one of this model.
    """

    def __init__(
        self,
        backend: Backend,
        reader: Reader,
        loaded: StreamedModel,
        options: DecodeOptions,
        *,
        take_snapshot: TakeSnapshot,
        whole_layer: WholeLayer,
        prerouting: Prerouting | None = None,
    ) -> None:
        self._backend, self._reader, self._loaded = backend, reader, loaded
        self._options = options
        self._records = sum(m.layer.num_experts for m in loaded.mlps)
        self.plan = self._choose()
        self.cache = ExpertCache(
            self._make_store(), make_policy(options.policy, capacity=1), capacity=1
        )
        self.exact = ExactExecutor(backend, self.cache, StepCounts())
        self.prerouter = self._make_prerouter(prerouting)
        if self.prerouter is None:
            self.exact.ahead = self._make_ahead()
        else:
            self.plan = replace(self.plan, path="prerouted", reason="trained heads route")
        self._mapped = MappedExecutor(backend, self.cache) if self.plan.stacked else None
        self._hot_list = self._load_hot_list()
        self._token_ahead = self._make_token_ahead()
        self.steps = DecodeSteps(
            loaded.model,
            loaded.slot,
            reader,
            self.cache,
            self.exact,
            self.plan,
            take_snapshot=take_snapshot,
            mapped=self._mapped,
            token_ahead=self._token_ahead,
            whole_layer=whole_layer,
            prerouter=self.prerouter,
            prerouter_reason="off" if prerouting is None else prerouting.reason,
        )
        self.observer: RoutingObserver | None = None

    @property
    def observer(self) -> RoutingObserver | None:
        """Called with every layer's routing, in prefill and decode."""
        return self._observer

    @observer.setter
    def observer(self, observer: RoutingObserver | None) -> None:
        self._observer = observer
        if self._token_ahead is not None:
            observer = self._token_ahead.watching(observer)
        self.exact.observer = observer
        if self._mapped is not None:
            self._mapped.observer = observer

    @property
    def nbytes_least(self) -> int:
        """Bytes of the smallest cache."""
        return self.cache.slot_nbytes + self.cache.store.overhead_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes that the cache may come to hold."""
        return self.cache.capacity * self.cache.slot_nbytes + self.cache.store.overhead_nbytes

    def nbytes_for(self, nbytes: int) -> int:
        """What :attr:`nbytes` would be after a resize to `nbytes`."""
        store = self.cache.store
        return self.capacity_for(nbytes) * store.slot_nbytes + store.overhead_nbytes

    def capacity_for(self, nbytes: int) -> int:
        """Records that fit into `nbytes`; at least one, at most all."""
        spare = nbytes - self.cache.store.overhead_nbytes
        capacity = max(1, min(self._records, spare // self.cache.slot_nbytes))
        if self.plan.stacked:
            capacity = most_slots(self._loaded.mlps[0].layer, capacity)
        return capacity

    def resize(self, nbytes: int, spare_nbytes: int = 0) -> None:
        """Hold at most `nbytes` from now on; see :meth:`ExpertCache.resize`."""
        self.cache.resize(self.capacity_for(nbytes), spare_nbytes)

    def trim(self) -> None:
        """What the cache gave up goes back to the system."""
        self._backend.trim()

    def make_seeder(self) -> PromptSeeder:
        """For one prefill."""
        return PromptSeeder(
            self.cache,
            len(self._loaded.streamed),
            self._options.seed,
            hot_list=self._hot_list,
            observer=self._observer,
        )

    def close(self) -> None:
        """Give all memory back."""
        self.cache.close()

    def _choose(self) -> DecodePlan:
        layers = [m.layer for m in self._loaded.mlps]
        planes = "planes" in self._backend.capabilities
        try:
            one_layout(layers)
            same = True
        except CapabilityError:
            same = False
        plan = plan_decode(self._options.path, on_device=planes, one_layout=same)
        if plan.stacked:
            one_layout(layers)  # says which tensor differs
            if "stacked-slots" not in self._backend.capabilities:
                raise CapabilityError(
                    f"the {self._backend.name} backend has no stacked expert slots",
                    expected="--decode-path auto, exact or whole-layer",
                    actual=plan.path,
                    remedy="leave the decode path to the runtime",
                )
        return plan

    def _load_hot_list(self) -> HotList | None:
        path = self._options.hot_list
        if path is None:
            return None
        found = HotList.load(path)
        layers = [m.layer for m in self._loaded.mlps]
        found.check_model([(layer.index, layer.num_experts) for layer in layers], path)
        return found

    def _make_store(self) -> SlotStore:
        mlps, align = self._loaded.mlps, self._reader.align
        if self.plan.stacked:
            return PlanarSlots(self._backend, self._reader, mlps, 1)
        read = max(layer_slot_capacity(m.layer, 1, align) for m in mlps)
        return RecordSlots(self._backend, self._reader, record_nbytes(mlps, align, read))

    def _make_ahead(self) -> ReadAhead | None:
        loaded, predict = self._loaded, self._options.predict
        if predict == "off" or len(loaded.streamed) < 2:
            return None
        lookahead = None
        if predict in ("auto", "lookahead"):
            lookahead = Lookahead(
                loaded.model, loaded.streamed, loaded.slot, hidden=loaded.hidden, dtype=loaded.dtype
            )
            if not lookahead.layers:
                lookahead = None
        following = {
            a.mlp.layer.index: b for a, b in zip(loaded.streamed, loaded.streamed[1:], strict=False)
        }
        return ReadAhead(
            self.cache, lookahead, following, top_k=loaded.top_k, always=predict != "auto"
        )

    def _make_prerouter(self, prerouting: Prerouting | None) -> Prerouter | None:
        if prerouting is None or prerouting.opened is None:
            return None
        loaded = self._loaded
        reads = PreroutedReads(
            self.cache,
            self._reader,
            self.exact.counts,
            layers=[mlp.layer.index for mlp in loaded.mlps],
            top_k=loaded.top_k,
        )
        return Prerouter(
            prerouting.opened,
            loaded.slot,
            loaded.mlps,
            self.exact,
            reads,
            cache_offset=prerouting.cache_offset,
        )

    def _make_token_ahead(self) -> TokenAhead | None:
        if self.plan.path != "staged":
            return None
        loaded = self._loaded
        return TokenAhead(self.cache, loaded.mlps, RecentTokens(), top_k=loaded.top_k)
