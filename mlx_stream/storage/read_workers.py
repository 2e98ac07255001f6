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

from mlx_stream.errors import MlxStreamError, ReadError
from mlx_stream.storage.checkpoint import FileIdentity
from mlx_stream.storage.open_files import close_all
from mlx_stream.storage.open_modes import OpenFile
from mlx_stream.storage.read_op import Fault, OpContext, execute_op, read_error
from mlx_stream.storage.read_plan import ReadOp
from mlx_stream.storage.record_check import RecordCheck, RecordVerifier
from mlx_stream.storage.throttle import Throttle
from mlx_stream.storage.ticket import POLL, Ticket, cancelled
from mlx_stream.timeline import Timeline

RUN_NBYTES = 64 << 10  # handing such reads to several threads takes longer than reading them


@dataclass(frozen=True)
class ReadCounters:
    """Totals since the reader was opened."""

    bytes: int  # what preadv returned, alignment included
    calls: int  # preadv calls that returned
    retries: int  # of these, calls that continued a short read
    busy_seconds: float  # wall time with at least one op in progress, throttling included


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
        self.verifier = RecordVerifier("first")
        self._lock = threading.Lock()
        # One wake-up for each queued op, and one for each thread to end it. `put` is reentrant,
        # as a finalizer needs it that may run in any thread, inside any lock.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._tickets: deque[Ticket] = deque()  # oldest first; those without ops are skipped
        self._behind: deque[Ticket] = deque()  # the same, served when that is empty
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

    def submit(
        self,
        ops: Sequence[ReadOp],
        buffer: np.ndarray,
        checks: Sequence[RecordCheck],
        *,
        behind: bool = False,
    ) -> Ticket:
        """Queue checked reads, `behind` all others. Raises ReadCancelled if closed."""
        ticket = Ticket(self._lock, ops, buffer, checks)
        with self._lock:
            if self.closed:
                raise cancelled("The reader is closed.", "open a new reader")
            if ops:
                (self._behind if behind else self._tickets).append(ticket)
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
                thread.join(min(POLL, timeout))
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
            self._finish(taken[0], self._read_run(*taken))
        return True

    def _read_run(self, ticket: Ticket, run: Sequence[ReadOp]) -> MlxStreamError | None:
        """One op after the other; ends at the first failure, or when the ticket is cancelled."""
        for op in run:
            started = time.perf_counter()
            error = self._read(ticket, op)
            if self.timeline is not None:
                self._note(op, started)
            if error is not None or ticket._error is not None:
                return error
        return None

    def _note(self, op: ReadOp, started: float) -> None:
        name, now = threading.current_thread().name, time.perf_counter()
        file = self._identities[op.file].path.name
        args = {"bytes": op.nbytes, "file": file, "offset": op.offset}
        self.timeline.add(name, "read", started, now, **args)  # type: ignore[union-attr]

    def _take(self) -> tuple[Ticket, list[ReadOp]] | None:
        """Next op of the oldest ticket, and those after it that are not worth another thread.

        None when the op of this wake-up was cancelled, or taken with another.
        """
        ticket = self._oldest(self._tickets) or self._oldest(self._behind)
        if ticket is None:
            return None
        ticket._active += 1
        if not self._active:
            self._busy_since = time.perf_counter()
        self._active += 1
        run = [ticket._ops.popleft()]
        nbytes = run[0].nbytes
        # A throttle's latencies overlap across threads, as those of a disk do.
        most = RUN_NBYTES if self._throttle is None else 0
        while ticket._ops and nbytes + ticket._ops[0].nbytes <= most:
            run.append(ticket._ops.popleft())
            nbytes += run[-1].nbytes
        return ticket, run

    @staticmethod
    def _oldest(tickets: deque[Ticket]) -> Ticket | None:
        while tickets and not tickets[0]._ops:
            tickets.popleft()
        return tickets[0] if tickets else None

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
            checks = ticket._take_checks(error)
        if checks:
            error = self.verifier.check(checks, ticket._buffer, self._identities)
        with self._lock:
            ticket._active -= 1
            if error is not None:
                ticket._stop(error)
            else:
                ticket._settle()

    def _drop_queue(self) -> None:
        for tickets in (self._tickets, self._behind):
            for ticket in tickets:
                if ticket._ops:
                    ticket._stop(cancelled("The reader was closed.", "open a new reader"))
            tickets.clear()

    def _close_files(self) -> None:
        with self._lock:
            if self._running:
                return
            files, self.files = self.files, []
        close_all(files)
