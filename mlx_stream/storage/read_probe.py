"""Measures a disk as the reader uses it: request size, requests in flight, order.

Reads one file with the product's own reader, past the page cache where the system grants that (the
mode is reported). Every arm reads other offsets than the one before. Latencies are those of single
requests, as the reader threads saw them.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from mlx_stream.errors import MlxStreamError, ReadError
from mlx_stream.storage.checkpoint import FileIdentity
from mlx_stream.storage.read_plan import ReadOp
from mlx_stream.storage.reader import Reader
from mlx_stream.storage.slot_memory import allocate_slot
from mlx_stream.storage.throttle import Throttle
from mlx_stream.timeline import Timeline

KIB, MIB = 1 << 10, 1 << 20
SIZES = (16 * KIB, 64 * KIB, 256 * KIB, 1 * MIB, 4 * MIB, 8 * MIB)
DEPTHS = (1, 2, 4, 8)
SCRATCH_NBYTES = 1 << 30
MEMORY_NBYTES = 512 * MIB  # as the staging of a prefill
LEAST_NBYTES = 64 * MIB  # below that a disk's own cache answers
BLOCK_NBYTES = 8 * MIB


@dataclass(frozen=True)
class ReadRate:
    """One arm of the probe.

    Attributes:
        order: ``"sequential"`` or ``"random"``.
        nbytes: of one request.
        depth: requests in flight.
        bytes_per_second: all of them together.
        p50_seconds, p99_seconds: of one request.
        iops: requests a second.
        io_mode: what the system granted.
    """

    order: str
    nbytes: int
    depth: int
    bytes_per_second: float
    p50_seconds: float
    p99_seconds: float
    iops: float
    io_mode: str


def probe_reads(
    path: Path,
    *,
    io: str = "direct",
    sizes: Sequence[int] | None = None,
    depths: Sequence[int] | None = None,
    orders: Sequence[str] = ("sequential", "random"),
    seconds: float = 0.15,
    throttle: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[ReadRate]:
    """Measure every combination, each for about `seconds`.

    Args:
        path: a file of LEAST_NBYTES or more; only read.
        sizes, depths: None takes SIZES and DEPTHS.
        progress: told how many arms are done, and of how many.

    Raises:
        ReadError: the file is too small, or cannot be read.
    """
    status = os.stat(path)
    if status.st_size < LEAST_NBYTES:
        raise ReadError(
            "the file is too small to measure a disk with",
            file=path,
            expected=f"at least {LEAST_NBYTES} bytes",
            actual=status.st_size,
            remedy="choose a larger file, such as a shard of a checkpoint",
        )
    sizes = SIZES if sizes is None else sizes
    depths = DEPTHS if depths is None else depths
    arms = [(o, n, d) for o in orders for n in sizes for d in depths if n <= status.st_size]
    # One hot block read over and over would be faster than staging ever is: 1.35 times, here.
    memory = allocate_slot(MEMORY_NBYTES) if arms else np.empty(0, np.uint8)
    memory[:: 4 * KIB] = 1  # page faults belong to no request
    rates, place = [], 0
    for done, (order, nbytes, depth) in enumerate(arms):
        arm = _Arm(path, status, io, depth, throttle)
        try:
            rate, place = arm.measure(order, nbytes, seconds, place, memory)
        finally:
            arm.close()
        rates.append(rate)
        if progress is not None:
            progress(done + 1, len(arms))
    return rates


class _Arm:
    """One reader with `depth` threads over one file."""

    def __init__(
        self, path: Path, status: os.stat_result, io: str, depth: int, throttle: str | None
    ) -> None:
        identity = FileIdentity.of(path, status)
        checkpoint = SimpleNamespace(files=(identity,))
        self._depth = depth
        self._reader = Reader(
            checkpoint,  # type: ignore[arg-type]
            io=io,  # type: ignore[arg-type]
            threads=depth,
            throttle=Throttle.parse(throttle),
        )
        self._timeline = Timeline()
        self._size = status.st_size

    def measure(
        self, order: str, nbytes: int, seconds: float, place: int, memory: np.ndarray
    ) -> tuple[ReadRate, int]:
        """The rate, and where the next arm should begin to read. Fills `memory` round and round."""
        reader, count = self._reader, len(memory) // nbytes
        assert count > 2 * self._depth, "a request would meet one that is still in flight"
        offsets = self._offsets(order, nbytes, place)
        self._drop_cache()
        reader.timeline = self._timeline
        started, tickets, n = time.perf_counter(), [], 0
        while time.perf_counter() - started < seconds or n < 4 * self._depth:
            if len(tickets) >= 2 * self._depth:
                tickets.pop(0).wait()
            slot = n % count * nbytes
            place = next(offsets)
            op = ReadOp(0, place, ((slot, nbytes),))
            tickets.append(reader.submit([op], memory))
            n += 1
        for ticket in tickets:
            ticket.wait()
        wall = time.perf_counter() - started
        times = sorted(e.seconds for e in self._timeline.events)
        rate = ReadRate(
            order=order,
            nbytes=nbytes,
            depth=self._depth,
            bytes_per_second=n * nbytes / wall,
            p50_seconds=statistics.median(times),
            p99_seconds=times[min(len(times) - 1, int(0.99 * len(times)))],
            iops=n / wall,
            io_mode=reader.io_mode,
        )
        return rate, place + nbytes

    def _offsets(self, order: str, nbytes: int, place: int) -> Iterator[int]:
        """Request offsets; whole requests inside the file, round and round."""
        count = self._size // nbytes
        if order == "random":
            rng = random.Random(place)
            while True:
                yield rng.randrange(count) * nbytes
        n = -(-place // nbytes)
        while True:
            yield n % count * nbytes
            n += 1

    def _drop_cache(self) -> None:
        """Buffered arms would otherwise measure memory. Where the system has no such call, the
        fresh offsets must do."""
        if self._reader.io_mode.startswith("buffered"):
            drop_cached(self._reader._identities[0].path)

    def close(self) -> None:
        self._reader.close()


def drop_cached(path: Path) -> bool:
    """Put a file's pages out of the page cache; False where the system has no such call."""
    if not hasattr(os, "posix_fadvise"):
        return False
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    return True


@contextmanager
def scratch_file(folder: Path, nbytes: int = SCRATCH_NBYTES) -> Iterator[Path]:
    """A file of random bytes on the disk that `folder` is on, removed afterwards.

    Raises:
        MlxStreamError: there is not twice as much space free, or the folder cannot be written.
    """
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise _no_scratch(folder, "a writable folder", str(error)) from error
    if free < 2 * nbytes:
        raise _no_scratch(folder, f"{2 * nbytes} bytes free", f"{free}")
    block = np.random.default_rng(0).bytes(BLOCK_NBYTES)
    try:
        handle, name = tempfile.mkstemp(prefix=".mlx_stream-probe-", dir=folder)
    except OSError as error:
        raise _no_scratch(folder, "a writable folder", str(error)) from error
    try:
        with os.fdopen(handle, "wb") as file:
            for start in range(0, nbytes, BLOCK_NBYTES):
                # A disk that finds equal blocks must not.
                file.write(start.to_bytes(8, "little") + block[8 : nbytes - start])
            file.flush()
            os.fsync(file.fileno())
        yield Path(name)
    except OSError as error:
        raise _no_scratch(folder, "room for the scratch file", str(error)) from error
    finally:
        Path(name).unlink(missing_ok=True)


def _no_scratch(folder: Path, expected: str, actual: str) -> MlxStreamError:
    return MlxStreamError(
        "the scratch file of the probe cannot be written",
        file=folder,
        expected=expected,
        actual=actual,
        remedy="free some space, choose another folder, or pass --read-only FILE",
    )
