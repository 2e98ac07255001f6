"""Ctrl-C at safe points only.

Python raises KeyboardInterrupt between any two bytecodes: inside a lock, or between taking a slot
and noting who has it. While `deferred` is open SIGINT is only remembered, and `check` delivers it
where everything is consistent. A second Ctrl-C does not wait.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class _Deferred:
    """The SIGINT handler in force while interrupts are deferred."""

    def __init__(self, previous: Callable[[int, Any], Any]) -> None:
        self._previous = previous
        self.pending = False

    def __call__(self, number: int, frame: Any) -> None:
        if self.pending:
            self._previous(number, frame)
        self.pending = True

    def deliver(self) -> None:
        """Do what the signal would have done."""
        self.pending = False
        self._previous(signal.SIGINT, None)


@contextmanager
def deferred() -> Iterator[None]:
    """SIGINT waits for `check`, or for the end of the block. Main thread only; nests.

    Does nothing in other threads, which get no signals, and where SIGINT has no Python handler.
    """
    previous = signal.getsignal(signal.SIGINT)
    here = threading.current_thread() is threading.main_thread()
    if not here or not callable(previous) or isinstance(previous, _Deferred):
        yield
        return
    handler = _Deferred(previous)
    signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
        if handler.pending:
            handler.deliver()


def check() -> None:
    """A safe point: raises KeyboardInterrupt if SIGINT has come (or runs the handler in force)."""
    if threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGINT)
        if isinstance(handler, _Deferred) and handler.pending:
            handler.deliver()
