"""Settings of the whole process that every open backend changes, and puts back in any order.

With plain save and restore, two backends closed in the order they were opened would leave the
first one's value behind for good, and take the second one's away while it is in use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

import mlx.core as mx

Value = TypeVar("Value")


class _Hold(Generic[Value]):
    """One holder's wish, and what was in force before it."""

    def __init__(self, previous: Value) -> None:
        self.previous = previous


class SharedSetting(Generic[Value]):
    """A setting that the last to take it decides, until it is given back.

    Args:
        swap: sets a value and returns the one before.
    """

    def __init__(self, swap: Callable[[Value], Value]) -> None:
        self._swap = swap
        self._lock = threading.Lock()
        self._holds: list[_Hold[Value]] = []  # the last one is in force

    def hold(self, value: Value) -> Callable[[], None]:
        """Set the value; returns what gives it back, once, however often it is called."""
        with self._lock:
            hold = _Hold(self._swap(value))
            self._holds.append(hold)
        return lambda: self._release(hold)

    def _release(self, hold: _Hold[Value]) -> None:
        with self._lock:
            if hold not in self._holds:
                return
            place = self._holds.index(hold)
            if hold is self._holds[-1]:
                self._swap(hold.previous)
            else:  # not in force: whoever came next goes back to what was before this one
                self._holds[place + 1].previous = hold.previous
            del self._holds[place]


def _swap_device(device: mx.Device) -> mx.Device:
    previous = mx.default_device()
    mx.set_default_device(device)
    return previous


# Bytes of freed buffers that MLX keeps; bytes wired by Metal; where MLX computes.
cache_limit: SharedSetting[int] = SharedSetting(lambda nbytes: mx.set_cache_limit(nbytes))
wired_limit: SharedSetting[int] = SharedSetting(lambda nbytes: mx.set_wired_limit(nbytes))
default_device: SharedSetting[mx.Device] = SharedSetting(_swap_device)
