"""Which adapter each living prompt cache was made with. A cache is of one adapter, or of none."""

from __future__ import annotations

import weakref
from typing import Any

from mlx_stream.errors import KvCacheError


class CacheMarks:
    """Knows caches by their first leaf, for as long as that lives."""

    def __init__(self) -> None:
        self._marks: dict[int, tuple[weakref.ref[Any], str | None]] = {}

    def put(self, cache: Any, adapter: str | None) -> None:
        """The cache's keys and values are of this adapter from now on."""
        leaf = _leaf(cache)
        key = id(leaf)
        reference = weakref.ref(leaf, lambda _: self._marks.pop(key, None))
        self._marks[key] = (reference, adapter)

    def of(self, cache: Any, default: str | None) -> str | None:
        """The adapter of a cache; `default` for one that was made elsewhere."""
        leaf = _leaf(cache)
        reference, adapter = self._marks.get(id(leaf), (None, None))
        return adapter if reference is not None and reference() is leaf else default

    def check(self, cache: Any, adapter: str | None) -> None:
        """Refuse to go on with another adapter.

        Raises:
            KvCacheError: the cache was made with another one.
        """
        known = self.of(cache, adapter)
        if known != adapter:
            raise KvCacheError(
                "the prompt cache was made with another adapter",
                expected=f"adapter {known or 'none'}, as before",
                actual=f"adapter {adapter or 'none'}",
                remedy="go on with the same adapter, or begin without a cache",
            )


def _leaf(cache: Any) -> Any:
    while isinstance(cache, list | tuple):
        cache = next(c for c in cache if c is not None)
    return cache
