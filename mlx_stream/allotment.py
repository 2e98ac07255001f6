"""Who gets which part of the memory budget, in prefill and in decode.

Prefill's plan is granted as a whole; what it leaves goes to the expert cache, and when prefill is
over the cache may grow into its memory. During decode a governor watches what is free on the
machine and what a bigger cache gains.
"""

from __future__ import annotations

from collections.abc import Callable

import psutil

from mlx_stream.budget import MemoryBudget
from mlx_stream.config import format_bytes
from mlx_stream.decode.decoder import Decoder
from mlx_stream.decode.governor import Governor, default_reserve
from mlx_stream.decode.metrics import StepMetrics
from mlx_stream.errors import BudgetError
from mlx_stream.planner.free_memory import available_bytes
from mlx_stream.prefill.schedule import PrefillPlan

START_SHARE = 4  # a cache of unasked size starts with a quarter of what it may get


class Allotment:
    """Keeps the budget and the expert cache's size in step. Compute thread only.

    Args:
        scratch_nbytes: working memory of a decode step.
        asked: the budget is the user's, who gets it; otherwise the cache grows only while that
            makes tokens faster.
        free_bytes: what new allocations may take on this machine.
    """

    def __init__(
        self,
        budget: MemoryBudget,
        decoder: Decoder,
        scratch_nbytes: int,
        *,
        asked: bool,
        free_bytes: Callable[[], int] = available_bytes,
    ) -> None:
        self._budget, self._decoder, self._scratch = budget, decoder, scratch_nbytes
        self._asked, self._free_bytes = asked, free_bytes
        self._reserve = default_reserve(psutil.virtual_memory().total)
        self._governor: Governor | None = None
        self._kv_decode: int | None = None  # what the last plan's keys and values take afterwards
        budget.reserve("expert cache", decoder.nbytes)

    def grant(self, plan: PrefillPlan) -> None:
        """Ask for everything that the plan will allocate; the cache gives way.

        Raises:
            BudgetError: it does not fit.
        """
        memory = plan.memory
        self._budget.release("kv cache")  # first: the cache may have been planned into its place
        self._decoder.cache.drop_guesses()
        if not self._about_right(memory.expert_cache):
            self.resize_cache(memory.expert_cache)
        self._budget.reserve("kv cache", memory.kv)
        self._kv_decode = plan.kv_decode
        self._budget.reserve(
            "prefill", memory.staging + memory.held + memory.transient + memory.scratch
        )

    def _about_right(self, nbytes: int) -> bool:
        """Stacked slots are left alone if they need not change: resizing empties them."""
        return self._decoder.plan.stacked and nbytes // 2 <= self._decoder.nbytes <= nbytes

    def settle(self) -> None:
        """Prefill's memory is free again: the expert cache may grow into it during decode."""
        self._budget.release("prefill")
        if self._kv_decode is not None:
            self._budget.release("kv cache")
            self._budget.reserve("kv cache", self._kv_decode)
            self._kv_decode = None
        decoder, most = self._decoder, self._most_cache_nbytes
        if decoder.plan.stacked:
            most = self._stacked_nbytes(most)
        start = most if self._asked else max(decoder.cache.nbytes, most // START_SHARE)
        least = min(decoder.nbytes_least, most)
        self._governor = Governor(least, most, start, reserve=self._reserve)
        if not decoder.plan.stacked:
            self.resize_cache(self._governor.target)
        elif most > decoder.nbytes:
            decoder.trim()  # what prefill freed must be gone before slots take its place
            self.resize_cache(self._governor.target)

    def _stacked_nbytes(self, most: int) -> int:
        """Stacked slots are moved when they grow: only then if all of them can be kept.

        What is in them needs as much again beside the new ones on the way; less than twice as many
        slots are not worth it.
        """
        now = self._decoder.nbytes
        return most - now if most - now >= 2 * now else now

    def make_room(self) -> None:
        """The cache gives up what it does not need: a draft or an adapter is about to be loaded."""
        self.resize_cache(0)

    def after_step(self, step: StepMetrics) -> None:
        """Let the cache follow what is free, and what a bigger one gains."""
        governor = self._governor
        if governor is None:
            return
        target = governor.observe(
            self._free_bytes(), step.wall_seconds, step.stall_seconds, step.cache_bytes
        )
        now = self._decoder.nbytes
        if target < now:
            self.resize_cache(target)
            self._decoder.trim()
        elif self._decoder.nbytes_for(target) > now and self._worth_moving(target, now):
            self.resize_cache(target)

    def _worth_moving(self, target: int, now: int) -> bool:
        """Stacked slots grow in steps of half or more, since they are moved."""
        return not self._decoder.plan.stacked or target >= now + now // 2

    def change_total(self, total: int) -> None:
        """Another budget from now on; the cache gives way or may grow.

        Raises:
            BudgetError: what must stay does not fit; nothing changes.
        """
        least = self._budget.used - self._decoder.nbytes + self._decoder.nbytes_least
        if total < least + self._scratch:
            raise BudgetError(
                "the new memory budget is smaller than what must stay in memory",
                expected=f"at least {format_bytes(least + self._scratch)}",
                actual=format_bytes(total),
                remedy="keep the larger budget, or load the model again",
            )
        over = self._budget.used + self._scratch - total
        if over > 0:
            self.resize_cache(self._decoder.nbytes - over)
            self._decoder.trim()
        self._budget.total = total
        if self._governor is not None:
            self.settle()

    @property
    def _most_cache_nbytes(self) -> int:
        """What the cache could hold now, bytes of others left alone."""
        return self._decoder.nbytes + max(0, self._budget.available - self._scratch)

    def resize_cache(self, nbytes: int) -> None:
        """The cache holds at most `nbytes` (never less than one record) from now on."""
        before, after = self._budget.owner("expert cache"), self._decoder.nbytes_for(nbytes)
        # Asked for before it is allocated, given back after it is freed.
        if after > before:
            self._budget.reserve("expert cache", after - before)
        self._decoder.resize(nbytes, max(0, self._budget.available))
        if after < before:
            self._budget.release("expert cache", before - after)
