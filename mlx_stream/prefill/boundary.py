"""Decoder layers that can be looked at from outside, and skipped when a prompt is resumed.

The model stays mlx-lm's: the elements of its longest layer list are replaced by views of them, of
a subclass of their class, which share parameters and attributes. A view hands its call on; at a
boundary it keeps what the layer returned, and in front of one it returns what was kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import greenlet
import mlx.core as mx
import mlx.nn as nn

from mlx_stream.errors import CapabilityError
from mlx_stream.experts.streamed_experts import StreamedExperts
from mlx_stream.prefill.cache_views import cache_leaves
from mlx_stream.prefill.layer_outputs import given_to, pack, pack_changed, put_changed, unpack
from mlx_stream.prefill.stand_ins import seen

_VIEW_CLASSES: dict[type, type] = {}


@dataclass
class Kept:
    """One chunk at a boundary: what its last layer returned and changed."""

    output: Any
    changed: list[Any]
    arrays: list[mx.array]


@dataclass
class ChunkRun:
    """One chunk on its way through the layers.

    Attributes:
        views: the caches that the model was given, entry by entry.
        skip_to: layers up to this one return what `kept` says; -1 for none.
        seen: what the chunk saw of the caches when it reached the first layer.
        outputs: what was kept, by layer.
    """

    views: list[Any]
    skip_to: int = -1
    kept: Kept | None = None
    seen: list[list[dict[str, Any]]] | None = None
    outputs: dict[int, Kept] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.entries = {
            id(leaf.__dict__): n for n, view in enumerate(self.views) for leaf in cache_leaves(view)
        }


class LayerBoundaries:
    """The decoder layers of one model. Use as a context manager: inside, the views are in place.

    Attributes:
        count: decoder layers.
        owners: the decoder layer of every expert layer, in order.
        capture: layers behind which outputs are kept.
        touched: decoder layers that were given a cache entry, by entry.

    Raises:
        CapabilityError: the expert layers are not in one list of decoder layers.
    """

    def __init__(self, model: nn.Module, streamed: Sequence[StreamedExperts]) -> None:
        self._list, self.owners = _layer_list(model, streamed)
        self._originals = list(self._list)
        self.count = len(self._list)
        self.capture: frozenset[int] = frozenset()
        self.touched: dict[int, set[int]] = {}
        self._runs: dict[Any, ChunkRun] = {}

    def __enter__(self) -> LayerBoundaries:
        self._list[:] = [_view(layer, n, self) for n, layer in enumerate(self._originals)]
        return self

    def __exit__(self, *exc: object) -> None:
        self._list[:] = self._originals
        self.forget()

    def enter(self, run: ChunkRun) -> None:
        """The current greenlet is about to run the model for this chunk."""
        self._runs[greenlet.getcurrent()] = run

    def forget(self) -> None:
        """Drop all chunks."""
        self._runs.clear()

    def call(
        self,
        number: int,
        layer: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """A call of decoder layer `number`, whose own code is `layer`."""
        run = self._runs.get(greenlet.getcurrent())
        if run is None:
            return layer(*args, **kwargs)
        given = given_to(args, kwargs)
        if run.seen is None:
            run.seen = [seen(view) for view in run.views]
        self._note_caches(number, run, given)
        if number <= run.skip_to:
            kept = run.kept
            assert kept is not None
            if number == run.skip_to:
                run.kept = None  # or it would keep the hidden state to the end of the prompt
            put_changed(kept.changed, kept.arrays, given)
            return unpack(kept.output, kept.arrays, given)
        output = layer(*args, **kwargs)
        if number in self.capture:
            arrays: list[mx.array] = []
            form = pack(output, arrays)
            run.outputs[number] = Kept(form, pack_changed(given, arrays), arrays)
        return output

    def _note_caches(self, number: int, run: ChunkRun, given: list[Any]) -> None:
        for value in given:
            for leaf in cache_leaves(value) if _may_hold_caches(value) else ():
                entry = run.entries.get(id(getattr(leaf, "__dict__", None)))
                if entry is not None:
                    self.touched.setdefault(entry, set()).add(number)

    def finished(self, boundary: int) -> list[int]:
        """Cache entries that only layers up to the boundary were given."""
        return sorted(n for n, layers in self.touched.items() if max(layers) <= boundary)

    def done_experts(self, boundary: int) -> int:
        """Expert layers up to the boundary."""
        return sum(owner <= boundary for owner in self.owners)


def _may_hold_caches(value: Any) -> bool:
    return not isinstance(value, mx.array | str | dict | int | float | None)


def _layer_list(
    model: nn.Module, streamed: Sequence[StreamedExperts]
) -> tuple[list[Any], list[int]]:
    """The list that holds all expert layers' decoder layers, and where each is in it."""
    places = [_place(model, experts) for experts in streamed]
    lists = {id(found): found for found, _ in places}
    owners = [number for _, number in places]
    if len(lists) != 1 or None in (found for found, _ in places) or owners != sorted(owners):
        raise CapabilityError(
            "a prefill of this model cannot be resumed",
            tensor=type(model).__module__,
            expected="all expert layers in one list of decoder layers, in order",
            actual=f"{len(lists)} lists",
            remedy="run this model without --checkpoint-dir",
        )
    return places[0][0], owners


def _place(value: Any, wanted: nn.Module) -> tuple[Any, int]:
    """The outermost list on the way from `value` to a module, and the position there."""
    if isinstance(value, list):
        for n, element in enumerate(value):
            if element is wanted or (isinstance(element, nn.Module) and _holds(element, wanted)):
                return value, n
        return None, -1
    for child in value.values() if isinstance(value, nn.Module) else ():
        if isinstance(child, nn.Module | list):
            found = _place(child, wanted)
            if found[0] is not None:
                return found
    return None, -1


def _holds(module: nn.Module, wanted: nn.Module) -> bool:
    return any(part is wanted for _, part in module.named_modules())


def _view(layer: nn.Module, number: int, boundaries: LayerBoundaries) -> nn.Module:
    cls = type(layer)
    if cls not in _VIEW_CLASSES:
        namespace = {"__slots__": ("_boundaries", "_number"), "__call__": _call}
        _VIEW_CLASSES[cls] = type(cls.__name__, (cls,), namespace)
    view = _VIEW_CLASSES[cls].__new__(_VIEW_CLASSES[cls])
    dict.update(view, layer)
    object.__setattr__(view, "__dict__", layer.__dict__)  # Module would take it for a weight
    object.__setattr__(view, "_boundaries", boundaries)
    object.__setattr__(view, "_number", number)
    return view


def _call(view: Any, *args: Any, **kwargs: Any) -> Any:
    own = type(view).__mro__[1].__call__
    return view._boundaries.call(view._number, lambda *a, **k: own(view, *a, **k), args, kwargs)
