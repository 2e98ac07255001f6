"""The queue of submitted reads and the threads that serve it, for `reader.py`.

Nothing here knows the Reader, so a Reader that is dropped can be collected although its threads
run; `abandon` then ends them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlx_stream import interrupts
from mlx_stream.errors import MlxStreamError, ReadCancelled, ReadError
from mlx_stream.storage.checkpoint import FileIdentity
from mlx_stream.storage.open_files import close_all
from mlx_stream.storage.open_modes import OpenFile
from mlx_stream.storage.read_op import Fault, OpContext, execute_op, read_error
from mlx_stream.storage.read_plan import ReadOp
from mlx_stream.storage.throttle import Throttle
from mlx_stream.timeline import Timeline

_POLL = 0.2  # seconds; bounds how late a waiting thread sees a signal


@dataclass(frozen=True)
class ReadCounters:
    """Totals since the reader was opened."""

    bytes: int  # what preadv returned, alignment included
    calls: int  # preadv calls that returned
    retries: int  # of these, calls that continued a short read
    busy_seconds: float  # wall time with at least one op in progress, throttling included


class Ticket:
    """One submitted batch of reads. Thread safe.

    The reader holds the buffer until the ticket is done, and never writes to it after that.
    """

    def __init__(self, lock: threading.Lock, ops: Sequence[ReadOp], buffer: np.ndarray) -> None:
        self._changed = threading.Condition(lock)  # on the workers' lock
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
            ReadCancelled: cancelled, or the reader was closed or dropped.
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
                self._stop(cancelled("The read was cancelled.", "submit it again if needed"))

    # The rest is called by the workers, with the lock held.

    def _stop(self, error: MlxStreamError) -> None:
        """Keep the first error, drop what has not started."""
        self._error = self._error or error
        self._ops.clear()
        self._settle()

    def _settle(self) -> None:
        if not self._ops and not self._active:
            self._buffer = None
            self._changed.notify_all()


class ReadWorkers:
    """Serves tickets with a few threads, first submitted first served; owns files and counters.

    The files are closed by whoever comes last: the last thread that ends, or :meth:`close`.

    Args:
        identities: one for each of `files`, which are owned from here on.
        fault: test hook called before each preadv.
    """

    def __init__(
        self,
        identities: Sequence[FileIdentity],
        files: list[OpenFile],
        *,
        align: int,
        fault: Fault | None,
        throttle: Throttle | None,
    ) -> None:
        self._identities = identities
        self.files = files
        self.align = align
        self._fault = fault
        self._throttle = throttle
        self.timeline: Timeline | None = None
        self._lock = threading.Lock()
        # One wake-up for each queued op, and one for each thread to end it. `put` is reentrant,
        # as a finalizer needs it that may run in any thread, inside any lock.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._tickets: deque[Ticket] = deque()  # oldest first; those without ops are skipped
        self.closed = False
        self._bytes = self._calls = self._retries = self._active = 0
        self._busy, self._busy_since = 0.0, 0.0
        self._threads: list[threading.Thread] = []
        self._running = 0  # threads that have not ended

    def start(self, threads: int) -> None:
        """Start the threads; close after a failure."""
        for n in range(threads):
            name = f"mlx-stream-reader-{n}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            with self._lock:
                self._running += 1
            try:
                thread.start()
            except BaseException:
                with self._lock:
                    self._running -= 1
                raise
            self._threads.append(thread)

    def submit(self, ops: Sequence[ReadOp], buffer: np.ndarray) -> Ticket:
        """Queue checked reads. Raises ReadCancelled if closed."""
        ticket = Ticket(self._lock, ops, buffer)
        with self._lock:
            if self.closed:
                raise cancelled("The reader is closed.", "open a new reader")
            if ops:
                self._tickets.append(ticket)
        for _ in ops:
            self._wake.put(None)
        return ticket

    def counters(self) -> ReadCounters:
        """A consistent snapshot."""
        with self._lock:
            running = time.perf_counter() - self._busy_since if self._active else 0.0
            return ReadCounters(self._bytes, self._calls, self._retries, self._busy + running)

    def abandon(self) -> None:
        """End the threads, which drop what is queued and close the files. Waits for nothing.

        Takes no lock, so it may run in a garbage collection that any thread began anywhere.
        """
        self.closed = True
        for _ in self._threads:
            self._wake.put(None)

    def close(self, timeout: float) -> None:
        """Drop what is queued, let running reads end, join the threads, close the files.

        Idempotent. Raises ReadError if a thread is still inside the system after `timeout` seconds;
        the files then stay open until it returns.
        """
        with self._lock:
            self.closed = True
            self._drop_queue()
        self.abandon()
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            while thread.is_alive() and time.monotonic() < deadline:
                thread.join(min(_POLL, timeout))
        if stuck := [t.name for t in self._threads if t.is_alive()]:
            raise ReadError(
                "A read does not return.",
                expected=f"an answer of the disk within {timeout} s",
                actual=", ".join(stuck),
                remedy="check the disk or network share; only ending the process frees its files",
            )
        self._close_files()

    # --- the threads' side ------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._serve():
                pass
        finally:
            with self._lock:
                self._drop_queue()
                self._running -= 1
            self._close_files()

    def _serve(self) -> bool:
        """Wait for one wake-up and do what it is for; False when closed.

        A method of its own: a thread that waits holds no ticket and no buffer.
        """
        self._wake.get()
        with self._lock:
            if self.closed:
                return False
            taken = self._take()
        if taken is not None:
            started = time.perf_counter()
            error = self._read(*taken)
            if self.timeline is not None:
                self._note(taken[1], started)
            self._finish(taken[0], error)
        return True

    def _note(self, op: ReadOp, started: float) -> None:
        name, now = threading.current_thread().name, time.perf_counter()
        file = self._identities[op.file].path.name
        args = {"bytes": op.nbytes, "file": file, "offset": op.offset}
        self.timeline.add(name, "read", started, now, **args)  # type: ignore[union-attr]

    def _take(self) -> tuple[Ticket, ReadOp] | None:
        """Next op of the oldest ticket; None when the op of this wake-up was cancelled."""
        while self._tickets and not self._tickets[0]._ops:
            self._tickets.popleft()
        if not self._tickets:
            return None
        ticket = self._tickets[0]
        ticket._active += 1
        if not self._active:
            self._busy_since = time.perf_counter()
        self._active += 1
        return ticket, ticket._ops.popleft()

    def _read(self, ticket: Ticket, op: ReadOp) -> MlxStreamError | None:
        identity, fd = self._identities[op.file], self.files[op.file].fd
        context = OpContext(fd, identity, self.align, self._fault, self._count)
        try:
            if self._throttle is None:
                execute_op(op, ticket._buffer, context)
            elif not self._read_throttled(self._throttle, ticket, op, context):
                return cancelled("The read was cancelled.", "submit it again if needed")
        except MlxStreamError as error:
            return error.with_traceback(None)
        except BaseException as error:  # a thread that dies silently would hang wait()
            return read_error(op, identity, error)
        return None

    def _read_throttled(
        self, throttle: Throttle, ticket: Ticket, op: ReadOp, context: OpContext
    ) -> bool:
        """False if it was cancelled, or the reader closed, before it was over."""

        def stopped() -> bool:
            return self.closed or ticket._error is not None

        begin, end = throttle.grant(op.nbytes)
        if not throttle.wait_until(begin, stopped):
            return False
        execute_op(op, ticket._buffer, context)
        return throttle.wait_until(end, stopped)

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

    def _drop_queue(self) -> None:
        for ticket in self._tickets:
            if ticket._ops:
                ticket._stop(cancelled("The reader was closed.", "open a new reader"))
        self._tickets.clear()

    def _close_files(self) -> None:
        with self._lock:
            if self._running:
                return
            files, self.files = self.files, []
        close_all(files)


def cancelled(problem: str, remedy: str) -> ReadCancelled:
    """The error of reads that were dropped, not failed."""
    return ReadCancelled(problem, expected="reads that end", actual="reads dropped", remedy=remedy)
