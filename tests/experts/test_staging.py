"""The staging ring, with reads and fences that finish when the test says so."""

import numpy as np
import pytest

from mlx_stream.backends.base import HostBuffer, NoFence
from mlx_stream.errors import ReadError
from mlx_stream.experts.staging import SlotState, StagingRing, settle
from mlx_stream.storage.read_plan import GroupRead


def read(number, nbytes=64):
    """A read of one expert; `number` names it."""
    return GroupRead(0, (number,), (), (), nbytes, nbytes, nbytes)


class FakeBackend:
    def __init__(self):
        self.live = 0

    def allocate(self, nbytes, align):
        self.live += 1
        return HostBuffer(np.zeros(nbytes, np.uint8), None)

    def free(self, buffer):
        self.live -= 1


class FakeTicket:
    def __init__(self, buffer, error=None):
        self.buffer, self.error = buffer, error
        self.waited = self.cancelled = False

    def wait(self, timeout=None):
        self.waited = True
        if self.cancelled:
            raise ReadError("cancelled")
        if self.error is not None:
            raise self.error
        self.buffer[:] = 1

    def cancel(self):
        self.cancelled = True


class FakeReader:
    """Records what is submitted into which buffer; every read asks `allowed` first."""

    align = 1

    def __init__(self, allowed=lambda buffer: None):
        self.allowed = allowed
        self.tickets = []
        self.fail_at = None

    def submit(self, ops, buffer, checks=()):
        self.allowed(buffer)
        error = ReadError("EIO") if len(self.tickets) == self.fail_at else None
        self.tickets.append(FakeTicket(buffer, error))
        return self.tickets[-1]


class HeldFence:
    """Not passed until somebody waits for it."""

    def __init__(self, slot, log):
        self.buffer, self.log = slot.buffer.array, log
        self.waited = False

    def passed(self):
        return self.waited

    def wait(self):
        self.waited = True
        self.log.append(self)


class Bench:
    """A ring whose reader refuses to touch a buffer that pending work still reads."""

    def __init__(self, slots):
        self.backend = FakeBackend()
        self.fences, self.waits = [], []
        self.reader = FakeReader(self.check)
        self.ring = StagingRing(self.backend, self.reader, 64, slots)

    def check(self, buffer):
        busy = [f for f in self.fences if f.buffer is buffer and not f.waited]
        assert not busy, "a slot is refilled while work that reads it is pending"

    def release(self, slot):
        self.fences.append(HeldFence(slot, self.waits))
        self.ring.release(slot, self.fences[-1])


@pytest.mark.parametrize("slots", [1, 2, 3, 7])
def test_reads_come_in_order_and_never_into_a_busy_slot(slots):
    bench = Bench(slots)
    bench.ring.enqueue(read(n) for n in range(12))
    seen = []
    for _ in range(12):
        slot = bench.ring.next()
        assert slot.state is SlotState.IN_USE
        assert slot.buffer.array.all(), "next() returns when the bytes are there"
        seen.append(slot.read.experts[0])
        slot.buffer.array[:] = 0
        bench.release(slot)
        pending = [f for f in bench.fences if not f.waited]
        assert len(pending) <= 1, "at most one group of lazy work stays in flight"
    assert seen == list(range(12))
    assert bench.waits == bench.fences[: len(bench.waits)], "fences are waited for in order"
    bench.ring.drain()
    assert bench.waits == bench.fences


def test_a_slot_is_not_refilled_before_its_fence_was_waited_for():
    bench = Bench(2)
    bench.ring.enqueue(read(n) for n in range(4))
    assert len(bench.reader.tickets) == 2, "one read per slot is in flight"
    first = bench.ring.next()
    assert len(bench.reader.tickets) == 2, "a slot in use is not refilled"
    bench.release(first)
    assert first.state is SlotState.FENCED
    assert not bench.waits
    assert len(bench.reader.tickets) == 2, "nor a fenced one"
    second = bench.ring.next()
    bench.release(second)
    assert bench.waits == bench.fences[:1]
    assert len(bench.reader.tickets) == 3, "the first slot is free again and already filling"
    assert bench.reader.tickets[2].buffer is first.buffer.array
    assert (first.state, second.state) == (SlotState.FILLING, SlotState.FENCED)


def test_the_bench_notices_a_ring_that_does_not_wait(monkeypatch):
    """The check above can fail: a ring that forgets to wait is caught by the fake reader."""
    monkeypatch.setattr(HeldFence, "wait", lambda self: None)
    bench = Bench(2)
    bench.ring.enqueue(read(n) for n in range(4))
    bench.release(bench.ring.next())
    with pytest.raises(AssertionError, match="refilled while work"):
        bench.release(bench.ring.next())


def test_finished_work_frees_its_slot_at_once():
    bench = Bench(2)
    bench.ring.enqueue(read(n) for n in range(3))
    slot = bench.ring.next()
    bench.ring.release(slot, NoFence())
    assert slot.state is SlotState.FILLING
    assert len(bench.reader.tickets) == 3


def test_one_slot_waits_for_its_own_fence():
    bench = Bench(1)
    bench.ring.enqueue([read(0), read(1)])
    bench.release(bench.ring.next())
    assert not bench.waits
    assert bench.ring.next().read.experts == (1,)
    assert bench.waits == bench.fences


def test_reads_may_be_queued_later():
    """Short prompts queue a layer's reads only after its routing is known."""
    bench = Bench(2)
    for layer in range(3):
        bench.ring.enqueue([read(10 * layer + n) for n in range(3)])
        for n in range(3):
            slot = bench.ring.next()
            assert slot.read.experts == (10 * layer + n,)
            bench.release(slot)
    with pytest.raises(AssertionError, match="nothing is queued"):
        bench.ring.next()


def test_a_read_larger_than_its_slot_is_a_bug():
    bench = Bench(2)
    with pytest.raises(AssertionError, match="too small"):
        bench.ring.enqueue([read(0, nbytes=65)])


def test_an_endless_plan_is_pulled_lazily_or_refused_memory():
    bench = Bench(2)
    bench.ring.enqueue([read(n) for n in range(1000)])
    assert len(bench.reader.tickets) == 2


def test_a_failed_read_surfaces_and_the_ring_can_be_used_again():
    bench = Bench(2)
    bench.reader.fail_at = 1
    bench.ring.enqueue(read(n) for n in range(5))
    bench.release(bench.ring.next())
    with pytest.raises(ReadError, match="EIO"):
        bench.ring.next()
    bench.ring.cancel()
    assert all(f.waited for f in bench.fences)
    bench.reader.fail_at = None
    bench.ring.enqueue(read(n) for n in range(20, 23))
    seen = []
    for _ in range(3):
        slot = bench.ring.next()
        seen.append(slot.read.experts[0])
        bench.release(slot)
    assert seen == [20, 21, 22], "what was queued before the failure is gone"


def test_cancel_waits_for_reads_in_flight_and_drops_the_rest():
    bench = Bench(3)
    bench.ring.enqueue(read(n) for n in range(9))
    used = bench.ring.next()
    bench.release(used)
    in_flight = [t for t in bench.reader.tickets if not t.waited]
    bench.ring.cancel()
    assert all(t.cancelled and t.waited for t in in_flight)
    assert len(bench.reader.tickets) == 3, "nothing new was started"
    assert bench.waits == bench.fences
    with pytest.raises(AssertionError, match="nothing is queued"):
        bench.ring.next()


def test_close_gives_all_memory_back_even_in_mid_flight():
    bench = Bench(3)
    assert bench.backend.live == 3
    assert bench.ring.nbytes == 3 * 64
    bench.ring.enqueue(read(n) for n in range(9))
    bench.ring.next()
    bench.ring.close()
    bench.ring.close()
    assert bench.backend.live == 0
    assert bench.ring.nbytes == 0


def test_settle_cancels_all_before_it_waits_for_any():
    """Waiting first would let the later ones run to their ends."""
    order = []

    class Ticket(FakeTicket):
        def cancel(self):
            order.append("cancel")
            super().cancel()

        def wait(self, timeout=None):
            order.append("wait")
            super().wait()

    settle([Ticket(np.zeros(1, np.uint8)) for _ in range(3)])
    assert order == ["cancel"] * 3 + ["wait"] * 3
