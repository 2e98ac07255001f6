"""What the cache and a decode step count while they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

RoutingObserver = Callable[[int, np.ndarray, bool], None]
"""``observer(layer index, ids [T, K], in prefill)``."""


@dataclass
class StepCounts:
    """Reset before a step, read after it.

    Attributes:
        syncs: times the host waited for the device.
        stall_seconds: the host waited for the disk.
        redone: the step was taken again on the exact path.
        predicted_layer_steps: layers whose routing was a Prerouter's prediction.
        checked_experts: predicted experts that were compared with the real router.
        agreed_experts: of these, those that it also chose.
        waits_avoided: predicted experts that had been read when their layer came.
        dropped_experts: routed experts of predicted layers that were left out; must be 0.
    """

    syncs: int = 0
    stall_seconds: float = 0.0
    redone: int = 0
    predicted_layer_steps: int = 0
    checked_experts: int = 0
    agreed_experts: int = 0
    waits_avoided: int = 0
    dropped_experts: int = 0

    def reset(self) -> None:
        """Back to zero."""
        for field in fields(self):
            setattr(self, field.name, field.default)


@dataclass
class CacheCounts:
    """Since the cache was made. A guess that was used is a hit."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    guesses: int = 0
    guesses_used: int = 0
    wasted_nbytes: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits over lookups."""
        return self.hits / max(1, self.hits + self.misses)
