"""Measures what reading and computing cost each other when both go on.

They share cores, memory bandwidth and Python's lock, so on a small machine neither keeps its speed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from types import SimpleNamespace

import mlx.core as mx

from mlx_stream.backends.base import Backend
from mlx_stream.backends.selftest import Case
from mlx_stream.compute_probe import expert_arms
from mlx_stream.probe_arms import FLOATS
from mlx_stream.storage.checkpoint import FileIdentity
from mlx_stream.storage.read_plan import MAX_OP_NBYTES, ReadOp
from mlx_stream.storage.reader import Reader, Ticket
from mlx_stream.storage.slot_memory import allocate_slot

SLOTS = 32  # of MAX_OP_NBYTES: what is read into, round and round
ROWS = 16  # per expert: weights come from memory as fast as they can
ROUNDS = 3
LEAST_SECONDS = 0.1  # of a measurement: several requests must end in it


def probe_overlap(backend: Backend, file: Path, seconds: float = 2.0, *, dims: int = 2048) -> float:
    """The share of the shorter of reading and computing that overlapping them costs.

    0: each runs as if alone; 1: no better than one after the other.

    Args:
        file: read past the page cache where that is granted; a few times MAX_OP_NBYTES long.
        dims: hidden size of the experts that compute.
    """
    each = max(LEAST_SECONDS, seconds / (3 * ROUNDS))
    case = Case(*FLOATS, dims=dims, hidden=max(32, dims * 3 // 8))
    costs = []
    with (
        backend.compute_scope(),
        expert_arms(backend, case, mx.bfloat16, (ROWS,)) as (arm,),
        _disk(file) as disk,
    ):
        arm.run()
        for _ in range(ROUNDS):
            _, computed = _rates(arm.run, None, each)
            read, _ = _rates(None, disk, each)
            both = _rates(arm.run, disk, each)
            costs.append(overlap_cost(both[0] / read, both[1] / computed))
    return median(costs)


def overlap_cost(read: float, computed: float) -> float:
    """The cost when reading keeps the share `read` of its speed and computing `computed`.

    Equal work for both then takes ``2 / (read + computed)`` times as long as either alone.
    """
    return min(1.0, max(0.0, 2 / max(1.0, read + computed) - 1))


class _Disk:
    """Reads a file without end."""

    def __init__(self, reader: Reader, size: int) -> None:
        self._reader = reader
        self._count = max(1, size // MAX_OP_NBYTES)
        self._memory = allocate_slot(SLOTS * MAX_OP_NBYTES)
        self._memory[::4096] = 1
        self._tickets: list[Ticket] = []
        self._next = 0

    def fill(self) -> None:
        """Queue as much as there is room for."""
        self._tickets = [t for t in self._tickets if not t.done()]
        while len(self._tickets) < SLOTS:
            place, slot = self._next % self._count, self._next % SLOTS
            op = ReadOp(0, place * MAX_OP_NBYTES, ((slot * MAX_OP_NBYTES, MAX_OP_NBYTES),))
            self._tickets.append(self._reader.submit([op], self._memory))
            self._next += 1

    def drain(self) -> None:
        """Forget what has not begun, wait for the rest."""
        for ticket in self._tickets:
            ticket.cancel()
        while not all(t.done() for t in self._tickets):
            time.sleep(0.001)
        self._tickets.clear()

    @property
    def nbytes(self) -> int:
        """Read so far."""
        return self._reader.counters.bytes


@contextmanager
def _disk(file: Path) -> Iterator[_Disk]:
    status = os.stat(file)
    checkpoint = SimpleNamespace(files=(FileIdentity.of(file, status),))
    with Reader(checkpoint) as reader:  # type: ignore[arg-type]
        disk = _Disk(reader, status.st_size)
        try:
            yield disk
        finally:
            disk.drain()


def _rates(
    compute: Callable[[], object] | None, disk: _Disk | None, seconds: float
) -> tuple[float, float]:
    """``(bytes read, runs computed)`` per second, of what is asked for."""
    runs, before = 0, disk.nbytes if disk else 0
    began = now = time.perf_counter()
    while now - began < seconds:
        if disk is not None:
            disk.fill()
        if compute is None:
            time.sleep(0.002)
        else:
            compute()
            runs += 1
        now = time.perf_counter()
    nbytes = disk.nbytes - before if disk else 0
    if disk is not None:
        disk.drain()
    return max(1, nbytes) / (now - began), runs / (now - began)
