"""One submitted batch of reads, as whoever waits for it and the threads that serve it see it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from mlx_stream import interrupts
from mlx_stream.errors import MlxStreamError, ReadCancelled
from mlx_stream.storage.read_plan import ReadOp
from mlx_stream.storage.record_check import RecordCheck

POLL = 0.2  # seconds; bounds how late a waiting thread sees a signal


class Ticket:
    """One submitted batch of reads. Thread safe.

    The reader holds the buffer until the ticket is done, and never writes to it after that.
    """

    def __init__(
        self,
        lock: threading.Lock,
        ops: Sequence[ReadOp],
        buffer: np.ndarray,
        checks: Sequence[RecordCheck] = (),
    ) -> None:
        self._changed = threading.Condition(lock)  # on the workers' lock
        self._ops = deque(ops)  # not started
        self._buffer: np.ndarray | None = buffer if ops else None
        self._active = 0  # started, not ended
        self._checks = checks  # to be done when all bytes are there
        self._error: MlxStreamError | None = None

    def done(self) -> bool:
        """True when no thread writes to the buffer and none will: read, failed or cancelled."""
        return self._buffer is None

    def wait(self, timeout: float | None = None) -> None:
        """Return when all bytes are in the buffer. Ctrl-C interrupts the wait.

        Raises:
            ReadError, EndOfFileError: the first failure; the remaining ops were dropped.
            DamagedRecordError: the bytes are there, and wrong.
            ReadCancelled: cancelled, or the reader was closed or dropped.
            TimeoutError: not done after `timeout` seconds; the reads go on.
        After any of the first four no thread writes to the buffer any more.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self.done():
                interrupts.check()
                left = POLL if deadline is None else min(POLL, deadline - time.monotonic())
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

    def _take_checks(self, error: MlxStreamError | None) -> Sequence[RecordCheck]:
        """What is left to do when an op ended: the checks, once, after the last one."""
        if error or self._error or self._ops or self._active > 1:
            return ()
        checks, self._checks = self._checks, ()
        return checks

    def _settle(self) -> None:
        if not self._ops and not self._active:
            self._buffer = None
            self._changed.notify_all()


def cancelled(problem: str, remedy: str) -> ReadCancelled:
    """The error of reads that were dropped, not failed."""
    return ReadCancelled(problem, expected="reads that end", actual="reads dropped", remedy=remedy)
