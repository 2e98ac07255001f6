"""Slots: aligned, writable, given back."""

from __future__ import annotations

import gc
import mmap

import pytest

from mlx_stream.storage import slot_memory
from mlx_stream.storage.slot_memory import HUGE_PAGE, allocate_slot


@pytest.mark.parametrize("nbytes", [1, 4096, HUGE_PAGE, 3 * HUGE_PAGE + 5])
def test_slots_are_aligned_and_writable(nbytes):
    slot = allocate_slot(nbytes)
    assert slot.nbytes == nbytes
    assert slot.ctypes.data % HUGE_PAGE == 0
    assert slot.flags.carray
    assert not slot.any()
    slot[:] = 7
    assert (slot == 7).all()


def test_slots_do_not_share_memory():
    a, b = allocate_slot(5000), allocate_slot(5000)
    a[:] = 1
    assert not b.any()


def test_memory_goes_back_with_the_last_view(monkeypatch):
    class Tracked(mmap.mmap):
        freed = 0

        def __del__(self):
            Tracked.freed += 1

    monkeypatch.setattr(slot_memory.mmap, "mmap", Tracked)
    slot = allocate_slot(5000)
    view = slot[10:20]
    del slot
    gc.collect()
    assert Tracked.freed == 0
    del view
    gc.collect()
    assert Tracked.freed == 1


def test_a_kernel_without_huge_pages(monkeypatch):
    class Refusing(mmap.mmap):
        def madvise(self, *args):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(slot_memory.mmap, "mmap", Refusing)
    assert allocate_slot(100).nbytes == 100
