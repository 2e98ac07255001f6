"""Stand-ins for the caches of layers that a resumed prompt does not run again.

Models build masks and positions when a chunk starts, from the caches of any layers: from their
offsets, sizes and shapes, never from keys and values. A stand-in has these as they were when the
chunk started, so masks come out as they did, while the real cache already holds the whole prompt.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from mlx_stream.prefill.cache_views import cache_leaves

_SCALARS = (bool, int, float, str)


def seen(view: Any) -> list[dict[str, Any]]:
    """What a chunk sees of one layer's cache, leaf by leaf: scalars and shapes, JSON-ready."""
    return [_seen_leaf(leaf) for leaf in cache_leaves(view)]


def _seen_leaf(leaf: Any) -> dict[str, Any]:
    state = {}
    for key, value in leaf.__dict__.items():
        form = _form(value)
        if form is not None:
            state[key] = form
    if "offset" in leaf.__dict__:
        state["offset"] = {"value": leaf.offset}  # a view's, which is never behind its chunk
    return state


def _form(value: Any) -> Any:
    if value is None or isinstance(value, _SCALARS):
        return {"value": value}
    if isinstance(value, mx.array):
        return {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("mlx.core.")}
    if isinstance(value, list | tuple):
        parts = [_form(v) for v in value]
        return None if None in parts else {type(value).__name__: parts}
    return None


def _value(form: Any) -> Any:
    if "value" in form:
        return form["value"]
    if "shape" in form:
        # Never evaluated: it only has a shape.
        return mx.zeros(form["shape"], dtype=getattr(mx, form["dtype"]))
    kind = list if "list" in form else tuple
    return kind(_value(part) for part in form[kind.__name__])


def stand_in(view: Any, forms: list[dict[str, Any]]) -> Any:
    """A cache of the class of `view` as an earlier one was :func:`seen`; not for taking tokens."""
    if view is None:
        return None
    if isinstance(view, CacheList):
        return CacheList(*stand_in(list(view.caches), forms))
    if isinstance(view, list | tuple):
        counts = [len(list(cache_leaves(v))) for v in view]
        starts = [sum(counts[:n]) for n in range(len(counts))]
        return type(view)(
            stand_in(v, forms[a : a + n]) for v, a, n in zip(view, starts, counts, strict=True)
        )
    made = object.__new__(_plain_class(type(view)))
    made.__dict__ = {key: _value(form) for key, form in forms[0].items()}
    for key, value in view.__dict__.items():
        made.__dict__.setdefault(key, value)  # what is not data: options and the like
    return made


def _plain_class(cls: type) -> type:
    """The class under a view's: stand-ins have offsets of their own."""
    return cls.__mro__[1] if "_start" in vars(cls) else cls
