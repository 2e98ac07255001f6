"""A few worker threads that run numpy with one BLAS thread each.

Owns the threads, the per-thread scratch memory and the BLAS thread limit. Knows nothing of
weights, and nothing of MLX: MLX streams are thread-local, so workers must touch numpy only.
"""

from __future__ import annotations

import functools
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from threadpoolctl import ThreadpoolController

from mlx_stream import interrupts

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_THREADS = 16


def default_threads() -> int:
    """Cores this process may run on, at most MAX_THREADS."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:  # macOS
        cores = os.cpu_count() or 1
    return max(1, min(cores, MAX_THREADS))


@functools.cache
def _controller() -> ThreadpoolController:
    """Scanning the loaded libraries takes milliseconds: once; a limit then costs ~15 us."""
    return ThreadpoolController()


class _Run:
    """One `map_ordered` call: its queue position, its results, its first error."""

    def __init__(
        self,
        fn: Callable[[Any], Any],
        items: Sequence[Any],
        consume: Callable[[Any, Any], None] | None,
        threads: int,
    ) -> None:
        self.fn = fn
        self.items = items
        self.consume = consume
        self.window = threads + 1
        self.changed = threading.Condition()
        self.started = 0  # items handed to a worker
        self.consumed = 0  # items whose result was consumed
        self.results: dict[int, Any] = {}
        self.consuming = False
        self.error: BaseException | None = None
        self.active = 0  # workers inside `work`

    def work(self) -> None:
        """A worker's share: items until none is left or one failed."""
        with self.changed:
            self.active += 1
        try:
            while (index := self._take()) is not None:
                self._deliver(index, self.fn(self.items[index]))
        except BaseException as error:  # handed to the caller, who raises it
            self.cancel(error)
        finally:
            with self.changed:
                self.active -= 1
                self.changed.notify_all()

    def cancel(self, error: BaseException) -> None:
        """Drop items not started; the first error wins."""
        with self.changed:
            self.error = self.error or error
            self.results.clear()
            self.changed.notify_all()

    def wait(self) -> None:
        """Return when the run is over and no worker is in it; one that comes later does nothing."""
        with self.changed:
            while self.active or not (self.error or self.consumed == len(self.items)):
                self.changed.wait()

    def _take(self) -> int | None:
        with self.changed:
            while True:
                if self.error is not None or self.started == len(self.items):
                    return None
                if self.started - self.consumed < self.window:
                    self.started += 1
                    return self.started - 1
                self.changed.wait()

    def _deliver(self, index: int, result: Any) -> None:
        """File a result; consume all that are due, unless another worker is doing so."""
        with self.changed:
            self.results[index] = result
            if self.consuming:
                return
            self.consuming = True
        del result
        while True:
            with self.changed:
                index = self.consumed
                if self.error is not None or index not in self.results:
                    self.consuming = False
                    return
                due = self.results.pop(index)
            if self.consume is not None:
                self.consume(self.items[index], due)
            del due
            with self.changed:
                self.consumed += 1
                self.changed.notify_all()


def _worker(runs: queue.SimpleQueue[_Run | None]) -> None:
    while (run := runs.get()) is not None:
        run.work()
        del run


def _stop(runs: queue.SimpleQueue[_Run | None], threads: list[threading.Thread]) -> None:
    for _ in threads:
        runs.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()
    threads.clear()


class WorkerPool:
    """Ordered map over worker threads, each limited to one BLAS thread.

    One run at a time: concurrent callers queue, and a call from inside a worker runs inline.
    The threads start with the first run and end with `close` (or with the pool's life).
    """

    def __init__(self, threads: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise ValueError(f"a worker pool needs at least one thread, got {threads}")
        self.threads = threads or default_threads()
        self._busy = threading.Lock()
        self._local = threading.local()
        self._workers: list[threading.Thread] = []
        self._runs: queue.SimpleQueue[_Run | None] = queue.SimpleQueue()
        self._closed = False
        self._finalizer = weakref.finalize(self, _stop, self._runs, self._workers)

    def map_ordered(
        self,
        fn: Callable[[Item], Result],
        items: Sequence[Item],
        consume: Callable[[Item, Result], None] | None = None,
    ) -> None:
        """Run fn over items in parallel and consume(item, result) in item order.

        consume runs exactly once per item, never concurrently, on a worker or on the calling
        thread. At most threads + 1 results exist at a time. The first exception, or one that
        interrupts the caller (KeyboardInterrupt), drops the items not yet started and is raised
        once the running ones have returned; the pool stays usable.
        """
        if self._closed:
            raise RuntimeError("the worker pool is closed")
        if threading.current_thread() in self._workers:
            return self._run_inline(fn, items, consume)
        interrupts.check()
        with self._busy, _controller().limit(limits=1, user_api="blas"):
            if self.threads == 1 or len(items) <= 1:
                return self._run_inline(fn, items, consume)
            return self._run_threads(_Run(fn, items, consume, self.threads))

    @contextmanager
    def one_blas_thread(self) -> Iterator[None]:
        """The caller's BLAS calls stay on its thread: for work too small to be shared.

        On busy cores BLAS's own threads would wait for each other far longer than they compute.
        """
        if threading.current_thread() in self._workers:  # limited already
            yield
            return
        with self._busy, _controller().limit(limits=1, user_api="blas"):
            yield

    def scratch(self, nbytes: int) -> np.ndarray:
        """This thread's scratch, uint8 [nbytes], 64-byte aligned, kept and reused by later calls.

        Valid until the same thread asks again; the contents are undefined.
        """
        memory = getattr(self._local, "memory", None)
        if memory is None or memory.nbytes < nbytes + 64:
            self._local.memory = memory = np.empty(nbytes + 64, np.uint8)
        start = -memory.ctypes.data % 64
        return memory[start : start + nbytes]

    def close(self) -> None:
        """End the threads and free their scratch. Idempotent."""
        self._closed = True
        with self._busy:
            self._finalizer()
            self._local = threading.local()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @staticmethod
    def _run_inline(
        fn: Callable[[Item], Result],
        items: Sequence[Item],
        consume: Callable[[Item, Result], None] | None,
    ) -> None:
        for item in items:
            result = fn(item)
            if consume is not None:
                consume(item, result)

    def _run_threads(self, run: _Run) -> None:
        while len(self._workers) < self.threads:
            name = f"cpu-worker-{len(self._workers)}"
            thread = threading.Thread(target=_worker, args=(self._runs,), name=name, daemon=True)
            thread.start()
            self._workers.append(thread)
        try:
            for _ in self._workers:
                self._runs.put(run)
            run.wait()
        except BaseException as interrupt:
            run.cancel(interrupt)
            run.wait()
            raise
        if run.error is not None:
            raise run.error
