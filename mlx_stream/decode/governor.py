"""How many bytes the decode cache may hold: gives way to the rest of the machine, grows if it pays.

Pure: told what a token cost and what is free, it answers with a target. It owns no clock, asks the
system nothing and frees nothing; the same observations always give the same targets.

Three rules, the first that applies decides:

1. Free memory below the reserve: shrink at once by what is missing.
2. Smaller than it was before such a squeeze: grow back slowly while memory stays free.
3. Otherwise probe: while waiting for reads still costs time, grow by a step, and compare the wall
   time of a token before and after. A bigger cache is not always a faster one: it takes memory from
   the page cache, from the GPU and from other programs. If tokens got slower, go back and hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

__all__ = ["Governor", "GovernorTuning", "default_reserve"]

FULL_SHARE = 0.95  # of the target; slots are whole, so the last one rarely fits exactly


def default_reserve(total_bytes: int) -> int:
    """Bytes to leave free on a machine with `total_bytes` of memory: 1 GB or 5%."""
    return max(10**9, total_bytes // 20)


@dataclass(frozen=True)
class GovernorTuning:
    """What decides how fast it moves; counts are tokens, shares are of 1.

    Attributes:
        window: tokens whose median is compared.
        step: growth of one probe, as a share of the target.
        fill: tokens at most that a grown cache gets to fill before it is measured.
        tolerance: by how much a token may be slower without being called slower.
        stall_share: below this share of wall time, waiting for reads is not worth memory.
        recover_after: tokens of free memory before each step of growing back.
        recover_step: growth of such a step, as a share of what it grows back to.
        settle: tokens that freed memory gets to show up as free before it is asked for again.
    """

    window: int = 24
    step: float = 0.25
    fill: int = 24
    tolerance: float = 0.05
    stall_share: float = 0.02
    recover_after: int = 32
    recover_step: float = 0.10
    settle: int = 4


class Governor:
    """Decides the decode cache's byte target, one observation for each token.

    Args:
        minimum: bytes that are never taken away.
        maximum: bytes that are never exceeded, such as the memory budget's room or all experts.
        start: first target; clamped to the two.
        reserve: bytes that the machine is to keep free; see :func:`default_reserve`.
        hysteresis: bytes above the reserve before memory counts as free again; default: a quarter
            of the reserve.
        tuning: for tests and experiments.

    Attributes:
        target: bytes that the cache may hold now.
        level: the largest target in use that was not found slower; what it grows back to.
        holding: a step was slower, so it probes no more.
    """

    def __init__(
        self,
        minimum: int,
        maximum: int,
        start: int,
        *,
        reserve: int = 10**9,
        hysteresis: int | None = None,
        tuning: GovernorTuning | None = None,
    ) -> None:
        if not 0 <= minimum <= maximum or reserve < 0:
            raise ValueError(f"minimum {minimum}, maximum {maximum}, reserve {reserve}")
        self.minimum, self.maximum, self.reserve = minimum, maximum, reserve
        self.hysteresis = reserve // 4 if hysteresis is None else hysteresis
        self.tuning = tuning or GovernorTuning()
        self.target = self.level = min(maximum, max(minimum, start))
        self.holding = False
        self._asked = 0  # bytes given back lately, perhaps not free yet
        self._settling = 0  # tokens left to wait for them
        self._calm = 0  # tokens in a row with free memory
        self._baseline: float | None = None  # median wall at `level`, while a step is on trial
        self._stalling = True  # reads cost time in the window before
        self._doubted = False  # the step on trial was slower once
        self._filling = self.tuning.fill  # tokens left for the cache to fill
        self._walls: list[float] = []
        self._stalls: list[float] = []

    def observe(
        self,
        free_bytes: int,
        wall_seconds: float,
        stall_seconds: float,
        current_bytes: int | None = None,
    ) -> int:
        """The target after a token.

        Args:
            free_bytes: available to new allocations on this machine, or in this cgroup.
            wall_seconds: of the token.
            stall_seconds: of these, waited for expert reads.
            current_bytes: that the cache holds now; None: as much as it may.
        """
        current = self.target if current_bytes is None else current_bytes
        if free_bytes < self.reserve:
            self._squeeze(self.reserve - free_bytes, current)
            return self.target
        self._asked = self._settling = 0
        # Room that the cache may still take is as good as taken.
        room = free_bytes - self.reserve - self.hysteresis - max(0, self.target - current)
        self._calm = self._calm + 1 if room >= 0 else 0
        if self.target < self.level:
            self._recover(room)
        elif not self.holding:
            filled = current_bytes is not None and current_bytes >= FULL_SHARE * self.target
            self._probe(wall_seconds, stall_seconds, filled, room)
        return self.target

    def restart(self, maximum: int | None = None) -> int:
        """A new prompt: steps that were slower may be tried again, one on trial is taken back.

        Args:
            maximum: bytes never exceeded from now on, at least `minimum`; None: as before.

        Returns:
            The target.
        """
        if maximum is not None:
            self.maximum = max(self.minimum, maximum)
        self.level = min(self.level, self.maximum)
        self.target = min(self.target, self.level)
        self.holding = False
        self._measure_anew()
        return self.target

    def _squeeze(self, missing: int, current: int) -> None:
        """Give back what is missing; what was given back a moment ago is not asked for twice."""
        self._calm = 0
        self._measure_anew()
        if self._settling == 0:
            self._asked = 0
        self._settling = max(0, self._settling - 1)
        more = missing - self._asked
        if more <= 0:
            return
        self._asked, self._settling = missing, self.tuning.settle
        self.target = max(self.minimum, min(self.target, self.level, current) - more)

    def _recover(self, room: int) -> None:
        if self._calm < self.tuning.recover_after:
            return
        self._calm = 0
        step = max(1, int(self.level * self.tuning.recover_step))
        self.target = min(self.level, self.target + min(step, room))

    def _probe(self, wall: float, stall: float, filled: bool, room: int) -> None:
        if self._filling > 0 and not filled:
            self._filling -= 1
            return
        self._filling = 0
        self._walls.append(wall)
        self._stalls.append(stall)
        if len(self._walls) < self.tuning.window:
            return
        cost, stalled = median(self._walls), sum(self._stalls) / max(sum(self._walls), 1e-12)
        self._walls, self._stalls = [], []
        if self._judge(cost):
            self._grow(cost, stalled, room)

    def _judge(self, cost: float) -> bool:
        """Whether the target stands; one slow window is looked at again, two end the probe."""
        if self._baseline is not None and cost > self._baseline * (1 + self.tuning.tolerance):
            if self._doubted:
                self.target, self.holding = self.level, True
                self._measure_anew()
            self._doubted = True
            return False
        self.level, self._baseline, self._doubted = self.target, None, False
        return True

    def _grow(self, cost: float, stalled: float, room: int) -> None:
        """Put a step on trial, if reads still cost time and there is memory for it."""
        step = min(
            max(1, int(self.target * self.tuning.step)), self.maximum - self.target, max(0, room)
        )
        before, self._stalling = self._stalling, stalled > self.tuning.stall_share
        # A window in which stalls set in has the cheap tokens before them: no baseline.
        if not (before and self._stalling) or step <= 0:
            return
        self._baseline, self._filling = cost, self.tuning.fill
        self.target += step

    def _measure_anew(self) -> None:
        self._walls, self._stalls = [], []
        self._baseline, self._doubted, self._filling = None, False, self.tuning.fill
        self._stalling = True
