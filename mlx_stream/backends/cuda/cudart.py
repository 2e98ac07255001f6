"""The dozen calls of the CUDA runtime that MLX does not offer, through ctypes.

Owns finding libcudart and turning its error codes into exceptions. Knows nothing of slots or
experts. Handles (streams, events) and device pointers are plain ints.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from mlx_stream.errors import CapabilityError, MlxStreamError

log = logging.getLogger(__name__)

_NOT_READY = 600  # cudaErrorNotReady
_DEFAULT_DIRECTION = 4  # cudaMemcpyDefault: the driver looks at the pointers
_STREAM_NON_BLOCKING = 1  # does not wait for the legacy default stream
_EVENT_BLOCKING_SYNC, _EVENT_DISABLE_TIMING = 1, 2
_ADVISE_PREFERRED_LOCATION = 3
_LOCATION_DEVICE = 1
_CONCURRENT_MANAGED_ACCESS = 89  # cudaDevAttrConcurrentManagedAccess
_STRUCT_LOCATIONS = 13000  # from this version a device is named by a struct
_VERSIONS = (13, 12)


class CudaError(MlxStreamError):
    """A call of the CUDA runtime failed."""


class Cudart(Protocol):
    """What the backend needs of the runtime; the tests put a recording fake in its place."""

    def host_alloc(self, nbytes: int) -> int:
        """Address of page-locked host memory."""

    def host_free(self, address: int) -> None:
        """Release memory of :meth:`host_alloc`; no copy may be using it."""

    def stream_create(self) -> int:
        """A stream that does not wait for any other."""

    def stream_synchronize(self, stream: int) -> None:
        """Return when all work of the stream is done."""

    def stream_destroy(self, stream: int) -> None:
        """Release a stream."""

    def event_create(self) -> int:
        """An event without timing whose wait does not spin."""

    def event_record(self, event: int, stream: int) -> None:
        """The event passes when all work put into `stream` so far is done."""

    def event_query(self, event: int) -> bool:
        """Whether it has passed."""

    def event_synchronize(self, event: int) -> None:
        """Return when it has passed."""

    def event_destroy(self, event: int) -> None:
        """Release an event."""

    def memcpy_async(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Queue a copy; both ranges must stay as they are until it is done."""

    def prefer_device(self, address: int, nbytes: int) -> None:
        """Advise that managed memory lives on the GPU; only a hint."""


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class CtypesCudart:
    """The real runtime.

    Raises:
        CapabilityError: no libcudart can be loaded.
    """

    def __init__(self, device: int = 0) -> None:
        self._library = _load()
        self._device = device
        self._check("cudaSetDevice", ctypes.c_int(device))
        self.version = self._number("cudaRuntimeGetVersion")
        self.concurrent_managed = bool(self._attribute(_CONCURRENT_MANAGED_ACCESS))

    def host_alloc(self, nbytes: int) -> int:
        """See Cudart."""
        return self._handle("cudaHostAlloc", ctypes.c_size_t(nbytes), ctypes.c_uint(0))

    def host_free(self, address: int) -> None:
        """See Cudart."""
        self._check("cudaFreeHost", ctypes.c_void_p(address))

    def stream_create(self) -> int:
        """See Cudart."""
        return self._handle("cudaStreamCreateWithFlags", ctypes.c_uint(_STREAM_NON_BLOCKING))

    def stream_synchronize(self, stream: int) -> None:
        """See Cudart."""
        self._check("cudaStreamSynchronize", ctypes.c_void_p(stream))

    def stream_destroy(self, stream: int) -> None:
        """See Cudart."""
        self._check("cudaStreamDestroy", ctypes.c_void_p(stream))

    def event_create(self) -> int:
        """See Cudart."""
        flags = ctypes.c_uint(_EVENT_BLOCKING_SYNC | _EVENT_DISABLE_TIMING)
        return self._handle("cudaEventCreateWithFlags", flags)

    def event_record(self, event: int, stream: int) -> None:
        """See Cudart."""
        self._check("cudaEventRecord", ctypes.c_void_p(event), ctypes.c_void_p(stream))

    def event_query(self, event: int) -> bool:
        """See Cudart."""
        code = self._call("cudaEventQuery", ctypes.c_void_p(event))
        if code not in (0, _NOT_READY):
            self._fail("cudaEventQuery", code)
        return code == 0

    def event_synchronize(self, event: int) -> None:
        """See Cudart. ctypes lets go of the GIL, so reader threads run on."""
        self._check("cudaEventSynchronize", ctypes.c_void_p(event))

    def event_destroy(self, event: int) -> None:
        """See Cudart."""
        self._check("cudaEventDestroy", ctypes.c_void_p(event))

    def memcpy_async(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """See Cudart."""
        self._check(
            "cudaMemcpyAsync",
            ctypes.c_void_p(target),
            ctypes.c_void_p(source),
            ctypes.c_size_t(nbytes),
            ctypes.c_int(_DEFAULT_DIRECTION),
            ctypes.c_void_p(stream),
        )

    def prefer_device(self, address: int, nbytes: int) -> None:
        """See Cudart. Without concurrent managed access MLX uses pinned memory: nothing to say."""
        if not self.concurrent_managed:
            return
        where = (
            _Location(_LOCATION_DEVICE, self._device)
            if self.version >= _STRUCT_LOCATIONS
            else ctypes.c_int(self._device)
        )
        code = self._call(
            "cudaMemAdvise",
            ctypes.c_void_p(address),
            ctypes.c_size_t(nbytes),
            ctypes.c_int(_ADVISE_PREFERRED_LOCATION),
            where,
        )
        if code:
            log.info("cudaMemAdvise: error %d; pages move when they are first used", code)

    def _attribute(self, attribute: int) -> int:
        value = ctypes.c_int()
        self._check(
            "cudaDeviceGetAttribute",
            ctypes.byref(value),
            ctypes.c_int(attribute),
            ctypes.c_int(self._device),
        )
        return value.value

    def _number(self, name: str) -> int:
        value = ctypes.c_int()
        self._check(name, ctypes.byref(value))
        return value.value

    def _handle(self, name: str, *arguments: object) -> int:
        """A call whose first argument is where the handle goes."""
        handle = ctypes.c_void_p()
        self._check(name, ctypes.byref(handle), *arguments)
        assert handle.value is not None
        return handle.value

    def _call(self, name: str, *arguments: object) -> int:
        function = getattr(self._library, name)
        function.restype = ctypes.c_int
        return function(*arguments)

    def _check(self, name: str, *arguments: object) -> None:
        if code := self._call(name, *arguments):
            self._fail(name, code)

    def _fail(self, name: str, code: int) -> None:
        text = self._library.cudaGetErrorString
        text.restype = ctypes.c_char_p
        raise CudaError(
            f"{name} failed",
            actual=f"{text(ctypes.c_int(code)).decode()} (error {code})",
            remedy="check the driver with nvidia-smi, and free GPU and host memory",
        )


def _load() -> ctypes.CDLL:
    tried = []
    for name in _candidates():
        try:
            return ctypes.CDLL(name)
        except OSError:
            tried.append(name)
    raise CapabilityError(
        "libcudart, the CUDA runtime library, cannot be loaded",
        expected=f"libcudart.so of CUDA {' or '.join(map(str, _VERSIONS))}",
        actual=f"none of {', '.join(tried)}",
        remedy="pip install nvidia-cuda-runtime, or install the CUDA toolkit",
    )


def _candidates() -> Iterator[str]:
    """The wheels' folders first: they match what MLX was built with; then the system's."""
    for folder in map(Path, sys.path):
        root = folder / "nvidia"
        for pattern in ("cu1*/lib/libcudart.so.*", "cuda_runtime/lib/libcudart.so.*"):
            yield from map(str, sorted(root.glob(pattern), reverse=True))
    for version in _VERSIONS:
        yield f"libcudart.so.{version}"
    if found := ctypes.util.find_library("cudart"):
        yield found
    yield "/usr/local/cuda/lib64/libcudart.so"
