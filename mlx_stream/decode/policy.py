"""Who leaves a full expert cache: eviction policies over ``(layer, expert)`` keys, no records.

A policy never holds records and never evicts by itself: the cache asks for a victim, and says with
`forget` what really left. So a cache may pin, resize and fail reads as it likes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from heapq import heapify, heappop, heappush
from typing import Protocol

Key = tuple[int, int]
_Entry = tuple[float, int, Key]  # count, sequence, whose

# Chosen on the demo model's traces with tools/replay_trace.py; 32 to 128 and 0.1 to 0.5 differ
# little.
HALF_LIFE = 64.0  # decoded tokens after which a use counts half
SEED_TRUST = 0.25  # what a use in the prompt counts, next to one in the answer
LAYER_TURN = 0.05
INFINITE = float("inf")
LARGEST_UNIT = 1e100
HEAP_SLACK = 64  # stale entries that are not worth a clean-up


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

    def victim(self, pinned: Collection[Key]) -> Key | None:
        """The record that should leave next; None when all are pinned."""

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

    def victim(self, pinned: Collection[Key]) -> Key | None:
        """The oldest that is not pinned."""
        return next((key for key in self._order if key not in pinned), None)

    def tick(self) -> None:
        """Nothing to do."""

    def resize(self, capacity: int) -> None:
        """Nothing to do."""

    def clear(self) -> None:
        """Empty."""
        self._order.clear()


class LfuPolicy:
    """The least frequently used expert leaves; a use counts half after `half_life` tokens.

    Counts outlive residence: an expert that comes back goes on from where it was. Without that, at
    small budgets, nearly everything is a newcomer and the order says nothing. Memory is an entry
    for every expert ever admitted, so at most the experts of the model.

    A count is also an estimate of the chance that the next token uses the expert. Layers run in
    turn, so of two alike the one whose layer has just run leaves: it would wait longest. `turn` is
    the chance that a whole turn is worth.

    Instead of shrinking every count at a tick, new uses weigh more: the order is the same. One heap
    a layer, with stale entries: O(log n) for an update, O(layers + log n) for a victim. Ties within
    a layer go to the record that was used longest ago.
    """

    name = "lfu"

    def __init__(
        self,
        capacity: int = 0,
        *,
        half_life: float = HALF_LIFE,
        seed_trust: float = SEED_TRUST,
        turn: float = LAYER_TURN,
    ) -> None:
        self._growth = 2.0 ** (1.0 / half_life)
        self._chance = 1.0 - 1.0 / self._growth  # of a next use, for every use in a count
        self._seed_trust = seed_trust
        self._turn = turn
        self.clear()

    def clear(self) -> None:
        """Empty, at time zero."""
        self._unit = 1.0
        self._sequence = 0
        self._counts: dict[Key, float] = {}
        self._entries: dict[Key, _Entry] = {}
        self._heaps: dict[int, list[_Entry]] = {}  # layers in the order they run
        self._lows: list[float] = []  # lowest count of each heap
        self._changed: set[int] = set()  # layers whose lowest count must be looked up again
        self._now = -1  # the layer that runs
        self._bonuses: dict[int, list[float]] = {}  # see _wait_bonus

    def admit(self, key: Key, weight: float = 0.0) -> None:
        """One more use; a seed counts as a share of the uses in the prompt that `weight` says."""
        count = self._counts.get(key, 0.0)
        if weight > 0:
            self._set(key, max(count, self._unit * weight * self._seed_trust))
        else:
            self._set(key, count + self._unit)
            self._now = key[0]

    def touch(self, key: Key) -> None:
        """One more use."""
        self._set(key, self._counts[key] + self._unit)
        self._now = key[0]

    def forget(self, key: Key) -> None:
        """No candidate any more; the count stays."""
        if self._entries.pop(key, None) is not None:
            self._changed.add(key[0])

    def victim(self, pinned: Collection[Key]) -> Key | None:
        """The least likely to be used soon that is not pinned."""
        heaps = list(self._heaps.values())
        if self._changed:
            for place, layer in enumerate(self._heaps):
                if layer in self._changed:
                    entry = self._lowest(heaps[place], ())
                    self._lows[place] = INFINITE if entry is None else entry[0]
            self._changed.clear()
        scale, bonuses = self._chance / self._unit, self._wait_bonus()
        values = [low * scale - bonus for low, bonus in zip(self._lows, bonuses, strict=True)]
        while values and (least := min(values)) < INFINITE:
            place = values.index(least)
            entry = self._lowest(heaps[place], pinned)
            value = INFINITE if entry is None else entry[0] * scale - bonuses[place]
            if entry is not None and value <= least:
                return entry[2]
            values[place] = value  # its lowest was pinned
        return None

    def _wait_bonus(self) -> list[float]:
        """For each layer, how much less it is worth to keep a record that must wait for its turn.

        Depends on the layer that runs only, so it is kept.
        """
        bonus = self._bonuses.get(self._now)
        if bonus is None:
            layers = len(self._heaps)
            passed = sum(layer <= self._now for layer in self._heaps)
            bonus = [self._turn * ((i - passed) % layers) / layers for i in range(layers)]
            self._bonuses[self._now] = bonus
        return bonus

    def tick(self) -> None:
        """Uses from now on weigh more; counts are rescaled long before they overflow."""
        self._unit *= self._growth
        if self._unit > LARGEST_UNIT:
            self._counts = {key: count / self._unit for key, count in self._counts.items()}
            self._unit = 1.0
            resident, self._entries = sorted(self._entries.values(), key=lambda e: e[1]), {}
            self._heaps = {layer: [] for layer in self._heaps}
            for _, _, key in resident:
                self._set(key, self._counts[key])

    def resize(self, capacity: int) -> None:
        """Nothing to do."""

    def _lowest(self, heap: list[_Entry], pinned: Collection[Key]) -> _Entry | None:
        """The lowest live entry that is not pinned; drops the stale ones it meets."""
        aside, found = [], None
        while heap and found is None:
            entry = heap[0]
            if self._entries.get(entry[2]) is not entry:
                heappop(heap)
            elif entry[2] in pinned:
                aside.append(heappop(heap))
            else:
                found = entry
        for entry in aside:
            heappush(heap, entry)
        return found

    def _set(self, key: Key, count: float) -> None:
        self._counts[key] = count
        self._sequence += 1
        entry = (count, self._sequence, key)
        self._entries[key] = entry
        layer = key[0]
        if layer not in self._heaps:
            self._heaps = dict(sorted((self._heaps | {layer: []}).items()))
            self._lows = [INFINITE] * len(self._heaps)
            self._changed.update(self._heaps)
            self._bonuses.clear()
        self._changed.add(layer)
        heappush(self._heaps[layer], entry)
        if len(self._heaps[layer]) > HEAP_SLACK + 4 * len(self._entries) // len(self._heaps):
            self._rebuild(layer)

    def _rebuild(self, layer: int) -> None:
        live = [entry for entry in self._heaps[layer] if self._entries.get(entry[2]) is entry]
        heapify(live)
        self._heaps[layer] = live


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

    def victim(self, pinned: Collection[Key]) -> Key | None:
        """The paper's eviction, stepping over pinned records; moves records between queues."""
        if len(self._small) >= self._small_target:
            found = self._from_small(pinned) or self._from_main(pinned)
        else:
            found = self._from_main(pinned) or self._from_small(pinned)
        # A walk through small may have moved all that it could give to main.
        return found or self._from_main(pinned)

    def tick(self) -> None:
        """Nothing to do."""

    def _from_small(self, pinned: Collection[Key]) -> Key | None:
        found, used = None, []
        for key, count in self._small.items():
            if key in pinned:
                continue
            if count <= 1:
                found = key
                break
            used.append(key)
        for key in used:
            del self._small[key]
            self._main[key] = 0
        return found

    def _from_main(self, pinned: Collection[Key]) -> Key | None:
        for _ in range(self.MAX_COUNT + 1):
            found, used = None, []
            for key, count in self._main.items():
                if key in pinned:
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
