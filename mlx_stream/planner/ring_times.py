"""When every read and every computation of a prefill ends: the staging ring, as a recurrence.

Pure. Follows prefill/layer_major.py and experts/staging.py: one disk reads groups in order, each
into a slot that the group `slots` before it has left; one compute thread takes them in that order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """A read group.

    Attributes:
        read_seconds: alone on the disk.
        compute_seconds: of its experts, once they are in memory.
    """

    nbytes: float
    read_seconds: float
    compute_seconds: float


@dataclass(frozen=True)
class Phase:
    """A layer of one segment: `before_seconds` of attention and dense layers, then its experts."""

    before_seconds: float
    groups: tuple[Group, ...]


def read_seconds(phases: Sequence[Phase]) -> float:
    """Of all reads, one after the other."""
    return sum(g.read_seconds for p in phases for g in p.groups)


def compute_seconds(phases: Sequence[Phase]) -> float:
    """Of all computing, with no read in the way."""
    return sum(p.before_seconds + sum(g.compute_seconds for g in p.groups) for p in phases)


def ring_seconds(
    phases: Sequence[Phase], slots: int, *, ahead: bool, overlap_cost: float = 0.0
) -> float:
    """Seconds from the first read to the end of the last computation.

    Between the larger of `read_seconds` and `compute_seconds` and their sum.

    Args:
        ahead: reads are queued from the start; else a phase's are when its experts are reached.
        overlap_cost: share of the time in which both go on that each costs the other.
    """
    assert slots >= 1
    disk = now = 0.0
    left: list[float] = []  # when each group was done with its slot
    for phase in phases:
        now += phase.before_seconds
        queued = 0.0 if ahead else now
        for group in phase.groups:
            free = left[-slots] if len(left) >= slots else 0.0
            disk = max(disk, free, queued) + group.read_seconds
            now = max(now, disk) + group.compute_seconds
            left.append(now)
    together = max(0.0, read_seconds(phases) + compute_seconds(phases) - now)
    return now + overlap_cost * together
