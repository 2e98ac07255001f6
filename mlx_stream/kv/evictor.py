"""Takes a layer's keys and values out of memory as soon as the prompt has passed the layer.

Works leaf by leaf: a cache whose offset has reached the segment's end is not needed again before
the next segment, or decode. Windows and recurrent states do not grow with the prompt and stay.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from mlx_stream.kv.array_file import ArrayFile, Stored, remove_abandoned
from mlx_stream.kv.caches import QuantizingKVCache
from mlx_stream.kv.evict import SpillingKVCache
from mlx_stream.kv.leaf_state import class_name, leaf_state
from mlx_stream.kv.prompt_files import check_room, file_metadata, state_entries, unwritable
from mlx_stream.prefill.cache_views import cache_leaves, cache_offset
from mlx_stream.prefill.hooks import PrefillHooks
from mlx_stream.prefill.schedule import Segment

ROOM_PER_ENTRY = 8192  # header bytes of an entry: a handful of arrays and what they were
ROOM = 16384


class QuantizingEvictor(PrefillHooks):
    """Quantizes a layer's cache when the prompt has passed the layer, and not before."""

    def begin(self, cache: list[Any]) -> tuple[int, int]:
        """See PrefillHooks."""
        self._past = cache_offset(cache)
        for leaf in cache_leaves(cache):
            if isinstance(leaf, QuantizingKVCache):
                leaf.waits = True
        return 0, 0

    def meeting(self, number: int, segment: Segment, layer: int, cache: list[Any]) -> None:
        """See PrefillHooks."""
        self._quantize(cache, segment)

    def end_segment(self, number: int, segment: Segment, cache: list[Any]) -> None:
        """See PrefillHooks."""
        self._quantize(cache, segment)

    def _quantize(self, cache: list[Any], segment: Segment) -> None:
        done = self._past + segment.stop
        for leaf in cache_leaves(cache):
            if isinstance(leaf, QuantizingKVCache) and leaf.offset == done and leaf.enough:
                leaf.quantize()
                mx.eval(leaf.keys, leaf.values)

    def close(self, cache: list[Any]) -> None:
        """Let the caches follow mlx-lm's rule again."""
        for leaf in cache_leaves(cache):
            leaf.__dict__.pop("waits", None)


class DiskEvictor(PrefillHooks):
    """Moves caches to a file, which is an mlx-lm prompt cache once :meth:`finish` returns.

    Args:
        target: the file.
        about: what it says of itself (see prompt_files.about_prompt).
        nbytes: all keys and values of the prompt, at most.

    Raises:
        PromptFileError: from every method, when the file cannot be written; nothing is left.
    """

    def __init__(self, target: Path, about: dict[str, str], nbytes: int) -> None:
        self._target, self._about, self._nbytes = target, about, nbytes
        self._file: ArrayFile | None = None
        self._previous: ArrayFile | None = None
        self._past = 0

    def begin(self, cache: list[Any]) -> tuple[int, int]:
        """See PrefillHooks."""
        self._past = cache_offset(cache)
        try:
            self._target.parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(self._target)
        except OSError as error:
            raise unwritable(self._target, error.strerror or str(error)) from error
        check_room(self._target, self._nbytes)
        for leaf in cache_leaves(cache):
            if isinstance(leaf, SpillingKVCache):
                # It takes its rows back at its next use, and leaves again.
                leaf.__dict__.pop("layered", None)
        return 0, 0

    def meeting(self, number: int, segment: Segment, layer: int, cache: list[Any]) -> None:
        """See PrefillHooks."""
        self._evict(cache, self._past + segment.stop)

    def end_segment(self, number: int, segment: Segment, cache: list[Any]) -> None:
        """See PrefillHooks."""
        self._evict(cache, self._past + segment.stop)
        _close(self._previous)
        self._previous, self._file = self._file, None  # the next segment writes all rows anew

    def _evict(self, cache: list[Any], done: int) -> None:
        for leaf in cache_leaves(cache):
            if isinstance(leaf, SpillingKVCache) and leaf.offset == done:
                self.take(leaf)

    def take(self, leaf: SpillingKVCache, *, earlier: bool = False) -> None:
        """Move one cache out of memory, if it is there.

        Args:
            earlier: as the segment before left it; the current one will read and write it anew.
        """
        if leaf.spilled is not None:
            return
        try:
            if earlier:
                self._previous = self._previous or self._new_file()
            else:
                self._file = self._file or self._new_file()
            file = self._previous if earlier else self._file
            assert file is not None
            leaf.spill(file)
        except OSError as error:
            raise unwritable(self._target, str(error)) from error

    def _new_file(self) -> ArrayFile:
        room = ROOM + ROOM_PER_ENTRY * int(self._about["layers"])
        return ArrayFile(self._target, room + 2 * len(json.dumps(self._about)))

    def finish(self, cache: list[Any], *, load: bool) -> None:
        """Give the file its header and name; then load everything back, or read it step by step.

        Args:
            load: whether all keys and values fit in memory.
        """
        file = self._previous
        if file is None:
            return
        try:
            entries, scalars = state_entries([_stored_state(layer) for layer in cache])
            stored = {
                name: value if isinstance(value, Stored) else file.add(value)
                for name, value in entries.items()
            }
            file.finish(stored, file_metadata(self._about, cache, scalars))
        except OSError as error:
            raise unwritable(self._target, str(error)) from error
        for leaf in cache_leaves(cache):
            if isinstance(leaf, SpillingKVCache):
                if load:
                    leaf.load()
                    mx.eval([a for a in (leaf.keys, leaf.values) if a is not None])
                else:
                    leaf.layered = leaf.spilled is not None
        if load:
            self.close()
        self._previous = None  # layered caches own it now

    def close(self) -> None:
        """Remove what was not finished; caches that are still in the file are lost."""
        for file in (self._file, self._previous):
            _close(file)
        self._file = self._previous = None


def _close(file: ArrayFile | None) -> None:
    """On a disk that became read-only its name stays; the next prompt removes it."""
    if file is not None:
        with suppress(OSError):
            file.close()


def _stored_state(cache: Any) -> Any:
    """As leaf_state, with rows that are in the file left there."""
    if isinstance(cache, CacheList):
        return [(_stored_state(part), class_name(part)) for part in cache.caches]
    if isinstance(cache, SpillingKVCache) and cache.spilled is not None:
        return cache.spilled.keys, cache.spilled.values, cache.offset
    return leaf_state(cache)
