"""Who leaves a full expert cache: eviction policies over ``(layer, expert)`` keys, no records.

A policy never holds records and never evicts by itself: the cache asks for a victim, and says with
`forget` what really left. So a cache may pin, resize and fail reads as it likes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Protocol

from mlx_stream.decode.lfu_policy import Key, LfuPolicy


class EvictionPolicy(Protocol):
    """The order in which experts leave; keys are ``(layer.index, expert)``."""

    name: str

    def admit(self, key: Key, weight: float = 0.0) -> None:
        """A record became resident: used now, or seeded by the prompt's routing (weight > 0).

        A weight is in uses, as `seed_policy.seed_scores` counts them.
        """

    def touch(self, key: Key) -> None:
        """A resident record was used again."""

    def forget(self, key: Key) -> None:
        """A record left the cache, as a victim or otherwise; unknown keys are ignored."""

    def victim(self, pinned: Collection[Key], spared: Collection[int] = ()) -> Key | None:
        """The record that should leave next; None when all are pinned, or of `spared` layers."""

    def tick(self) -> None:
        """A token was decoded."""

    def resize(self, capacity: int) -> None:
        """The cache now holds up to `capacity` records; the policy evicts nothing by itself."""

    def clear(self) -> None:
        """Nothing is resident, and nothing is remembered."""


class LruPolicy:
    """The least recently used record leaves. O(1); pinned records are stepped over."""

    name = "lru"

    def __init__(self, capacity: int = 0) -> None:
        self._order: OrderedDict[Key, None] = OrderedDict()

    def admit(self, key: Key, weight: float = 0.0) -> None:
        """Most recent."""
        self._order[key] = None
        self._order.move_to_end(key)

    def touch(self, key: Key) -> None:
        """Most recent."""
        self._order.move_to_end(key)

    def forget(self, key: Key) -> None:
        """Out of the order."""
        self._order.pop(key, None)

    def victim(self, pinned: Collection[Key], spared: Collection[int] = ()) -> Key | None:
        """The oldest that may leave."""
        return next((k for k in self._order if k not in pinned and k[0] not in spared), None)

    def tick(self) -> None:
        """Nothing to do."""

    def resize(self, capacity: int) -> None:
        """Nothing to do."""

    def clear(self) -> None:
        """Empty."""
        self._order.clear()


class S3FifoPolicy:
    """Three FIFO queues: a small one for newcomers, a main one, and a ghost of keys that left.

    Yang et al., "FIFO queues are all you need for cache eviction", SOSP'23: the small queue gets a
    tenth of the capacity, the ghost as many keys as the main queue holds; counts stop at 3; who was
    used twice in the small queue moves to main, who was used in main goes round again. Amortized
    O(1): every step over a record lowers its count or moves it.
    """

    name = "s3fifo"
    SMALL_SHARE = 0.1
    MAX_COUNT = 3

    def __init__(self, capacity: int = 0) -> None:
        self.resize(capacity)
        self.clear()

    def resize(self, capacity: int) -> None:
        """New target sizes; queues move towards them as victims are asked for."""
        self._small_target = max(1, int(capacity * self.SMALL_SHARE))
        self._ghost_target = max(1, capacity - self._small_target)

    def clear(self) -> None:
        """Three empty queues."""
        self._small: OrderedDict[Key, int] = OrderedDict()
        self._main: OrderedDict[Key, int] = OrderedDict()
        self._ghost: OrderedDict[Key, None] = OrderedDict()

    def admit(self, key: Key, weight: float = 0.0) -> None:
        """A newcomer starts in small; seeds and keys that the ghost remembers start in main."""
        self.forget(key)
        known = key in self._ghost
        self._ghost.pop(key, None)
        (self._main if known or weight > 0 else self._small)[key] = 0

    def touch(self, key: Key) -> None:
        """Count the use; the place in the queue stays."""
        queue = self._small if key in self._small else self._main
        queue[key] = min(queue[key] + 1, self.MAX_COUNT)

    def forget(self, key: Key) -> None:
        """Out of its queue; what leaves small is remembered for a while."""
        self._main.pop(key, None)
        if self._small.pop(key, None) is not None:
            self._ghost[key] = None
            while len(self._ghost) > self._ghost_target:
                self._ghost.popitem(last=False)

    def victim(self, pinned: Collection[Key], spared: Collection[int] = ()) -> Key | None:
        """The paper's eviction, stepping over what stays; moves records between queues."""
        if len(self._small) >= self._small_target:
            found = self._from_small(pinned, spared) or self._from_main(pinned, spared)
        else:
            found = self._from_main(pinned, spared) or self._from_small(pinned, spared)
        # A walk through small may have moved all that it could give to main.
        return found or self._from_main(pinned, spared)

    def tick(self) -> None:
        """Nothing to do."""

    def _from_small(self, pinned: Collection[Key], spared: Collection[int]) -> Key | None:
        found, used = None, []
        for key, count in self._small.items():
            if key in pinned or key[0] in spared:
                continue
            if count <= 1:
                found = key
                break
            used.append(key)
        for key in used:
            del self._small[key]
            self._main[key] = 0
        return found

    def _from_main(self, pinned: Collection[Key], spared: Collection[int]) -> Key | None:
        for _ in range(self.MAX_COUNT + 1):
            found, used = None, []
            for key, count in self._main.items():
                if key in pinned or key[0] in spared:
                    continue
                if count == 0:
                    found = key
                    break
                used.append(key)
            for key in used:
                self._main[key] -= 1
                self._main.move_to_end(key)
            if found is not None:
                return found
        return None


_MAKERS: dict[str, Callable[[int], EvictionPolicy]] = {
    "lru": LruPolicy,
    "lfu": LfuPolicy,
    "s3fifo": S3FifoPolicy,
}
POLICIES = tuple(_MAKERS)
DEFAULT_POLICY = "lfu"


def make_policy(name: str, *, capacity: int) -> EvictionPolicy:
    """An empty policy; `capacity` in records may change later by `resize`."""
    assert name in _MAKERS, f"unknown policy {name!r}"
    return _MAKERS[name](capacity)
