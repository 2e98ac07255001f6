"""Reader threads: execute planned reads into the caller's memory, bypassing the page cache.

The caller's side: what is checked before it is queued for `read_workers.py`. It moves raw bytes
only: it knows no tensors, allocates no buffers and never touches MLX. Planning is `read_plan.py`'s.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np

from mlx_stream.config import StreamConfig
from mlx_stream.storage.checkpoint import Checkpoint
from mlx_stream.storage.open_files import check_identity, check_path, open_all
from mlx_stream.storage.open_modes import IoChoice
from mlx_stream.storage.read_op import Fault
from mlx_stream.storage.read_plan import ReadOp
from mlx_stream.storage.read_workers import ReadCounters, ReadWorkers, Ticket, cancelled
from mlx_stream.storage.record_check import RecordCheck, RecordVerifier, VerifyChoice
from mlx_stream.storage.throttle import Throttle
from mlx_stream.timeline import Timeline

__all__ = ["ReadCounters", "Reader", "Ticket", "reader_options"]

DEFAULT_THREADS = 4
CLOSE_TIMEOUT = 30.0  # seconds; a preadv on a dead network disk may never return


class Reader:
    """Executes ReadOps of one checkpoint with a few threads, first submitted first served.

    Close it, or use it in a with-block. One that is dropped ends its threads and closes its files
    when their running reads are over; what is queued is cancelled.

    Args:
        checkpoint: whose files to open; each is opened once.
        io: 'direct' bypasses the page cache where the file system allows it (see io_mode).
        threads: concurrent reads.
        fault: test hook called before each preadv; an OSError it raises fails the op.
        throttle: makes the reads slower (benchmarks).
        verify: when the checksums of a packed layout are compared: on the first read of each
            expert, on every read, or never.

    Raises:
        FileChangedError: a file is not the one whose header was read.
        ReadError: a file cannot be opened.

    Attributes:
        io_mode: what the system granted: 'O_DIRECT', 'F_NOCACHE', 'buffered' or
            'buffered (refused ...)'; with a throttle also its rate.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        io: IoChoice = "direct",
        threads: int = DEFAULT_THREADS,
        fault: Fault | None = None,
        throttle: Throttle | None = None,
        verify: VerifyChoice = "first",
    ) -> None:
        if threads < 1 or io not in ("direct", "buffered"):
            raise ValueError(f"threads {threads} or io {io!r} is not valid")
        self._identities = checkpoint.files
        files = open_all(checkpoint.files, io)
        align = max((f.align for f in files), default=1)
        self.io_mode = files[0].io_mode if files else io
        if throttle is not None:
            self.io_mode += f", {throttle}"
        self._workers = ReadWorkers(
            checkpoint.files, files, align=align, fault=fault, throttle=throttle
        )
        self._verifier = self._workers.verifier = RecordVerifier(verify)
        self._behind = False
        # The threads know only the workers, so that this object can be collected while they run.
        self._dropped = weakref.finalize(self, self._workers.abandon)
        self._dropped.atexit = False  # the system frees what is left
        try:
            self._workers.start(threads)
        except BaseException:
            self.close()
            raise

    def submit(
        self, ops: Sequence[ReadOp], buffer: np.ndarray, checks: Sequence[RecordCheck] = ()
    ) -> Ticket:
        """Queue reads into `buffer`, a writable 1-D uint8 array with an aligned address.

        The caller must leave the buffer alone until the ticket is done. A reader thread does those
        of `checks` that are due before the ticket is done; the first to fail is its error. Raises
        ReadCancelled if the reader is closed, ValueError if ops and buffer do not fit together.
        """
        self._check(ops, buffer)
        due = self._verifier.due(checks)
        return self._workers.submit(ops, buffer, due, behind=self._behind)

    @contextmanager
    def behind(self) -> Iterator[None]:
        """What is submitted inside begins only when nothing else is queued."""
        before, self._behind = self._behind, True
        try:
            yield
        finally:
            self._behind = before

    @property
    def align(self) -> int:
        """What op offsets, part sizes and buffer addresses must be multiples of (bytes)."""
        return self._workers.align

    @property
    def timeline(self) -> Timeline | None:
        """Where the threads note their reads; may be set at any time."""
        return self._workers.timeline

    @timeline.setter
    def timeline(self, timeline: Timeline | None) -> None:
        self._workers.timeline = timeline

    @property
    def file_sizes(self) -> tuple[int, ...]:
        """Bytes of each file, as planning needs them."""
        return tuple(f.size for f in self._identities)

    @property
    def counters(self) -> ReadCounters:
        """A consistent snapshot."""
        return self._workers.counters()

    def check_unchanged(self) -> None:
        """Raises FileChangedError if a file was modified, replaced or removed since it was opened.

        Looks at the open descriptor (modified in place) and at the path (replaced). Takes no
        lock: do not call it while another thread closes the reader.
        """
        if self._workers.closed:
            raise cancelled("The reader is closed.", "open a new reader")
        for identity, file in zip(self._identities, self._workers.files, strict=True):
            check_identity(identity, os.fstat(file.fd))
            check_path(identity)

    def close(self) -> None:
        """Cancel what is queued, let running reads end, join the threads, close the files.

        Idempotent. Raises ReadError if a thread is still inside the system after CLOSE_TIMEOUT;
        the files then stay open, because the system still uses them.
        """
        self._workers.close(CLOSE_TIMEOUT)
        self._dropped.detach()

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check(self, ops: Sequence[ReadOp], buffer: np.ndarray) -> None:
        if buffer.dtype != np.uint8 or buffer.ndim != 1 or not buffer.flags.carray:
            raise ValueError("buffer must be a writable contiguous 1-D uint8 array")
        address = buffer.ctypes.data
        for op in ops:
            if not 0 <= op.file < len(self._identities) or not op.parts:
                raise ValueError(f"{op} is not a read of this checkpoint")
            if not 0 <= op.offset < self._identities[op.file].size:
                raise ValueError(f"{op} begins outside its file")
            for slot, nbytes in op.parts:
                if slot < 0 or nbytes < 1 or slot + nbytes > buffer.nbytes:
                    raise ValueError(f"{op} does not fit a buffer of {buffer.nbytes} bytes")
                if ((address + slot) | nbytes | op.offset) % self.align:
                    raise ValueError(f"{op} into address {address:#x} is not {self.align}-aligned")


def reader_options(config: StreamConfig) -> dict[str, Any]:
    """Keyword arguments of a Reader, as the config says."""
    return {
        "io": config.io,
        "threads": config.reader_threads,
        "throttle": Throttle.parse(config.throttle),
        "verify": config.verify,
    }
