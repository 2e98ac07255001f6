"""Reader threads: execute planned reads into the caller's memory, bypassing the page cache.

Owns the descriptors, the threads and the byte counters. It moves raw bytes only: it knows no
tensors, allocates no buffers and never touches MLX. Planning is `read_plan.py`'s.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from mlx_stream import interrupts
from mlx_stream.errors import MlxStreamError, ReadCancelled, ReadError
from mlx_stream.storage.checkpoint import Checkpoint
from mlx_stream.storage.open_files import check_identity, check_path, close_all, open_all
from mlx_stream.storage.open_modes import IoChoice
from mlx_stream.storage.read_op import Fault, OpContext, execute_op, read_error
from mlx_stream.storage.read_plan import ReadOp

__all__ = ["ReadCounters", "Reader", "Ticket"]

DEFAULT_THREADS = 4
CLOSE_TIMEOUT = 30.0  # seconds; a preadv on a dead network disk may never return
_POLL = 0.2  # seconds; bounds how late a waiting thread sees a signal


@dataclass(frozen=True)
class ReadCounters:
    """Totals since the reader was opened."""

    bytes: int  # what preadv returned, alignment included
    calls: int  # preadv calls that returned
    retries: int  # of these, calls that continued a short read
    busy_seconds: float  # wall time with at least one op in progress


class Ticket:
    """One submitted batch of reads. Thread safe.

    The reader holds the buffer until the ticket is done, and never writes to it after that.
    """

    def __init__(self, lock: threading.Lock, ops: Sequence[ReadOp], buffer: np.ndarray) -> None:
        self._changed = threading.Condition(lock)  # on the reader's lock
        self._ops = deque(ops)  # not started
        self._buffer: np.ndarray | None = buffer if ops else None
        self._active = 0  # started, not ended
        self._error: MlxStreamError | None = None

    def done(self) -> bool:
        """True when no thread writes to the buffer and none will: read, failed or cancelled."""
        return self._buffer is None

    def wait(self, timeout: float | None = None) -> None:
        """Return when all bytes are in the buffer. Ctrl-C interrupts the wait.

        Raises:
            ReadError, EndOfFileError: the first failure; the remaining ops were dropped.
            ReadCancelled: cancelled, or the reader was closed.
            TimeoutError: not done after `timeout` seconds; the reads go on.
        After any of the first three no thread writes to the buffer any more.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self.done():
                interrupts.check()
                left = _POLL if deadline is None else min(_POLL, deadline - time.monotonic())
                if left <= 0:
                    raise TimeoutError(f"reads not done after {timeout} s")
                self._changed.wait(left)
            if self._error is not None:
                raise self._error.with_traceback(None)

    def cancel(self) -> None:
        """Drop the ops that have not started. Returns at once; `wait` waits for the others."""
        with self._changed:
            if not self.done():
                self._stop(_cancelled("The read was cancelled.", "submit it again if needed"))

    # The rest is called by the reader, with the lock held.

    def _stop(self, error: MlxStreamError) -> None:
        """Keep the first error, drop what has not started."""
        self._error = self._error or error
        self._ops.clear()
        self._settle()

    def _settle(self) -> None:
        if not self._ops and not self._active:
            self._buffer = None
            self._changed.notify_all()


class Reader:
    """Executes ReadOps of one checkpoint with a few threads, first submitted first served.

    Args:
        checkpoint: whose files to open; each is opened once.
        io: 'direct' bypasses the page cache where the file system allows it (see io_mode).
        threads: concurrent reads.
        fault: test hook called before each preadv; an OSError it raises fails the op.

    Raises:
        FileChangedError: a file is not the one whose header was read.
        ReadError: a file cannot be opened.

    Attributes:
        align: what op offsets, part sizes and buffer addresses must be multiples of (bytes).
        io_mode: what the system granted: 'O_DIRECT', 'F_NOCACHE', 'buffered' or
            'buffered (refused ...)'.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        io: IoChoice = "direct",
        threads: int = DEFAULT_THREADS,
        fault: Fault | None = None,
    ) -> None:
        if threads < 1 or io not in ("direct", "buffered"):
            raise ValueError(f"threads {threads} or io {io!r} is not valid")
        self._identities = checkpoint.files
        self._fault = fault
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        self._tickets: deque[Ticket] = deque()  # oldest first; those without ops are skipped
        self._closed = False
        self._bytes = self._calls = self._retries = self._active = 0
        self._busy, self._busy_since = 0.0, 0.0
        self._threads: list[threading.Thread] = []
        self._files = open_all(checkpoint.files, io)
        self.align = max((f.align for f in self._files), default=1)
        self.io_mode = self._files[0].io_mode if self._files else io
        try:
            self._start(threads)
        except BaseException:
            self.close()
            raise

    def _start(self, threads: int) -> None:
        for n in range(threads):
            name = f"mlx-stream-reader-{n}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    # --- the caller's side ------------------------------------------------------------------

    def submit(self, ops: Sequence[ReadOp], buffer: np.ndarray) -> Ticket:
        """Queue reads into `buffer`, a writable 1-D uint8 array with an aligned address.

        The caller must leave the buffer alone until the ticket is done. Raises ReadCancelled if
        the reader is closed, ValueError if ops and buffer do not fit together.
        """
        self._check(ops, buffer)
        ticket = Ticket(self._lock, ops, buffer)
        with self._lock:
            if self._closed:
                raise _cancelled("The reader is closed.", "open a new reader")
            if ops:
                self._tickets.append(ticket)
                self._work.notify(len(ops))
        return ticket

    @property
    def file_sizes(self) -> tuple[int, ...]:
        """Bytes of each file, as planning needs them."""
        return tuple(f.size for f in self._identities)

    @property
    def counters(self) -> ReadCounters:
        """A consistent snapshot."""
        with self._lock:
            running = time.perf_counter() - self._busy_since if self._active else 0.0
            return ReadCounters(self._bytes, self._calls, self._retries, self._busy + running)

    def check_unchanged(self) -> None:
        """Raises FileChangedError if a file was modified, replaced or removed since it was opened.

        Looks at the open descriptor (modified in place) and at the path (replaced). Takes no
        lock: do not call it while another thread closes the reader.
        """
        if self._closed:
            raise _cancelled("The reader is closed.", "open a new reader")
        for identity, file in zip(self._identities, self._files, strict=True):
            check_identity(identity, os.fstat(file.fd))
            check_path(identity)

    def close(self) -> None:
        """Cancel what is queued, let running reads end, join the threads, close the files.

        Idempotent. Raises ReadError if a thread is still inside the system after CLOSE_TIMEOUT;
        the files then stay open, because the system still uses them.
        """
        with self._lock:
            self._closed = True
            for ticket in self._tickets:
                if ticket._ops:
                    ticket._stop(_cancelled("The reader was closed.", "open a new reader"))
            self._tickets.clear()
            self._work.notify_all()
        deadline = time.monotonic() + CLOSE_TIMEOUT
        for thread in self._threads:
            while thread.is_alive() and time.monotonic() < deadline:
                thread.join(min(_POLL, CLOSE_TIMEOUT))
        if stuck := [t.name for t in self._threads if t.is_alive()]:
            raise ReadError(
                "A read does not return.",
                expected=f"an answer of the disk within {CLOSE_TIMEOUT} s",
                actual=", ".join(stuck),
                remedy="check the disk or network share; only ending the process frees its files",
            )
        files, self._files = self._files, []
        close_all(files)

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

    # --- the threads' side ------------------------------------------------------------------

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            ticket, op = taken
            error = self._read(ticket, op)
            self._finish(ticket, error)

    def _take(self) -> tuple[Ticket, ReadOp] | None:
        """Next op of the oldest ticket; None when the reader is closed."""
        with self._work:
            while not self._closed:
                while self._tickets and not self._tickets[0]._ops:
                    self._tickets.popleft()
                if self._tickets:
                    ticket = self._tickets[0]
                    ticket._active += 1
                    if not self._active:
                        self._busy_since = time.perf_counter()
                    self._active += 1
                    return ticket, ticket._ops.popleft()
                self._work.wait()
            return None

    def _read(self, ticket: Ticket, op: ReadOp) -> MlxStreamError | None:
        identity, fd = self._identities[op.file], self._files[op.file].fd
        context = OpContext(fd, identity, self.align, self._fault, self._count)
        try:
            execute_op(op, ticket._buffer, context)
        except MlxStreamError as error:
            return error.with_traceback(None)
        except BaseException as error:  # a thread that dies silently would hang wait()
            return read_error(op, identity, error)
        return None

    def _count(self, nbytes: int, retry: bool) -> None:
        with self._lock:
            self._bytes += nbytes
            self._calls += 1
            self._retries += retry

    def _finish(self, ticket: Ticket, error: MlxStreamError | None) -> None:
        with self._lock:
            self._active -= 1
            if not self._active:
                self._busy += time.perf_counter() - self._busy_since
            ticket._active -= 1
            if error is not None:
                ticket._stop(error)
            else:
                ticket._settle()


def _cancelled(problem: str, remedy: str) -> ReadCancelled:
    return ReadCancelled(problem, expected="reads that end", actual="reads dropped", remedy=remedy)
