"""Which layers have what in memory: counts, and whether a slot map is out of date."""

from __future__ import annotations


class Residency:
    """Records whose bytes are there, by layer."""

    def __init__(self) -> None:
        self._count: dict[int, int] = {}
        self._changed: set[int] = set()

    def arrived(self, layer: int) -> None:
        """A record can be computed with."""
        self._count[layer] = self._count.get(layer, 0) + 1
        self._changed.add(layer)

    def left(self, layer: int) -> None:
        """A record is gone."""
        self._count[layer] -= 1
        self._changed.add(layer)

    def moved(self) -> None:
        """Every record may lie elsewhere now."""
        self._changed.update(self._count)

    def count(self, layer: int) -> int:
        """Records of a layer."""
        return self._count.get(layer, 0)

    def take_changed(self, layer: int) -> bool:
        """Whether the layer changed since this was last asked."""
        changed = layer in self._changed
        self._changed.discard(layer)
        return changed

    def clear(self) -> None:
        """Nothing is in memory."""
        self.moved()
        self._count.clear()
