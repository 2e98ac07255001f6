"""What a probe of computing times, and how: one arm is one shape, its rate the median of runs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

from mlx_stream.planner.machine_profile import ComputeRate

Packing = tuple[str, int, int]  # mode, bits, group size

PACKED: Packing = ("affine", 4, 64)
MICRO: Packing = ("mxfp4", 4, 32)
FLOATS: Packing = ("none", 0, 0)
LEAST_RUNS, MOST_RUNS = 2, 9


@dataclass(frozen=True)
class BlockShape:
    """A decoder layer: hidden size, attention heads, key heads, head size, experts."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int = 128
    expert_hidden: int = 768


@dataclass(frozen=True)
class Arm:
    """Something to time.

    Attributes:
        rate: what is known of the result before.
        work: of one run, in the unit of the rate.
    """

    rate: ComputeRate
    work: float
    run: Callable[[], object]


def measure(arm: Arm, seconds: float) -> ComputeRate:
    """The median of some runs after a first one: as many as fit `seconds`, within bounds."""
    arm.run()
    times: list[float] = []
    while len(times) < LEAST_RUNS or (sum(times) < seconds and len(times) < MOST_RUNS):
        started = time.perf_counter()
        arm.run()
        times.append(time.perf_counter() - started)
    typical = median(times)
    spread = (max(times) - min(times)) / 2 / typical
    return replace(arm.rate, flops_per_second=arm.work / typical, spread=spread)
