"""A byte-budgeted LRU of experts, one budget over all layers.

Records are read straight into pooled slots, or copied there from prefill's staging. A record in use
by a running computation is never evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mlx_stream.backends.base import Backend, ExpertMlp, HostBuffer, PublishedGroup
from mlx_stream.experts.staging import settle
from mlx_stream.storage.read_plan import GroupRead, Plane, plan_group
from mlx_stream.storage.reader import Reader, Ticket

Key = tuple[int, int]
COPY_ALIGN = 64


@dataclass
class Record:
    """One expert in memory; `ticket` is pending until its bytes have arrived."""

    key: Key
    buffer: HostBuffer
    published: PublishedGroup
    ticket: Ticket | None = None


@dataclass
class CacheCounts:
    """Lookups since the cache was made."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0

    @property
    def hit_rate(self) -> float:
        """Hits over lookups."""
        return self.hits / max(1, self.hits + self.misses)


class ExpertCache:
    """Holds at most `capacity` records of `slot_nbytes` each. Compute thread only.

    The cache owns its slots until :meth:`close`; slots are allocated when first needed.
    """

    def __init__(
        self, backend: Backend, reader: Reader, *, slot_nbytes: int, capacity: int
    ) -> None:
        assert capacity >= 1, "a cache needs room for one expert"
        self._backend = backend
        self._reader = reader
        self.slot_nbytes = slot_nbytes
        self.capacity = capacity
        self._records: OrderedDict[Key, Record] = OrderedDict()
        self._free: list[HostBuffer] = []
        self._allocated = 0
        self.counts = CacheCounts()

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, key: Key) -> bool:
        return key in self._records

    @property
    def nbytes(self) -> int:
        """Bytes allocated for slots."""
        return self._allocated * self.slot_nbytes

    def lookup(self, mlp: ExpertMlp, expert: int) -> Record | None:
        """The record of an expert, made most recent; counts a hit or a miss."""
        key = (mlp.layer.index, expert)
        record = self._records.get(key)
        if record is None:
            self.counts.misses += 1
            return None
        self.counts.hits += 1
        self._records.move_to_end(key)
        return record

    def start_read(self, mlp: ExpertMlp, expert: int, pinned: set[Key]) -> Record | None:
        """Begin reading an expert; None when every slot holds a pinned record.

        The caller waits with :meth:`finish_read` before it uses the record.
        """
        buffer = self._take_slot(pinned)
        if buffer is None:
            return None
        try:
            read = plan_group(
                mlp.layer, (expert,), align=self._reader.align, file_sizes=self._reader.file_sizes
            )
            published = self._backend.publish(mlp, read, buffer)
            record = Record((mlp.layer.index, expert), buffer, published)
            record.ticket = self._reader.submit(read.ops, buffer.array)
        except BaseException:
            self._free.append(buffer)
            raise
        self._records[record.key] = record
        return record

    def finish_read(self, record: Record) -> None:
        """Wait until the record's bytes are there; a failed record leaves the cache."""
        if record.ticket is None:
            return
        try:
            record.ticket.wait()
        except BaseException:
            self._abandon(record)
            raise
        record.ticket = None

    def abandon_pending(self) -> None:
        """Drop every record whose read has not finished; returns when no thread writes."""
        for record in [r for r in self._records.values() if r.ticket is not None]:
            self._abandon(record)

    def copy_in(self, mlp: ExpertMlp, expert: int, read: GroupRead, source: HostBuffer) -> bool:
        """Copy an expert out of a filled staging slot; False when no slot is to be had."""
        key = (mlp.layer.index, expert)
        if key in self._records:
            self._records.move_to_end(key)
            return True
        buffer = self._take_slot(set())
        if buffer is None:
            return False
        try:
            compact = _copy_record(read, read.experts.index(expert), source.array, buffer.array)
            published = self._backend.publish(mlp, compact, buffer)
        except BaseException:
            self._free.append(buffer)
            raise
        self._records[key] = Record(key, buffer, published)
        return True

    def resize(self, capacity: int) -> None:
        """Hold at most `capacity` records from now on; the least recent ones leave."""
        assert capacity >= 1
        self.capacity = capacity
        while self._allocated > capacity and self._free:
            self._backend.free(self._free.pop())
            self._allocated -= 1
        while self._allocated > capacity:
            _, record = self._records.popitem(last=False)
            assert record.ticket is None, "resized while reading"
            self.counts.evictions += 1
            self._backend.free(record.buffer)
            self._allocated -= 1

    def close(self) -> None:
        """Give all memory back."""
        self.abandon_pending()
        for record in self._records.values():
            self._backend.free(record.buffer)
        for buffer in self._free:
            self._backend.free(buffer)
        self._records.clear()
        self._free.clear()
        self._allocated = 0

    def _abandon(self, record: Record) -> None:
        ticket, record.ticket = record.ticket, None
        if ticket is not None:
            settle([ticket])
        if self._records.pop(record.key, None) is not None:
            self._free.append(record.buffer)

    def _take_slot(self, pinned: set[Key]) -> HostBuffer | None:
        if self._free:
            return self._free.pop()
        if self._allocated < self.capacity:
            buffer = self._backend.allocate(self.slot_nbytes, self._reader.align)
            self._allocated += 1
            return buffer
        for key, record in self._records.items():
            if key not in pinned and record.ticket is None:
                del self._records[key]
                self.counts.evictions += 1
                return record.buffer
        return None


def _copy_record(
    read: GroupRead, position: int, source: np.ndarray, target: np.ndarray
) -> GroupRead:
    """Copy one expert's planes densely into `target`; returns their new layout."""
    planes, offset = [], 0
    for plane in read.planes:
        start = plane.offsets[position]
        target[offset : offset + plane.nbytes] = source[start : start + plane.nbytes]
        planes.append(replace(plane, offsets=(offset,)))
        offset = -(-(offset + plane.nbytes) // COPY_ALIGN) * COPY_ALIGN
    return _single(read, position, tuple(planes))


def _single(read: GroupRead, position: int, planes: Sequence[Plane]) -> GroupRead:
    return replace(
        read,
        experts=(read.experts[position],),
        planes=tuple(planes),
        ops=(),
        payload_nbytes=sum(p.nbytes for p in planes),
    )


def record_nbytes(mlps: Sequence[ExpertMlp], align: int, read_slot_nbytes: int) -> int:
    """Bytes of a cache slot: enough for a record as read and as copied, a multiple of `align`."""
    dense = max(sum(-(-t.nbytes // COPY_ALIGN) * COPY_ALIGN for t in m.layer.tensors) for m in mlps)
    step = max(align, COPY_ALIGN)
    return -(-max(dense, read_slot_nbytes) // step) * step
