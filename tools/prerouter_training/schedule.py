"""How long a run takes, how fast it learns, and how often it looks. Pure data."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """How long, how fast, and how often to look.

    Attributes:
        steps: optimizer steps at most.
        peak_lr: after `warmup` steps; then a cosine down to `final` of it.
        eval_every: steps between two held-out scores.
        save_every: steps between two checkpoints.
        patience: scores without a better one before the run stops.
    """

    steps: int
    peak_lr: float
    final: float = 0.05
    warmup: int = 20
    eval_every: int = 50
    save_every: int = 20
    patience: int = 4

    def rate(self, step: int) -> float:
        """Learning rate of a step, counted from 0."""
        cosine = 0.5 * (1 + math.cos(math.pi * step / self.steps))
        warm = min(1.0, (step + 1) / self.warmup)
        return self.peak_lr * warm * (self.final + (1 - self.final) * cosine)
