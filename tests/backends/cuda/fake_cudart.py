"""A CUDA runtime that is as late and as unkind as the real one may be.

Copies happen only when something waits for them, from what the source holds then; until then the
target holds rubbish. Whoever breaks a rule of upload.py therefore computes with wrong bytes every
time, not only when a race is lost.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

POISON = 0xFF  # as a float of any width: NaN


@dataclass
class PendingCopy:
    """A copy that was queued and has not happened."""

    target: int
    source: int
    nbytes: int
    stream: int


class FakeCudart:
    """See the module docstring, and `mlx_stream.backends.cuda.cudart.Cudart`.

    Attributes:
        calls: names of the calls, in order.
        misuse: what a real runtime would not have survived, in words.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.misuse: list[str] = []
        self.copied_nbytes = 0
        self._pending: list[PendingCopy] = []
        self._events: dict[int, int | None] = {}  # event -> queue length it waits for
        self._queued = self._done = 0
        self._blocks: dict[int, np.ndarray] = {}
        self._streams: set[int] = set()
        self._next_handle = 1

    def host_alloc(self, nbytes: int) -> int:
        self.calls.append("host_alloc")
        memory = np.full(nbytes, POISON, np.uint8)
        self._blocks[memory.ctypes.data] = memory
        return memory.ctypes.data

    def host_free(self, address: int) -> None:
        self.calls.append("host_free")
        memory = self._blocks[address]
        if any(address <= c.source < address + memory.nbytes for c in self._pending):
            self.misuse.append("pinned memory freed under a pending copy")
            self._run(len(self._pending))
        del self._blocks[address]

    def stream_create(self) -> int:
        self.calls.append("stream_create")
        self._streams.add(self._next_handle)
        return self._handle()

    def stream_synchronize(self, stream: int) -> None:
        self.calls.append("stream_synchronize")
        assert stream in self._streams
        self._run(len(self._pending))

    def stream_destroy(self, stream: int) -> None:
        self.calls.append("stream_destroy")
        self._streams.remove(stream)

    def event_create(self) -> int:
        self.calls.append("event_create")
        self._events[self._next_handle] = None
        return self._handle()

    def event_record(self, event: int, stream: int) -> None:
        self.calls.append("event_record")
        assert stream in self._streams
        self._events[event] = self._queued

    def event_query(self, event: int) -> bool:
        self.calls.append("event_query")
        return self._done >= (self._events[event] or 0)

    def event_synchronize(self, event: int) -> None:
        self.calls.append("event_synchronize")
        self._run((self._events[event] or 0) - self._done)

    def event_destroy(self, event: int) -> None:
        self.calls.append("event_destroy")
        del self._events[event]

    def memcpy_async(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.calls.append("memcpy_async")
        assert stream in self._streams
        if not any(
            b <= source and source + nbytes <= b + m.nbytes for b, m in self._blocks.items()
        ):
            self.misuse.append("a copy from memory that is not pinned")
        self._pending.append(PendingCopy(target, source, nbytes, stream))
        self._queued += 1
        ctypes.memset(target, POISON, nbytes)

    def prefer_device(self, address: int, nbytes: int) -> None:
        self.calls.append("prefer_device")

    @property
    def open_handles(self) -> int:
        """Streams, events and blocks not given back."""
        return len(self._streams) + len(self._events) + len(self._blocks)

    def _run(self, count: int) -> None:
        for copy in self._pending[: max(0, count)]:
            ctypes.memmove(copy.target, copy.source, copy.nbytes)
            self.copied_nbytes += copy.nbytes
            self._done += 1
        del self._pending[: max(0, count)]

    def _handle(self) -> int:
        self._next_handle += 1
        return self._next_handle - 1
