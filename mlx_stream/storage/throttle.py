"""A slower disk than the one that is there, for benchmarks.

Models an SSD: transfers share one bandwidth and queue for it, latencies of reads in flight overlap.
Owns the schedule only; the reader's threads do the reading and the sleeping.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from mlx_stream.config import format_bytes, parse_throttle

__all__ = ["Throttle"]

_SLICE = 0.02  # seconds; bounds how late a sleeping thread sees that it is to stop


class Throttle:
    """Bounds the rate of all reads together. Thread safe; for one Reader.

    A read may begin when the transfers granted before it are over, and it ends no earlier than its
    own transfer and the latency after that. Nothing is saved up while idle, so in any span of
    `t` seconds at most ``t * bytes_per_second`` plus one read is read.

    Args:
        bytes_per_second: of all threads together; above 0.
        latency_seconds: added to each read, at the same time in all threads; 0 or more.
        clock: seconds, monotonic.
        sleep: takes seconds.
    """

    def __init__(
        self,
        bytes_per_second: float,
        latency_seconds: float = 0.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not (0 < bytes_per_second < float("inf") and 0 <= latency_seconds < float("inf")):
            raise ValueError(f"no throttle: {bytes_per_second} bytes/s, {latency_seconds} s")
        self.bytes_per_second = float(bytes_per_second)
        self.latency_seconds = float(latency_seconds)
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = float("-inf")  # when every granted transfer is over

    @classmethod
    def parse(cls, text: str | None) -> Throttle | None:
        """From ``"2GB/s"`` or ``"0.5GB/s:100us"``; None for None. Raises ConfigError."""
        return None if text is None else cls(*parse_throttle(text))

    def grant(self, nbytes: int) -> tuple[float, float]:
        """``(begin, end)`` on the clock for a read of `nbytes`, in the order of the calls.

        A read that is cancelled later keeps its place, as one that a disk has accepted would.
        """
        with self._lock:
            begin = max(self._clock(), self._free_at)
            self._free_at = begin + nbytes / self.bytes_per_second
            return begin, self._free_at + self.latency_seconds

    def wait_until(self, moment: float, stopped: Callable[[], bool]) -> bool:
        """Sleep to a moment of the clock; False at once (within 20 ms) when `stopped` says so."""
        while not stopped():
            left = moment - self._clock()
            if left <= 0:
                return True
            self._sleep(min(left, _SLICE))
        return False

    def __str__(self) -> str:
        text = f"throttled to {format_bytes(self.bytes_per_second)}/s"
        return f"{text} + {self.latency_seconds * 1e6:g} us" if self.latency_seconds else text
