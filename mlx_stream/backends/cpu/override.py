"""Replace a function of a module for the threads that ask for it, and put it back after the last.

Several runtimes may compute in several threads at once. Saving and restoring the attribute would
then restore another one's replacement; so one dispatcher is installed while any context is open,
and it routes each thread to its own replacement, or to the original.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Function = Callable[..., Any]

_lock = threading.Lock()
_dispatchers: dict[tuple[int, str], _Dispatcher] = {}


class _Dispatcher:
    """Stands in the module; `open` contexts of all threads are counted under the lock."""

    def __init__(self, original: Function) -> None:
        self.original = original
        self.open = 0
        self._local = threading.local()

    def stack(self) -> list[Function]:
        """This thread's replacements, innermost last."""
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        return self._local.stack

    def call(self, *args: Any, **options: Any) -> Any:
        """What the module's callers reach."""
        stack = self.stack()
        return (stack[-1] if stack else self.original)(*args, **options)


@contextmanager
def override(owner: Any, name: str, make: Callable[[Function], Function]) -> Iterator[None]:
    """While open, ``owner.name`` is ``make(original)`` in this thread. Nests."""
    key = (id(owner), name)
    with _lock:
        if key not in _dispatchers:
            _dispatchers[key] = _Dispatcher(getattr(owner, name))
            setattr(owner, name, _dispatchers[key].call)
        dispatcher = _dispatchers[key]
        dispatcher.open += 1
    dispatcher.stack().append(make(dispatcher.original))
    try:
        yield
    finally:
        dispatcher.stack().pop()
        with _lock:
            dispatcher.open -= 1
            if not dispatcher.open:
                setattr(owner, name, dispatcher.original)
                del _dispatchers[key]
