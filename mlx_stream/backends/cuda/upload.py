"""From a filled host slot to planes on the GPU: copies, events, and when memory may be reused.

Each host slot has one mirror on the device, an MLX array that a numpy view has moved to managed
memory (MLX has no other way to tell where an array lies). A copy stream of our own fills it with
``cudaMemcpyAsync`` from pinned memory, at full bus speed and beside MLX's kernels; the array itself
then feeds stock MLX operations and our kernels alike. `CopyUploader` is the way that is right
without any of that: MLX copies the bytes.

The rules, each held by a test that breaks it:

1. **Filled before copied.** A copy starts when the group is used, never when it is published:
   publishing may come before the bytes have arrived.
2. **Copied before read.** No work that reads a mirror is handed to MLX before the copy's event has
   passed; the host waits, since MLX shows neither its stream nor its events.
3. **Read before overwritten.** A copy into a mirror is queued only after all work that read the
   mirror's last contents has been evaluated.
4. **Copied before refilled.** The fence of a host slot is the event of the copy out of it, not the
   computation: readers refill the slot while the GPU still computes.
5. **One publication at a time.** Publishing a slot again makes the group published before invalid;
   using that one is an error.
6. **Idle before freed.** The copy stream is synchronized before pinned memory is released.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import mlx.core as mx
import numpy as np

from mlx_stream.backends.cuda.cudart import Cudart
from mlx_stream.backends.mlx_ops import Planes, plane_arrays
from mlx_stream.errors import CapabilityError
from mlx_stream.storage.read_plan import GroupRead, Plane

PLANE_ALIGN = 256  # what CUDA allocations have; cp.async and vector loads need 16
MAX_MIRROR_NBYTES = (1 << 31) - 1  # an MLX shape is int32
MAX_MARKERS = 16


@dataclass(frozen=True)
class CopyRun:
    """One contiguous copy: bytes of the slot to bytes of the mirror."""

    source: int
    target: int
    nbytes: int


def compact(read: GroupRead) -> tuple[GroupRead, list[CopyRun], int]:
    """The same group with gapless planes, the copies that make it so, and its size in bytes.

    Cache-bypassing reads leave gaps between scattered experts and planes at odd offsets; on the
    device every plane is a contiguous ``[G, ...]`` array on a boundary of PLANE_ALIGN.
    """
    planes, runs, offset = [], [], 0
    for plane in read.planes:
        targets = tuple(offset + i * plane.nbytes for i in range(len(read.experts)))
        runs += _runs(plane, targets)
        planes.append(Plane(plane.key, plane.dtype, plane.shape, plane.nbytes, targets))
        offset = -(-(offset + plane.nbytes * len(read.experts)) // PLANE_ALIGN) * PLANE_ALIGN
    dense = GroupRead(
        layer=read.layer,
        experts=read.experts,
        planes=tuple(planes),
        ops=(),
        slot_nbytes=offset,
        payload_nbytes=read.payload_nbytes,
        read_nbytes=0,
    )
    return dense, runs, offset


def _runs(plane: Plane, targets: Sequence[int]) -> list[CopyRun]:
    cuts = [i for i, (a, b) in enumerate(pairwise(plane.offsets), start=1) if b != a + plane.nbytes]
    bounds = [0, *cuts, len(plane.offsets)]
    return [
        CopyRun(plane.offsets[a], targets[a], plane.nbytes * (b - a)) for a, b in pairwise(bounds)
    ]


@dataclass
class HostSlot:
    """A host slot, its mirror, and who has read it.

    Attributes:
        memory: the slot as readers see it.
        block: what the allocator wants back.
        publications: how often it was published.
        mirror: its device memory, made at the first upload.
        markers: arrays that are evaluated only when work that reads the mirror is done.
    """

    memory: np.ndarray
    block: int = 0
    publications: int = 0
    mirror: mx.array | None = None
    view: np.ndarray | None = None  # kept: taking it again would evaluate again
    markers: list[mx.array] = field(default_factory=list)

    def read_by(self, marker: mx.array) -> None:
        """Add a marker; old ones are waited for so that the list stays short."""
        self.markers.append(marker)
        if len(self.markers) > MAX_MARKERS:
            mx.eval(self.markers[:-1])
            del self.markers[:-1]

    def wait_for_readers(self) -> None:
        """Rule 3."""
        mx.eval(self.markers)
        self.markers.clear()


class Upload(Protocol):
    """A copy under way."""

    def passed(self) -> bool:
        """True when it is known, without waiting, that the host slot may be refilled."""

    def wait(self) -> None:
        """Return when the planes are on the device and the host slot may be refilled."""


@dataclass
class DeviceGroup:
    """A published group. Valid until its slot is published again."""

    read: GroupRead
    slot: HostSlot
    publication: int
    _planes: Planes | None = None
    _upload: Upload | None = None

    def start(self, uploader: Uploader) -> Upload | None:
        """Begin to bring it to the device; None if it is there already."""
        # Rule 5.
        assert self.publication == self.slot.publications, "a group is used after its slot moved on"
        if self._planes is None:
            self._upload, self._planes = uploader.upload(self.read, self.slot)
        return self._upload

    def planes(self) -> Planes:
        """What to compute with, when it is on the device (rule 2)."""
        assert self._planes is not None, "upload first"
        if self._upload is not None:
            self._upload.wait()
            self._upload = None
        return self._planes


class Uploader(Protocol):
    """Brings published groups to the device."""

    def upload(self, read: GroupRead, slot: HostSlot) -> tuple[Upload, Planes]:
        """Start; the planes may be read when the upload has passed."""

    def idle(self) -> None:
        """Return when no copy is pending (rule 6)."""

    def close(self) -> None:
        """Wait for copies and release handles."""


def publish(read: GroupRead, slot: HostSlot) -> DeviceGroup:
    """A group over a slot that may still be filling."""
    slot.publications += 1
    return DeviceGroup(read, slot, slot.publications)


class EventUpload:
    """Passes with an event of the copy stream; gives the event back when it has."""

    def __init__(self, cudart: Cudart, event: int, spare: list[int]) -> None:
        self._cudart, self._event, self._spare = cudart, event, spare
        self._done = False

    def passed(self) -> bool:
        """Ask the runtime."""
        if not self._done and self._cudart.event_query(self._event):
            self._finish()
        return self._done

    def wait(self) -> None:
        """Block without spinning."""
        if not self._done:
            self._cudart.event_synchronize(self._event)
            self._finish()

    def _finish(self) -> None:
        self._done = True
        self._spare.append(self._event)


class StreamUploader:
    """Copies on a stream of its own, into mirrors in managed memory."""

    def __init__(self, cudart: Cudart) -> None:
        self._cudart = cudart
        self._stream = cudart.stream_create()
        self._spare: list[int] = []

    def upload(self, read: GroupRead, slot: HostSlot) -> tuple[Upload, Planes]:
        """See Uploader."""
        dense, runs, nbytes = compact(read)
        slot.wait_for_readers()
        if slot.mirror is None or slot.mirror.size < nbytes:
            self._make_mirror(slot, nbytes)
        assert slot.view is not None
        source, target = slot.memory.ctypes.data, slot.view.ctypes.data
        for run in runs:
            self._cudart.memcpy_async(
                target + run.target, source + run.source, run.nbytes, self._stream
            )
        event = self._spare.pop() if self._spare else self._cudart.event_create()
        self._cudart.event_record(event, self._stream)
        upload = EventUpload(self._cudart, event, self._spare)
        return upload, plane_arrays(dense, slot.mirror)

    def idle(self) -> None:
        """See Uploader."""
        self._cudart.stream_synchronize(self._stream)

    def close(self) -> None:
        """See Uploader."""
        self.idle()
        while self._spare:
            self._cudart.event_destroy(self._spare.pop())
        self._cudart.stream_destroy(self._stream)

    def _make_mirror(self, slot: HostSlot, nbytes: int) -> None:
        if nbytes > MAX_MIRROR_NBYTES - PLANE_ALIGN:
            raise CapabilityError(
                "a read group is larger than an MLX array can be",
                expected=f"at most {MAX_MIRROR_NBYTES} bytes",
                actual=nbytes,
                remedy="lower the memory budget: groups get smaller",
            )
        largest = MAX_MIRROR_NBYTES // PLANE_ALIGN * PLANE_ALIGN
        size = min(max(nbytes, -(-slot.memory.nbytes // PLANE_ALIGN) * PLANE_ALIGN), largest)
        slot.view = slot.mirror = None
        slot.mirror = mx.zeros((size,), dtype=mx.uint8)
        slot.view = np.array(slot.mirror, copy=False)
        self._cudart.prefer_device(slot.view.ctypes.data, slot.view.nbytes)


class _Copied:
    """An upload that was done at once."""

    def passed(self) -> bool:
        return True

    def wait(self) -> None:
        return


class CopyUploader:
    """The way that needs no CUDA runtime: MLX copies each group, on the compute thread."""

    def upload(self, read: GroupRead, slot: HostSlot) -> tuple[Upload, Planes]:
        """See Uploader. ``mx.array`` has copied when it returns; the mirror is a new array."""
        dense, runs, nbytes = compact(read)
        packed = np.empty(nbytes, np.uint8)
        for run in runs:
            source = slot.memory[run.source : run.source + run.nbytes]
            packed[run.target : run.target + run.nbytes] = source
        return _Copied(), plane_arrays(dense, mx.array(packed))

    def idle(self) -> None:
        """Always."""

    def close(self) -> None:
        """Nothing is held."""
