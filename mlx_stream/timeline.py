"""A record of who did what when: reads by thread, phases of the compute thread.

Written as Chrome trace events (the JSON object format of "Trace Event Format", complete events
"X"), which ui.perfetto.dev and chrome://tracing open. Costs nothing where none is installed.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx_stream.whole_files import write_whole

MAX_EVENTS = 1_000_000
COMPUTE = "compute"


@dataclass(frozen=True)
class Event:
    """Something that took time.

    Attributes:
        track: a reader thread's name, or COMPUTE.
        name: such as ``"read"``, ``"attention"``, ``"experts"``, ``"stall"``, ``"token"``.
        start: seconds on the clock of ``time.perf_counter``.
        seconds: how long.
        args: JSON-ready details.
    """

    track: str
    name: str
    start: float
    seconds: float
    args: dict[str, Any]


class Timeline:
    """Collects events, at most MAX_EVENTS; later ones are counted and dropped. Thread safe."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._lock = threading.Lock()
        self.dropped = 0

    def add(self, track: str, name: str, start: float, end: float, **args: Any) -> None:
        """Note what went on from `start` to `end`."""
        event = Event(track, name, start, end - start, args)
        with self._lock:
            if len(self._events) < MAX_EVENTS:
                self._events.append(event)
            else:
                self.dropped += 1

    @contextmanager
    def span(self, name: str, **args: Any) -> Iterator[None]:
        """A phase of the compute thread."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(COMPUTE, name, start, time.perf_counter(), **args)

    @property
    def events(self) -> tuple[Event, ...]:
        """In the order they ended."""
        with self._lock:
            return tuple(self._events)

    def as_dict(self) -> dict[str, Any]:
        """Chrome trace events; times in microseconds from the first event."""
        events = self.events
        origin = min((e.start for e in events), default=0.0)
        tracks = sorted({e.track for e in events}, key=lambda t: (t != COMPUTE, t))
        ids = {track: n for n, track in enumerate(tracks, start=1)}
        pid = os.getpid()
        named = [
            {"name": "thread_name", "ph": "M", "pid": pid, "tid": ids[t], "args": {"name": t}}
            for t in tracks
        ]
        spans = [
            {
                "name": e.name,
                "ph": "X",
                "pid": pid,
                "tid": ids[e.track],
                "ts": round((e.start - origin) * 1e6, 3),
                "dur": round(e.seconds * 1e6, 3),
                "args": e.args,
            }
            for e in events
        ]
        return {
            "traceEvents": named + spans,
            "displayTimeUnit": "ms",
            "otherData": {"dropped_events": self.dropped},
        }

    def write(self, path: Path) -> None:
        """Write :meth:`as_dict` as JSON, atomically.

        Raises:
            OSError: the folder is missing or not writable; nothing is left behind.
        """
        write_whole(path, json.dumps(self.as_dict()))


@contextmanager
def span(timeline: Timeline | None, name: str, **args: Any) -> Iterator[None]:
    """As :meth:`Timeline.span`, or nothing."""
    if timeline is None:
        yield
        return
    with timeline.span(name, **args):
        yield
