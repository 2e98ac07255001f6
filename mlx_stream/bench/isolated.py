"""The two halves of a prefill alone: its reads without computing, its computing without reads."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from mlx_stream.backends.base import Fence, NoFence
from mlx_stream.engine import Engine
from mlx_stream.experts.staging import Slot, SlotState, StagingRing
from mlx_stream.prefill.schedule import PrefillPlan
from mlx_stream.storage.read_plan import GroupRead, plan_group

Filled = dict[tuple[int, tuple[int, ...]], Slot]


class PreloadedRing(StagingRing):
    """Serves every group from memory that was filled before the clock started."""

    def __init__(self, filled: Filled) -> None:
        self._filled = filled
        self._queue: deque[GroupRead] = deque()
        self.stall_seconds = 0.0

    def enqueue(self, reads: Iterable[GroupRead]) -> None:
        """Remember the order."""
        self._queue.extend(reads)

    def next(self) -> Slot:
        """The next group, already in memory."""
        read = self._queue.popleft()
        slot = self._filled[read.layer, read.experts]
        slot.state, slot.read = SlotState.IN_USE, read
        return slot

    def release(self, slot: Slot, fence: Fence) -> None:
        """Nothing is refilled."""

    def drain(self) -> None:
        """Nothing is in flight."""

    def cancel(self) -> None:
        """Nothing is in flight."""

    def close(self) -> None:
        """The memory belongs to whoever filled it."""


def reads_of(engine: Engine, plan: PrefillPlan) -> list[GroupRead]:
    """Every group read of one pass, in order."""
    reader = engine.reader
    return [
        plan_group(
            layer,
            layer.experts_at(range(a, b)),
            align=reader.align,
            file_sizes=reader.file_sizes,
        )
        for layer, planned in zip(engine.index.layers, plan.layers, strict=True)
        for a, b in planned.groups
    ]


def read_only(engine: Engine, plan: PrefillPlan) -> float:
    """Seconds to pull one pass through the plan's staging ring."""
    ring = StagingRing(engine.backend, engine.reader, plan.slot_nbytes, plan.slots)
    try:
        reads = reads_of(engine, plan)
        started = time.perf_counter()
        ring.enqueue(reads)
        for _ in reads:
            ring.release(ring.next(), NoFence())
        return time.perf_counter() - started
    finally:
        ring.close()


def preload(engine: Engine, plan: PrefillPlan) -> Filled:
    """All experts in memory, one slot a group; outside any budget. Free with `unload`."""
    filled: Filled = {}
    for read in reads_of(engine, plan):
        buffer = engine.backend.allocate(read.slot_nbytes, engine.reader.align)
        engine.reader.submit(read.ops, buffer.array).wait()
        filled[read.layer, read.experts] = Slot(buffer, read=read)
    return filled


def unload(engine: Engine, filled: Filled) -> None:
    """Give the memory of `preload` back."""
    for slot in filled.values():
        engine.backend.free(slot.buffer)
    filled.clear()
