"""The default eviction policy: decayed use counts that outlive residence, over all layers."""

from __future__ import annotations

from collections.abc import Collection
from heapq import heapify, heappop, heappush

Key = tuple[int, int]  # (layer.index, expert)
_Entry = tuple[float, int, Key]  # count, sequence, whose

# Chosen on traces with tools/replay_trace.py; 32 to 128, 0.1 to 0.5 and 0.03 to 0.1 differ little.
HALF_LIFE = 64.0  # decoded tokens after which a use counts half
SEED_TRUST = 0.25  # what a use in the prompt counts, next to one in the answer
LAYER_TURN = 0.05  # see LfuPolicy
INFINITE = float("inf")
LARGEST_UNIT = 1e100
HEAP_SLACK = 64  # stale entries that are not worth a clean-up


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

    def victim(self, pinned: Collection[Key], spared: Collection[int] = ()) -> Key | None:
        """The least likely to be used soon that may leave."""
        heaps = list(self._heaps.values())
        if self._changed:
            for place, layer in enumerate(self._heaps):
                if layer in self._changed:
                    entry = self._lowest(heaps[place], ())
                    self._lows[place] = INFINITE if entry is None else entry[0]
            self._changed.clear()
        scale, bonuses = self._chance / self._unit, self._wait_bonus()
        values = [
            INFINITE if layer in spared else low * scale - bonus
            for layer, low, bonus in zip(self._heaps, self._lows, bonuses, strict=True)
        ]
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
