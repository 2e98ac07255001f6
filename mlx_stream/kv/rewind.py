"""Going back in a prompt cache: by trimming where that is exact, else to a remembered point.

mlx-lm trims chunked caches whose front is gone already, and would then answer from too few keys;
here such a trim is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_lm.models.cache import ChunkedKVCache, KVCache, QuantizedKVCache

from mlx_stream.prefill.cache_views import CacheSnapshot, cache_leaves

_PLAIN = (KVCache, QuantizedKVCache)


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens two sequences share."""
    for n, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return n
    return min(len(a), len(b))


def can_rewind(cache: Any, tokens: int) -> bool:
    """Whether the last `tokens` tokens can be taken back exactly."""
    return tokens == 0 or all(_can_rewind(leaf, tokens) for leaf in cache_leaves(cache))


def _can_rewind(leaf: Any, tokens: int) -> bool:
    if not leaf.is_trimmable() or leaf.__dict__.get("offset", 0) < tokens:
        return False
    if isinstance(leaf, ChunkedKVCache):
        left = leaf.offset - tokens
        return leaf.start_position <= left // leaf.chunk_size * leaf.chunk_size
    return True


def rewind(cache: Any, tokens: int) -> None:
    """Take the last `tokens` tokens back, in place; only after :func:`can_rewind`."""
    assert can_rewind(cache, tokens)
    for leaf in cache_leaves(cache) if tokens else ():
        leaf.trim(tokens)


class CachePoint:
    """A state to come back to, however many tokens were added since.

    Plain caches only append, so their offset is enough; windows and recurrent states are kept as
    aliases, which cost memory once the cache moves on.

    Attributes:
        tokens: how many the cache held.
    """

    def __init__(self, cache: list[Any], tokens: int) -> None:
        self.tokens = tokens
        leaves = list(cache_leaves(cache))
        plain = [leaf for leaf in leaves if isinstance(leaf, _PLAIN)]
        self._parts = (
            CacheSnapshot(plain, append_only=True),
            CacheSnapshot([leaf for leaf in leaves if not isinstance(leaf, _PLAIN)]),
        )

    def restore(self) -> None:
        """Put the cache back; may be done again later."""
        for part in self._parts:
            part.restore()
