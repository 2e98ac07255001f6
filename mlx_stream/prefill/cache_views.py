"""Views of prompt caches for chunks that run ahead of each other.

mlx-lm models build their masks when a chunk starts, from the offset of a *later* layer's cache,
which earlier chunks have not reached yet when the prompt runs layer by layer. A view shares the
real cache's state but never reports an offset below the position at which its chunk starts.
Without views seven model families are silently wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, ChunkedKVCache, KVCache, QuantizedKVCache

from mlx_stream.errors import MlxStreamError

_VIEW_CLASSES: dict[type, type] = {}
# They write at their offset only, and never read at or past it.
_APPENDING = (KVCache, QuantizedKVCache, ChunkedKVCache)


def cache_view(cache: Any, start: int) -> Any:
    """A view of one layer's cache for the chunk that starts at absolute position `start`."""
    if cache is None:
        return None
    if isinstance(cache, CacheList):
        return CacheList(*(cache_view(c, start) for c in cache.caches))
    if isinstance(cache, list | tuple):
        return type(cache)(cache_view(c, start) for c in cache)
    if "offset" not in getattr(cache, "__dict__", {}):
        return cache  # recurrent state has no position; chunks reach it in order
    view = object.__new__(_view_class(type(cache)))
    view.__dict__ = cache.__dict__
    view._start = start
    view._deferred_trim = False
    return view


def _view_class(cls: type) -> type:
    if cls not in _VIEW_CLASSES:
        namespace: dict[str, Any] = {
            "__slots__": ("_deferred_trim", "_start"),
            "offset": property(_get_offset, _set_offset),
        }
        if hasattr(cls, "maybe_trim_front"):
            namespace |= _deferred_trimming(cls)
        _VIEW_CLASSES[cls] = type(cls.__name__, (cls,), namespace)
    return _VIEW_CLASSES[cls]


def _get_offset(view: Any) -> int:
    return max(view.__dict__["offset"], view._start)


def _set_offset(view: Any, value: int) -> None:
    view.__dict__["offset"] = value


def _deferred_trimming(cls: Any) -> dict[str, Any]:
    """Chunked attention trims at chunk start; before its turn that would drop live keys."""

    def maybe_trim_front(self: Any) -> None:
        if self.__dict__["offset"] >= self._start:
            cls.maybe_trim_front(self)
        else:
            self._deferred_trim = True

    def update_and_fetch(self: Any, keys: mx.array, values: mx.array) -> Any:
        if self._deferred_trim:
            self._deferred_trim = False
            cls.maybe_trim_front(self)
        return cls.update_and_fetch(self, keys, values)

    return {"maybe_trim_front": maybe_trim_front, "update_and_fetch": update_and_fetch}


def cache_leaves(cache: Any) -> Iterator[Any]:
    """The elementary caches of a prompt cache (lists and CacheLists opened)."""
    if isinstance(cache, CacheList):
        yield from cache_leaves(list(cache.caches))
    elif isinstance(cache, list | tuple):
        for c in cache:
            yield from cache_leaves(c)
    elif cache is not None:
        yield cache


def cache_arrays(cache: Any) -> list[mx.array]:
    """Every array held by a prompt cache."""
    found: list[mx.array] = []
    for leaf in cache_leaves(cache):
        for value in leaf.__dict__.values():
            values = value if isinstance(value, list | tuple) else (value,)
            found.extend(v for v in values if isinstance(v, mx.array))
    return found


def cache_offset(cache: Any) -> int:
    """Tokens already in a prompt cache; 0 when it has no positional part."""
    return max(
        (leaf.__dict__["offset"] for leaf in cache_leaves(cache) if "offset" in leaf.__dict__),
        default=0,
    )


class CacheSnapshot:
    """Puts a prompt cache back to how it was, for requests that fail half way.

    Holds aliases of the arrays: MLX copies on the first in-place write while an alias lives.

    Args:
        append_only: what follows only appends to plain caches, as a decode step does. Their offset
            alone then undoes it: no array is copied, and none is kept alive when a cache grows.
    """

    def __init__(self, cache: Any, *, append_only: bool = False) -> None:
        self._offsets: list[tuple[Any, int]] = []
        self._states: list[tuple[Any, dict[str, Any]]] = []
        for leaf in cache_leaves(cache):
            if append_only and _only_appends(leaf):
                self._offsets.append((leaf, leaf.offset))
            else:
                self._states.append((leaf, _alias(leaf.__dict__)))

    def restore(self) -> None:
        """Undo everything that happened to the cache since the snapshot."""
        for leaf, offset in self._offsets:
            leaf.offset = offset
        for leaf, state in self._states:
            leaf.__dict__.clear()
            leaf.__dict__.update(_alias(state))


def _only_appends(leaf: Any) -> bool:
    return type(leaf) in _APPENDING or getattr(leaf, "only_appends", False)


def _alias(state: dict[str, Any]) -> dict[str, Any]:
    return {key: _alias_value(value) for key, value in state.items()}


def _alias_value(value: Any) -> Any:
    if isinstance(value, mx.array):
        return value[...]
    if isinstance(value, list):
        return [_alias_value(v) for v in value]
    if isinstance(value, tuple):
        return tuple(_alias_value(v) for v in value)
    return value


def check_prompt_cache(cache: Any, own: list[Any]) -> None:
    """A cache of another model might run, and be wrong.

    Args:
        own: a fresh cache of the model. Kinds may differ (quantized, rotating), layers may not.

    Raises:
        MlxStreamError: another number of layers, or other layers without a cache.
    """
    layers = [c is None for c in cache] if isinstance(cache, list | tuple) else None
    if layers != [c is None for c in own]:
        raise MlxStreamError(
            "this prompt cache is not one of this model",
            expected=f"{len(own)} layers, as make_prompt_cache(runtime.model) makes",
            actual=type(cache).__name__ if layers is None else f"{len(cache)} layers",
            remedy="pass the cache of an earlier prefill of this model, or None",
        )
