"""What a probe of computing times, and how: one arm is one shape, its rate the median of runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from mlx_stream.planner.machine_profile import ComputeRate

Packing = tuple[str, int, int]  # mode, bits, group size

PACKED: Packing = ("affine", 4, 64)
MICRO: Packing = ("mxfp4", 4, 32)
FLOATS: Packing = ("none", 0, 0)
LEAST_ROUNDS, MOST_ROUNDS = 3, 50
LEAST_SECONDS = 0.02  # of an arm in a round


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


def measure_all(
    arms: Sequence[Arm], seconds: float, progress: Callable[[int, int], None] | None = None
) -> list[ComputeRate]:
    """Medians over rounds in which every arm runs once, after a first round that warms up.

    Rounds, since other work on a machine comes in spells: a spell then slows a run of many arms
    instead of all runs of one.

    Args:
        seconds: further rounds begin until these are over; at least LEAST_ROUNDS.
        progress: told how many runs are done, and of how many at least.
    """
    times: list[list[float]] = [[] for _ in arms]
    began, least = time.perf_counter(), (LEAST_ROUNDS + 1) * len(arms)
    for number in range(MOST_ROUNDS + 1):
        if number > LEAST_ROUNDS and time.perf_counter() - began > seconds:
            break
        for place, arm in enumerate(arms):
            times[place].append(_seconds(arm.run))
            if progress is not None:
                progress(min(number * len(arms) + place + 1, least), least)
    return [_rate(arm, taken[1:]) for arm, taken in zip(arms, times, strict=True)]


def _seconds(run: Callable[[], object]) -> float:
    """Of one run, repeated when it is so short that threads would only wake up for it."""
    started, count, taken = time.perf_counter(), 0, 0.0
    while taken < LEAST_SECONDS:
        run()
        count += 1
        taken = time.perf_counter() - started
    return taken / count


def _rate(arm: Arm, times: Sequence[float]) -> ComputeRate:
    typical = median(times)
    spread = (max(times) - min(times)) / 2 / typical
    return replace(arm.rate, flops_per_second=arm.work / typical, spread=spread)
