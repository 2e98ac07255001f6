"""Where cached experts lie: one buffer each, or all of them in stacked planes.

RecordSlots leaves every record where the disk put it, which needs no copy in any I/O mode.
PlanarSlots (planar_slots.py) keeps tensors of all records in planes ``[S, ...]``, so that a slot
map on the device can stand for the router's choice.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from mlx_stream.backends.base import Backend, ExpertMlp, HostBuffer, PublishedGroup
from mlx_stream.errors import MlxStreamError
from mlx_stream.storage.read_plan import GroupRead, Plane, plan_group
from mlx_stream.storage.reader import Reader

Key = tuple[int, int]
COPY_ALIGN = 64
KEPT_PLANS = 2048  # about 6 KB each


class Arrival(Protocol):
    """Bytes on their way into a slot; a reader's Ticket is one."""

    def done(self) -> bool:
        """Whether nothing writes to the slot any more."""

    def wait(self) -> None:
        """Return when the bytes are there; raises ReadError and its kin."""

    def cancel(self) -> None:
        """Drop what has not started; `wait` then raises ReadCancelled."""


@dataclass
class Record:
    """One expert in memory.

    Attributes:
        slot: the store's handle of its memory.
        published: its weights, for stores that publish records one by one.
        arrival: pending until its bytes have come.
        guess: read ahead on a prediction and not asked for yet.
        read_nbytes: bytes that the disk delivered for it; 0 when it was copied from prefill.
    """

    key: Key
    slot: Any
    published: PublishedGroup | None = None
    arrival: Arrival | None = None
    guess: bool = False
    read_nbytes: int = 0
    started: float = 0.0


def stop_arrival(record: Record) -> KeyboardInterrupt | None:
    """Cancel a record's read; returns when no thread writes to its slot.

    A Ctrl-C that comes meanwhile is returned, to be raised when everything is noted.
    """
    interrupt: KeyboardInterrupt | None = None
    while record.arrival is not None:
        record.arrival.cancel()
        try:
            with suppress(MlxStreamError):  # the request has its own error already
                record.arrival.wait()
            record.arrival = None
        except KeyboardInterrupt as error:
            interrupt = error
    return interrupt


class SlotStore(Protocol):
    """Memory for records. The cache decides how many slots exist and who has them.

    Attributes:
        slot_nbytes: bytes of a slot.
        overhead_nbytes: bytes that it may take besides the slots.
    """

    slot_nbytes: int

    @property
    def overhead_nbytes(self) -> int:
        """See above."""

    def take(self) -> Any:
        """A new slot; the caller has asked the budget."""

    def drop(self, slot: Any) -> None:
        """The slot's memory is not needed any more."""

    def start_read(self, mlp: ExpertMlp, expert: int, slot: Any) -> Record:
        """Begin to read an expert into a slot."""

    def may_read_ahead(self) -> bool:
        """Whether another read can begin without waiting for one that runs."""

    def copy_in(
        self, mlp: ExpertMlp, expert: int, read: GroupRead, source: HostBuffer, slot: Any
    ) -> Record:
        """Copy an expert out of a filled staging slot."""

    def groups(self, mlp: ExpertMlp, records: Sequence[Record]) -> list[PublishedGroup]:
        """Records of one layer as a layer computation takes them."""

    def resize(self, slots: int, live: Sequence[Record], spare_nbytes: int) -> Sequence[Record]:
        """Hold at most `slots` slots from now on; returns the records that survived.

        Called with at most `slots` live records, none of them in use or arriving. `spare_nbytes`
        of the budget may be used on the way.
        """

    def close(self) -> None:
        """Give all memory back."""


class RecordPlans:
    """Plans of single experts' reads; making one takes a third of the time of its read."""

    def __init__(self, reader: Reader, kept: int = KEPT_PLANS) -> None:
        self._reader, self._kept = reader, kept
        self._plans: OrderedDict[Key, GroupRead] = OrderedDict()

    def plan(self, mlp: ExpertMlp, expert: int) -> GroupRead:
        """The read of one expert of one layer."""
        key = (mlp.layer.index, expert)
        read = self._plans.get(key)
        if read is not None:
            self._plans.move_to_end(key)
            return read
        reader = self._reader
        read = plan_group(mlp.layer, (expert,), align=reader.align, file_sizes=reader.file_sizes)
        self._plans[key] = read
        if len(self._plans) > self._kept:
            self._plans.popitem(last=False)
        return read


class RecordSlots:
    """Every slot is a buffer of its own, allocated when it is first needed."""

    overhead_nbytes = 0

    def __init__(self, backend: Backend, reader: Reader, slot_nbytes: int) -> None:
        self._backend, self._reader = backend, reader
        self._plans = RecordPlans(reader)
        self.slot_nbytes = slot_nbytes

    def take(self) -> HostBuffer:
        """A fresh buffer."""
        return self._backend.allocate(self.slot_nbytes, self._reader.align)

    def drop(self, slot: HostBuffer) -> None:
        """Back to the backend."""
        self._backend.free(slot)

    def start_read(self, mlp: ExpertMlp, expert: int, slot: HostBuffer) -> Record:
        """Straight from the file into the slot."""
        read = self._plans.plan(mlp, expert)
        published = self._backend.publish(mlp, read, slot)
        ticket = self._reader.submit(read.ops, slot.array, read.checks)
        key = (mlp.layer.index, expert)
        return Record(key, slot, published, ticket, read_nbytes=read.read_nbytes)

    def may_read_ahead(self) -> bool:
        """Always: every slot is its own target."""
        return True

    def copy_in(
        self, mlp: ExpertMlp, expert: int, read: GroupRead, source: HostBuffer, slot: HostBuffer
    ) -> Record:
        """Densely packed."""
        compact = _copy_record(read, read.experts.index(expert), source.array, slot.array)
        return Record((mlp.layer.index, expert), slot, self._backend.publish(mlp, compact, slot))

    def groups(self, mlp: ExpertMlp, records: Sequence[Record]) -> list[PublishedGroup]:
        """One group each."""
        return [record.published for record in records if record.published is not None]

    def resize(self, slots: int, live: Sequence[Record], spare_nbytes: int) -> Sequence[Record]:
        """Slots are independent: nothing moves."""
        return live

    def close(self) -> None:
        """The cache drops every slot itself."""


def _copy_record(
    read: GroupRead, position: int, source: np.ndarray, target: np.ndarray
) -> GroupRead:
    """Copy one expert's planes densely into `target`; returns their new layout."""
    planes: list[Plane] = []
    offset = 0
    for plane in read.planes:
        start = plane.offsets[position]
        target[offset : offset + plane.nbytes] = source[start : start + plane.nbytes]
        planes.append(replace(plane, offsets=(offset,)))
        offset = -(-(offset + plane.nbytes) // COPY_ALIGN) * COPY_ALIGN
    return replace(
        read,
        experts=(read.experts[position],),
        planes=tuple(planes),
        ops=(),
        checks=(),
        payload_nbytes=sum(p.nbytes for p in planes),
    )


def record_nbytes(mlps: Sequence[ExpertMlp], align: int, read_slot_nbytes: int) -> int:
    """Bytes of a record slot: enough for a record as read and as copied, a multiple of `align`."""
    dense = max(sum(-(-t.nbytes // COPY_ALIGN) * COPY_ALIGN for t in m.layer.tensors) for m in mlps)
    step = max(align, COPY_ALIGN)
    return -(-max(dense, read_slot_nbytes) // step) * step
