"""What a Prerouter remembers of each conversation, and when it forgets.

A conversation is known by its prompt cache. What was remembered holds only while that cache stands
where the last step left it, or the one before: a step that is taken back is taken again with the
same routing. After a longer rewind or another prompt the next step is a first step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlx_stream.prerouter.router_maths import Values


@dataclass(frozen=True)
class Prediction:
    """Routing of the next step's consumer layers (C), all evaluated.

    Attributes:
        ids: ``[C, K]`` on the host.
        used_ids, weights: ``[C, K]``, where the heads run: on a device, or numpy's.
    """

    ids: np.ndarray
    used_ids: Values
    weights: Values


@dataclass(frozen=True)
class Track:
    """After a step or a prefill.

    Attributes:
        offset: tokens in the prompt cache.
        previous: ``[H, K]`` experts of the last token in the owner layers; None is no token.
        prediction: None when the next step's layers all route themselves.
    """

    offset: int
    previous: Values | None
    prediction: Prediction | None


class Tracks:
    """The tracks of all conversations whose caches live.

    Args:
        cache_offset: tokens in a prompt cache.
    """

    def __init__(self, cache_offset: Callable[[list[Any]], int]) -> None:
        self._offset = cache_offset
        self._tracks: dict[int, tuple[weakref.ref[Any], tuple[Track, ...]]] = {}  # newest first

    def find(self, cache: list[Any]) -> Track | None:
        """What is known of the conversation, if the cache still stands there."""
        leaf = _leaf(cache)
        offset = self._offset(cache)
        for place, track in enumerate(known := self._known(leaf)):
            if track.offset == offset:
                self._keep(leaf, known[place:])
                return track
        self.forget(cache)
        return None

    def note(
        self, cache: list[Any], previous: Values | None, prediction: Prediction | None
    ) -> None:
        """The cache has just moved on."""
        leaf = _leaf(cache)
        track = Track(self._offset(cache), previous, prediction)
        before = [known for known in self._known(leaf)[:1] if known.offset == track.offset - 1]
        self._keep(leaf, (track, *before))

    def forget(self, cache: list[Any]) -> None:
        """The conversation begins anew."""
        self._tracks.pop(id(_leaf(cache)), None)

    def _known(self, leaf: Any) -> tuple[Track, ...]:
        reference, tracks = self._tracks.get(id(leaf), (None, ()))
        return tracks if reference is not None and reference() is leaf else ()

    def _keep(self, leaf: Any, tracks: tuple[Track, ...]) -> None:
        key = id(leaf)
        reference = weakref.ref(leaf, lambda _: self._tracks.pop(key, None))
        self._tracks[key] = (reference, tracks)

    def __len__(self) -> int:
        return len(self._tracks)


def _leaf(cache: Any) -> Any:
    """The first cache object; lists cannot be watched."""
    while isinstance(cache, list | tuple):
        cache = next(c for c in cache if c is not None)
    return cache
