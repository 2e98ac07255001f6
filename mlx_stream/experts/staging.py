"""A ring of staging slots between reader threads and the compute thread.

A slot goes FREE -> FILLING -> IN_USE -> FENCED -> FREE. Readers touch only FILLING slots, the
compute thread only IN_USE ones, and a FENCED slot becomes FREE only when the work that read it has
been evaluated.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mlx_stream.backends.base import Backend, Fence, HostBuffer, NoFence
from mlx_stream.errors import MlxStreamError
from mlx_stream.storage.read_plan import GroupRead
from mlx_stream.storage.reader import Reader, Ticket
from mlx_stream.storage.slot_memory import trim_heap


def settle(tickets: Sequence[Ticket]) -> None:
    """Cancel reads and return when no thread writes for them any more."""
    for ticket in tickets:
        ticket.cancel()
    for ticket in tickets:
        # The request has its own error already; here only quiet matters.
        with contextlib.suppress(MlxStreamError):
            ticket.wait()


class SlotState(enum.Enum):
    """Who may touch a slot."""

    FREE = "free"
    FILLING = "filling"
    IN_USE = "in use"
    FENCED = "fenced"


@dataclass
class Slot:
    """One staging buffer and the read it holds."""

    buffer: HostBuffer
    state: SlotState = SlotState.FREE
    read: GroupRead | None = None
    ticket: Ticket | None = None
    fence: Fence = field(default_factory=NoFence)


class StagingRing:
    """Keeps as many reads in flight as there are slots; hands them over in order.

    Owns its slots' memory until :meth:`close`. Used from the compute thread only.
    """

    def __init__(self, backend: Backend, reader: Reader, slot_nbytes: int, slots: int) -> None:
        self._backend = backend
        self._reader = reader
        self._slots = [Slot(backend.allocate(slot_nbytes, reader.align)) for _ in range(slots)]
        self._waiting: deque[GroupRead] = deque()
        self._filling: deque[Slot] = deque()
        self._fenced: deque[Slot] = deque()
        self.stall_seconds = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(slot.buffer.nbytes for slot in self._slots)

    def enqueue(self, reads: Iterable[GroupRead]) -> None:
        """Append reads; those that find a free slot start at once."""
        self._waiting.extend(reads)
        self._fill()

    def next(self) -> Slot:
        """The next read of the queue, filled; waits for it. The caller owns it until release."""
        started = time.perf_counter()
        while not self._filling:
            if not self._fenced:
                raise AssertionError("nothing is queued")
            self._retire_one()
        slot = self._filling[0]
        assert slot.ticket is not None
        slot.ticket.wait()
        self._filling.popleft()
        slot.ticket = None
        self.stall_seconds += time.perf_counter() - started
        slot.state = SlotState.IN_USE
        return slot

    def release(self, slot: Slot, fence: Fence) -> None:
        """The slot may be refilled once `fence` has passed."""
        assert slot.state is SlotState.IN_USE, slot.state
        slot.fence, slot.state = fence, SlotState.FENCED
        self._fenced.append(slot)
        # One group of lazy work may stay in flight; older ones are waited for so that reads go on.
        while self._fenced and (self._fenced[0].fence.passed() or len(self._fenced) > 1):
            self._retire_one()

    def drain(self) -> None:
        """Wait for all fences; no slot is in use afterwards."""
        while self._fenced:
            self._retire_one()

    def cancel(self) -> None:
        """Drop queued reads and wait until no reader thread writes to a slot."""
        self._waiting.clear()
        settle([slot.ticket for slot in self._filling if slot.ticket is not None])
        self._filling.clear()
        self.drain()
        for slot in self._slots:
            slot.state, slot.read, slot.ticket, slot.fence = SlotState.FREE, None, None, NoFence()

    def close(self) -> None:
        """Cancel and give the memory back."""
        self.cancel()
        for slot in self._slots:
            self._backend.free(slot.buffer)
        self._slots.clear()
        trim_heap()

    def _retire_one(self) -> None:
        slot = self._fenced.popleft()
        slot.fence.wait()
        slot.fence, slot.read, slot.state = NoFence(), None, SlotState.FREE
        self._fill()

    def _fill(self) -> None:
        for slot in self._slots:
            if not self._waiting:
                return
            if slot.state is not SlotState.FREE:
                continue
            read = self._waiting.popleft()
            assert read.slot_nbytes <= slot.buffer.nbytes, "slot too small for the planned read"
            slot.read = read
            slot.state = SlotState.FILLING
            slot.ticket = self._reader.submit(read.ops, slot.buffer.array, read.checks)
            self._filling.append(slot)
