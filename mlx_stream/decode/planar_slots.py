"""Cached experts in stacked planes: plane ``[S, ...]`` of every tensor kind, updated in place.

Slot s of every plane is one expert of one layer; layers share the slots. The planes are MLX arrays
whose memory is written underneath, so a slot may change only when every array that reads it has
been evaluated. Needs layers of one record layout.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_stream.backends.base import (
    Backend,
    ExpertMlp,
    HostBuffer,
    PublishedGroup,
    ResidentSlots,
)
from mlx_stream.backends.mlx_ops import DTYPES, StackedPlanes
from mlx_stream.decode.relocation import relocate
from mlx_stream.decode.slots import Record, RecordPlans
from mlx_stream.errors import CapabilityError, MlxStreamError
from mlx_stream.storage.expert_index import ExpertLayer, ExpertTensor
from mlx_stream.storage.read_plan import GroupRead, Plane, layer_slot_capacity
from mlx_stream.storage.reader import Reader, Ticket

PAGE_NBYTES = 16384
BOUNCES = 4  # reads in flight where the disk's alignment forbids reading into planes
MAX_ELEMENTS = 2**31 - 1  # an MLX axis


class PlanarSlots:
    """Stacked planes for `slots` records, allocated at once.

    Args:
        mlps: the layers that share it.
        slots: how many records.

    Attributes:
        maps: by layer, where its experts are; kept here since they hold the planes' memory, and go
            when the planes go.

    Raises:
        CapabilityError: the layers' records differ in layout.
    """

    def __init__(
        self, backend: Backend, reader: Reader, mlps: Sequence[ExpertMlp], slots: int
    ) -> None:
        self._backend, self._reader = backend, reader
        self._plans = RecordPlans(reader)
        self._layer = one_layout([m.layer for m in mlps])
        self.slot_nbytes = self._layer.expert_nbytes
        self._bounce_nbytes = max(layer_slot_capacity(m.layer, 1, reader.align) for m in mlps)
        self._bounces: list[HostBuffer] = []
        self._bounces_made = 0
        self._bounced: deque[_Bounced] = deque()
        self._slots, self._planes = 0, _Planes(self._layer, 0)
        self._free: list[int] = []
        self.maps: dict[int, ResidentSlots] = {}
        self._grow(slots)

    @property
    def overhead_nbytes(self) -> int:
        """Bytes besides the slots: the planes' last pages, and bounce buffers."""
        bounces = 0 if self._reader.align == 1 else BOUNCES * self._bounce_nbytes
        scrap = 0 if self._layer.record is None else 1
        return bounces + (len(self._layer.tensors) + scrap) * PAGE_NBYTES

    @property
    def slots(self) -> int:
        """Slots of the planes."""
        return self._slots

    @property
    def planes(self) -> dict[tuple[str, str], mx.array]:
        """``{(projection, part): [S, ...]}``; replaced when the store is resized."""
        return self._planes.arrays

    @property
    def memory(self) -> mx.array:
        """The uint8 array that all planes lie in."""
        return self._planes.base

    @property
    def starts(self) -> dict[tuple[str, str], int]:
        """Byte of the memory at which each plane starts."""
        return self._planes.starts

    def take(self) -> int:
        """A slot of the planes."""
        return self._free.pop()

    def drop(self, slot: int) -> None:
        """Its memory stays until the store is resized or closed."""
        self._free.append(slot)

    def start_read(self, mlp: ExpertMlp, expert: int, slot: int) -> Record:
        """Into the planes, or through a bounce buffer where O_DIRECT wants alignment."""
        read = self._plans.plan(mlp, expert)
        key = (mlp.layer.index, expert)
        if self._reader.align == 1:
            moved, checks = relocate(read, self._planes.offsets(slot), self._planes.scrap)
            ticket = self._reader.submit(moved, self._planes.memory, checks)
            return Record(key, slot, None, ticket, read_nbytes=read.read_nbytes)
        bounce = self._take_bounce()
        try:
            ticket = self._reader.submit(read.ops, bounce.array, read.checks)
        except BaseException:
            self._bounces.append(bounce)
            raise
        arrival = _Bounced(self, ticket, read, bounce, slot)
        self._bounced.append(arrival)
        return Record(key, slot, None, arrival, read_nbytes=read.read_nbytes)

    def may_read_ahead(self) -> bool:
        """Whether a bounce buffer is free, where reads need one."""
        return self._reader.align == 1 or bool(self._bounces) or self._bounces_made < BOUNCES

    def copy_in(
        self, mlp: ExpertMlp, expert: int, read: GroupRead, source: HostBuffer, slot: int
    ) -> Record:
        """Scatter it over the planes."""
        self._scatter(read, read.experts.index(expert), source.array, slot)
        return Record((mlp.layer.index, expert), slot)

    def groups(self, mlp: ExpertMlp, records: Sequence[Record]) -> list[PublishedGroup]:
        """All of them in one group on backends that compute with planes."""
        experts = tuple(r.key[1] for r in records)
        slots = tuple(r.slot for r in records)
        places = [self._planes.offsets(s) for s in slots]
        planes = tuple(
            Plane(t.key, t.dtype, t.shape, t.nbytes, tuple(p[t.key] for p in places))
            for t in self._layer.tensors
        )
        read = GroupRead(mlp.layer.index, experts, planes, (), 0, 0, 0)
        if "planes" in self._backend.capabilities:
            stacked = StackedPlanes(read, self.memory, self.planes)
            return [PublishedGroup(experts, stacked, slots)]
        memory = HostBuffer(self._planes.memory, self._planes.base)
        return [self._backend.publish(mlp, read, memory)]

    def resize(self, slots: int, live: Sequence[Record], spare_nbytes: int) -> Sequence[Record]:
        """New planes; of the records those survive that fit into `spare_nbytes` of copies."""
        if slots == self._slots:
            return live
        room = min(slots, spare_nbytes // self.slot_nbytes)
        kept = list(live)[max(0, len(live) - room) :]
        keys = [t.key for t in self._layer.tensors]
        copies = [[self._planes.view(k, r.slot).copy() for k in keys] for r in kept]
        self._release()
        self._grow(slots)
        for record in kept:
            record.slot = self._free.pop()
            for key, part in zip(keys, copies.pop(0), strict=True):
                self._planes.view(key, record.slot)[:] = part
        return kept

    def close(self) -> None:
        """Give the planes and the bounce buffers back."""
        self._release()
        for buffer in self._bounces:
            self._backend.free(buffer)
        self._bounces.clear()
        self._bounces_made = 0

    # --- memory -----------------------------------------------------------------------------

    def _release(self) -> None:
        self._planes, self._slots = _Planes(self._layer, 0), 0
        self._free.clear()
        self.maps.clear()
        mx.clear_cache()

    def _grow(self, slots: int) -> None:
        self._planes = _Planes(self._layer, slots)
        self._slots = slots
        self._free = list(range(slots - 1, -1, -1))

    def _scatter(self, read: GroupRead, position: int, source: np.ndarray, slot: int) -> None:
        for plane in read.planes:
            start = plane.offsets[position]
            self._planes.view(plane.key, slot)[:] = source[start : start + plane.nbytes]

    def _take_bounce(self) -> HostBuffer:
        while not self._bounces and self._bounces_made >= BOUNCES:
            self._bounced[0].settle()
        if not self._bounces:
            self._bounces_made += 1
            return self._backend.allocate(self._bounce_nbytes, self._reader.align)
        return self._bounces.pop()

    def _arrive(self, bounced: _Bounced, sound: bool) -> None:
        self._bounced.remove(bounced)
        if sound:
            self._scatter(bounced.read, 0, bounced.buffer.array, bounced.slot)
        self._bounces.append(bounced.buffer)


class _Bounced:
    """A read into a bounce buffer; copied into the planes by whoever waits for it."""

    def __init__(
        self, store: PlanarSlots, ticket: Ticket, read: GroupRead, buffer: HostBuffer, slot: int
    ) -> None:
        self._store, self._ticket = store, ticket
        self.read, self.buffer, self.slot = read, buffer, slot
        self._settled = False
        self._error: MlxStreamError | None = None

    def done(self) -> bool:
        """Whether `wait` returns at once."""
        return self._settled or self._ticket.done()

    def cancel(self) -> None:
        """As Ticket.cancel."""
        self._ticket.cancel()

    def wait(self) -> None:
        """The bytes are in the planes when it returns."""
        self.settle()
        if self._error is not None:
            raise self._error

    def settle(self) -> None:
        """Wait and copy, once; an error is kept for `wait`."""
        if self._settled:
            return
        try:
            self._ticket.wait()
        except MlxStreamError as error:
            self._error = error
        self._settled = True
        self._store._arrive(self, self._error is None)


class _Planes:
    """The memory: rows of a page, every plane on whole rows."""

    def __init__(self, layer: ExpertLayer, slots: int) -> None:
        self._tensors = {t.key: t for t in layer.tensors}
        self.starts: dict[tuple[str, str], int] = {}
        rows = 0
        for t in layer.tensors:
            self.starts[t.key] = rows * PAGE_NBYTES
            rows += -(-slots * t.nbytes // PAGE_NBYTES)
        self.scrap = rows * PAGE_NBYTES  # takes the padding of packed records, a page at most
        rows += 1 if slots and layer.record is not None else 0
        self.base = mx.zeros((rows, PAGE_NBYTES), dtype=mx.uint8)
        mx.eval(self.base)
        self.memory: np.ndarray = np.array(self.base, copy=False).reshape(-1)
        self.arrays = {t.key: self._plane(t, slots) for t in layer.tensors} if slots else {}
        mx.eval(list(self.arrays.values()))

    def offsets(self, slot: int) -> dict[tuple[str, str], int]:
        """Byte offset of every tensor of a slot."""
        return {key: self.starts[key] + slot * t.nbytes for key, t in self._tensors.items()}

    def view(self, key: tuple[str, str], slot: int) -> np.ndarray:
        """The bytes of one tensor of a slot."""
        t = self._tensors[key]
        start = self.starts[key] + slot * t.nbytes
        return self.memory[start : start + t.nbytes]

    def _plane(self, t: ExpertTensor, slots: int) -> mx.array:
        dtype = DTYPES[t.dtype]
        first, nbytes = self.starts[t.key] // PAGE_NBYTES, slots * t.nbytes
        # The dtype is viewed first and sliced after: the other order copies.
        rows = self.base.view(dtype)[first : first + -(-nbytes // PAGE_NBYTES)]
        if rows.nbytes != nbytes:
            rows = rows.reshape(-1)[: nbytes // dtype.size]
        return rows.reshape(slots, *t.shape)


def one_layout(layers: Sequence[ExpertLayer]) -> ExpertLayer:
    """The first layer, when all have the same tensors.

    Raises:
        CapabilityError: they have not; also when a dtype has no MLX plane.
    """
    first = layers[0]
    for layer in layers:
        for a, b in zip(first.tensors, layer.tensors, strict=False):
            same = (a.key, a.dtype, a.shape) == (b.key, b.dtype, b.shape)
            if not same or len(first.tensors) != len(layer.tensors) or b.dtype not in DTYPES:
                raise CapabilityError(
                    "stacked expert slots need layers of one record layout",
                    tensor=f"{layer.name}.{'.'.join(b.key)}",
                    expected=f"{a.dtype} {list(a.shape)}, as in {first.name}",
                    actual=f"{b.dtype} {list(b.shape)}",
                    remedy="use --decode-path exact",
                )
    return first


def most_slots(layer: ExpertLayer, slots: int) -> int:
    """At most `slots`, few enough for every plane to be an MLX array."""
    elements = max(math.prod(t.shape) for t in layer.tensors)
    rows_fit = all(slots * t.nbytes % PAGE_NBYTES == 0 for t in layer.tensors)
    return slots if rows_fit else min(slots, MAX_ELEMENTS // elements)
