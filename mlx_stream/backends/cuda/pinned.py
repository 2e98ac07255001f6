"""Host memory for the slots that readers fill: page-locked, so that copies out of it are DMA.

Pinning is slow (some 0.3 s a GB), so the backend keeps freed slots; see `CudaBackend.allocate`.
"""

from __future__ import annotations

import ctypes
from typing import Protocol

import numpy as np

from mlx_stream.backends.cuda.cudart import Cudart

PAGE_NBYTES = 4096


class HostAllocator(Protocol):
    """Where slot memory comes from."""

    nbytes: int

    def take(self, nbytes: int, align: int) -> tuple[np.ndarray, int]:
        """``(array, block)``: bytes on a boundary of `align`, and what to give back."""

    def give(self, block: int) -> None:
        """Release a block; its array must not be touched any more, by a copy either."""


class PinnedMemory:
    """Memory of ``cudaHostAlloc``. Compute thread only."""

    def __init__(self, cudart: Cudart) -> None:
        self._cudart = cudart
        self._sizes: dict[int, int] = {}
        self.nbytes = 0

    def take(self, nbytes: int, align: int) -> tuple[np.ndarray, int]:
        """See HostAllocator."""
        size = nbytes + align
        block = self._cudart.host_alloc(size)
        self._sizes[block] = size
        self.nbytes += size
        memory = np.frombuffer((ctypes.c_uint8 * size).from_address(block), np.uint8)
        return aligned(memory, nbytes, align), block

    def give(self, block: int) -> None:
        """See HostAllocator."""
        self.nbytes -= self._sizes.pop(block)
        self._cudart.host_free(block)


class PlainMemory:
    """Ordinary memory, for machines without a CUDA runtime library."""

    def __init__(self) -> None:
        self._arrays: dict[int, np.ndarray] = {}
        self.nbytes = 0

    def take(self, nbytes: int, align: int) -> tuple[np.ndarray, int]:
        """See HostAllocator."""
        memory = np.empty(nbytes + align, np.uint8)
        self._arrays[memory.ctypes.data] = memory
        self.nbytes += memory.nbytes
        return aligned(memory, nbytes, align), memory.ctypes.data

    def give(self, block: int) -> None:
        """See HostAllocator."""
        self.nbytes -= self._arrays.pop(block).nbytes


def aligned(memory: np.ndarray, nbytes: int, align: int) -> np.ndarray:
    """The first `nbytes` of `memory` that start on a boundary of `align`."""
    lead = -memory.ctypes.data % align
    return memory[lead : lead + nbytes]
