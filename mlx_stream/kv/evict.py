"""Caches whose keys and values can leave memory between a layer's prefill and decode.

A SpillingKVCache is a KVCache until :meth:`SpillingKVCache.spill`. From then on its rows are in a
file, and it either takes them back when it is used next, or (layered) reads them anew for every
step and keeps only what was added since. All state is in ``__dict__``, which cache views share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache

from mlx_stream.errors import KvCacheError
from mlx_stream.kv.array_file import ArrayFile, Stored

_ROWS = -2  # the axis of tokens in keys and values [B, H, T, D]


@dataclass(frozen=True)
class Spilled:
    """Rows of one cache in a file."""

    file: ArrayFile
    keys: Stored
    values: Stored
    tokens: int

    def read(self) -> tuple[mx.array, mx.array]:
        """Keys and values, into memory.

        Raises:
            KvCacheError: the file cannot be read any more.
        """
        try:
            return self.file.read(self.keys), self.file.read(self.values)
        except OSError as error:
            raise KvCacheError(
                "evicted keys and values cannot be read back",
                file=self.file.target,
                actual=str(error),
                remedy="check the disk, and run the prompt again",
            ) from error


class SpillingKVCache(KVCache):
    """A KVCache whose rows may be in a file."""

    only_appends = True
    # Set on an instance only while its rows are in a file: else it has a KVCache's attributes.
    spilled: Spilled | None = None
    layered = False
    tail: tuple[mx.array, mx.array] | None = None  # rows since, when layered

    @classmethod
    def of(cls, plain: KVCache) -> SpillingKVCache:
        """A plain cache that may spill from now on; the two share keys, values and offset."""
        made = cls()
        made.__dict__ = plain.__dict__
        return made

    def plain(self) -> KVCache:
        """The same under mlx-lm's class; it must be in memory."""
        assert self.spilled is None
        made = KVCache()
        made.keys, made.values, made.offset = self.keys, self.values, self.offset
        return made

    def spill(self, file: ArrayFile) -> None:
        """Write the rows and drop them. Raises OSError; they are then still in memory."""
        if self.empty():
            return
        keys, values = self.keys_and_values()
        at = Spilled(file, file.add(keys), file.add(values), self.offset)
        self.keys = self.values = None
        self.spilled = at

    def load(self) -> None:
        """Take the rows back into memory."""
        if self.spilled is not None:
            self.keys, self.values = self._joined()
            for name in ("spilled", "layered", "tail"):
                self.__dict__.pop(name, None)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take ``[B, H, C, D]`` keys and values; returns all so far."""
        if not self.layered:
            self.load()
            return super().update_and_fetch(keys, values)
        tail = self._kept_tail()
        pairs = [(keys, values)] if tail is None else [tail, (keys, values)]
        self.tail = _join(pairs)
        self.offset = self.__dict__["offset"] + keys.shape[_ROWS]
        return self._joined()

    def _kept_tail(self) -> tuple[mx.array, mx.array] | None:
        """What was added since; trimming only moved the offset."""
        assert self.spilled is not None
        rows = self.__dict__["offset"] - self.spilled.tokens
        if self.tail is None or rows <= 0:
            return None
        keys, values = self.tail
        return keys[..., :rows, :], values[..., :rows, :]

    def _joined(self) -> tuple[mx.array, mx.array]:
        assert self.spilled is not None
        read, tail = self.spilled.read(), self._kept_tail()
        rows = self.__dict__["offset"]
        if rows < self.spilled.tokens:
            return read[0][..., :rows, :], read[1][..., :rows, :]
        return read if tail is None else _join([read, tail])

    def trim(self, n: int) -> int:
        """Forget the last tokens; those in the file are read to the offset only."""
        if self.__dict__["offset"] - n < (self.spilled.tokens if self.spilled else 0):
            self.load()
        return super().trim(n)

    def empty(self) -> bool:
        """Whether it holds nothing, in memory or in the file."""
        return self.keys is None and self.spilled is None

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Keys and values up to the offset."""
        return super().keys_and_values() if self.spilled is None else self._joined()

    @property
    def state(self) -> Any:
        """What mlx-lm saves."""
        return (*((None, None) if self.empty() else self.keys_and_values()), self.offset)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        held = (self.keys, self.values) if self.tail is None else self.tail
        return sum(a.nbytes for a in held if a is not None)


def _join(pairs: list[tuple[mx.array, mx.array]]) -> tuple[mx.array, mx.array]:
    if len(pairs) == 1:
        return pairs[0]
    keys, values = zip(*pairs, strict=True)
    return mx.concatenate(keys, axis=_ROWS), mx.concatenate(values, axis=_ROWS)


def replace_leaves(cache: Any, change: Callable[[Any], Any]) -> Any:
    """One layer's cache with every elementary cache changed; CacheLists stay the same object."""
    if isinstance(cache, CacheList):
        cache.caches = tuple(replace_leaves(part, change) for part in cache.caches)
        return cache
    return None if cache is None else change(cache)


def make_spilling(cache: list[Any]) -> None:
    """Let every plain cache spill from now on, in place; windows and recurrent states stay."""
    cache[:] = [
        replace_leaves(c, lambda x: SpillingKVCache.of(x) if type(x) is KVCache else x)
        for c in cache
    ]


def show_plain(cache: list[Any]) -> None:
    """mlx-lm's own class for every cache that is in memory, in place."""
    cache[:] = [
        replace_leaves(
            c, lambda x: x.plain() if isinstance(x, SpillingKVCache) and not x.spilled else x
        )
        for c in cache
    ]
