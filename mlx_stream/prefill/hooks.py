"""What may look on, and step in, while a prompt goes through the layers: see LayerMajorPrefill."""

from __future__ import annotations

from typing import Any

from mlx_stream.prefill.schedule import Segment


class PrefillHooks:
    """Called by a layer-major prefill in this order; every method here does nothing.

    All run in the compute thread. What they raise ends the prefill.
    """

    def begin(self, cache: list[Any]) -> tuple[int, int]:
        """Before anything: the ``(segment, expert layer)`` to start with; may fill the cache."""
        return 0, 0

    def enter_chunk(self, number: int, chunk: int, views: list[Any]) -> list[Any]:
        """In a chunk's greenlet before the model runs: the cache views that the model gets."""
        return views

    def meeting(self, number: int, segment: Segment, layer: int, cache: list[Any]) -> None:
        """All chunks of segment `number` wait at expert layer `layer`; the cache is evaluated."""

    def end_segment(self, number: int, segment: Segment, cache: list[Any]) -> None:
        """All chunks of segment `number` have passed all layers; the cache is evaluated."""
