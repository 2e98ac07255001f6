"""WorkerPool: order, bounded results, errors, BLAS limit, no leaked threads."""

import _thread
import gc
import threading
import time

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from mlx_stream.backends.cpu.pool import WorkerPool


@pytest.fixture(params=[1, 2, 5])
def pool(request):
    with WorkerPool(request.param) as pool:
        yield pool


def worker_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("cpu-worker")]


@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_results_are_consumed_once_in_item_order(pool, count):
    seen = []

    def square(item):
        time.sleep(0.001 * (item % 3))
        return item * item

    pool.map_ordered(square, range(count), lambda item, result: seen.append((item, result)))
    assert seen == [(item, item * item) for item in range(count)]


def test_consume_is_never_concurrent_and_results_are_bounded(pool):
    lock, alive, most, consuming = threading.Lock(), 0, 0, 0

    def produce(item):
        nonlocal alive, most
        with lock:
            alive += 1
            most = max(most, alive)

    def consume(item, result):
        nonlocal alive, consuming
        consuming += 1
        assert consuming == 1
        time.sleep(0.002)
        consuming -= 1
        with lock:
            alive -= 1

    pool.map_ordered(produce, range(40), consume)
    assert most <= pool.threads + 1


@pytest.mark.parametrize("where", ["fn", "consume"])
def test_an_exception_drops_the_rest_and_the_pool_stays_usable(pool, where):
    started = []

    def fn(item):
        started.append(item)
        if where == "fn" and item == 3:
            raise KeyError("item 3")
        return item

    def consume(item, result):
        if where == "consume" and item == 3:
            raise KeyError("item 3")

    with pytest.raises(KeyError, match="item 3"):
        pool.map_ordered(fn, range(1000), consume)
    assert len(started) < 1000
    seen = []
    pool.map_ordered(fn, [10, 11, 12], lambda item, result: seen.append(result))
    assert seen == [10, 11, 12]


def test_keyboard_interrupt_in_the_caller(pool):
    started = []

    def fn(item):
        started.append(item)
        if item == 2:
            _thread.interrupt_main()
        time.sleep(0.005)

    with pytest.raises(KeyboardInterrupt):
        pool.map_ordered(fn, range(500))
    count = len(started)
    assert count < 500
    time.sleep(0.02)
    assert len(started) == count, "no item may start after the call has returned"


def blas_threads():
    return [info["num_threads"] for info in threadpool_info() if info["user_api"] == "blas"]


def test_blas_runs_single_threaded_inside_and_is_restored(pool):
    before, inside = blas_threads(), []
    pool.map_ordered(lambda item: inside.extend(blas_threads()), range(4))
    assert set(inside) <= {1}
    assert blas_threads() == before
    with pytest.raises(ZeroDivisionError):
        pool.map_ordered(lambda item: 1 // 0, range(4))
    assert blas_threads() == before


def test_a_nested_call_runs_inline():
    with WorkerPool(2) as pool:
        seen = []

        def outer(item):
            inner = []
            pool.map_ordered(lambda i: i * item, range(3), lambda i, result: inner.append(result))
            return inner

        pool.map_ordered(outer, range(4), lambda item, result: seen.append(result))
        assert seen == [[0, item, 2 * item] for item in range(4)]


def test_callers_on_several_threads_take_turns():
    with WorkerPool(2) as pool:
        totals = [0] * 4

        def call(slot):
            def add(item, result):
                totals[slot] += result

            pool.map_ordered(lambda item: item, range(100), add)

        callers = [threading.Thread(target=call, args=(slot,)) for slot in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert totals == [4950] * 4


def test_threads_end_with_close_and_with_the_pools_life():
    before = len(worker_threads())
    pool = WorkerPool(3)
    assert len(worker_threads()) == before, "threads start with the first run"
    pool.map_ordered(lambda item: item, range(10))
    assert len(worker_threads()) == before + 3
    pool.close()
    pool.close()
    assert len(worker_threads()) == before
    with pytest.raises(RuntimeError, match="closed"):
        pool.map_ordered(lambda item: item, [1])

    forgotten = WorkerPool(3)
    forgotten.map_ordered(lambda item: item, range(10))
    del forgotten
    gc.collect()
    assert len(worker_threads()) == before


def test_scratch_is_aligned_reused_and_per_thread():
    with WorkerPool(2) as pool:
        first = pool.scratch(1000)
        assert first.ctypes.data % 64 == 0
        assert first.shape == (1000,)
        assert pool.scratch(500).ctypes.data == first.ctypes.data
        addresses = []
        barrier = threading.Barrier(2)

        def fn(item):
            barrier.wait()
            addresses.append(pool.scratch(1000).ctypes.data)

        pool.map_ordered(fn, range(2))
        assert len({*addresses, first.ctypes.data}) == 3


def test_rejects_zero_threads():
    with pytest.raises(ValueError, match="at least one"):
        WorkerPool(0)


def test_blas_results_do_not_depend_on_the_thread_count():
    a = np.random.default_rng(0).standard_normal((64, 300)).astype(np.float32)
    results = []
    for threads in (1, 3):
        with WorkerPool(threads) as pool:
            out = []
            pool.map_ordered(lambda item: a @ a.T, range(3), lambda item, y, out=out: out.append(y))
            results.append(out)
    assert all(np.array_equal(x, y) for x, y in zip(*results, strict=True))
