"""What a Prerouter remembers of each conversation, and when it forgets.

A conversation is known by its prompt cache. What was remembered holds only while that cache stands
where the last step left it: after a rewind, another prompt or a failed step it does not, and the
next step is a first step.
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
        self._tracks: dict[int, tuple[weakref.ref[Any], Track]] = {}

    def find(self, cache: list[Any]) -> Track | None:
        """What is known of the conversation, if the cache still stands there."""
        leaf = _leaf(cache)
        reference, track = self._tracks.get(id(leaf), (None, None))
        if reference is None or track is None or reference() is not leaf:
            return None
        if track.offset != self._offset(cache):
            self.forget(cache)
            return None
        return track

    def note(
        self, cache: list[Any], previous: Values | None, prediction: Prediction | None
    ) -> None:
        """The cache has just moved on."""
        leaf = _leaf(cache)
        key = id(leaf)
        reference = weakref.ref(leaf, lambda _: self._tracks.pop(key, None))
        self._tracks[key] = (reference, Track(self._offset(cache), previous, prediction))

    def forget(self, cache: list[Any]) -> None:
        """The conversation begins anew."""
        self._tracks.pop(id(_leaf(cache)), None)

    def __len__(self) -> int:
        return len(self._tracks)


def _leaf(cache: Any) -> Any:
    """The first cache object; lists cannot be watched."""
    while isinstance(cache, list | tuple):
        cache = next(c for c in cache if c is not None)
    return cache
