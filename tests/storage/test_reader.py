"""The reader: the same bytes as a slow read, every failure told apart, nothing left behind."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from mlx_stream.errors import (
    EndOfFileError,
    FileChangedError,
    ReadCancelled,
    ReadError,
)
from mlx_stream.storage import read_op, read_workers, reader
from mlx_stream.storage.read_plan import ReadOp, plan_group
from mlx_stream.storage.reader import Reader

from .builders import FAST, aligned_buffer, plain_checkpoint, slow_read
from .layouts import FILE_NBYTES, layouts

BLOCK = 4096
SIZE = 8 * BLOCK + 100  # of each test file
IO = pytest.mark.parametrize("io", ["direct", "buffered"])


DESCRIPTORS = Path("/proc/self/fd")


def resources(folder: Path) -> tuple[set[str], list[str]]:
    """Our threads, and the open files below a folder: what other tests held may close meanwhile."""
    threads = {t.name for t in threading.enumerate() if t.name.startswith("mlx-stream")}
    opened = []
    for fd in DESCRIPTORS.iterdir() if DESCRIPTORS.is_dir() else ():
        with suppress(OSError):  # the listing's own
            opened.append(os.readlink(fd))
    return threads, [path for path in opened if path.startswith(str(folder))]


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path):
    before = resources(tmp_path)
    yield
    assert resources(tmp_path) == before


@pytest.mark.skipif(not DESCRIPTORS.is_dir(), reason="descriptors have no names here")
def test_the_check_sees_an_open_file(tmp_path):
    with open(tmp_path / "file", "w"):
        assert resources(tmp_path) == (set(), [str(tmp_path / "file")])


@pytest.fixture(autouse=True)
def every_op_alone(monkeypatch):
    """So that small files give several threads work; runs have tests of their own."""
    monkeypatch.setattr(read_workers, "RUN_NBYTES", 0)


@pytest.fixture
def checkpoint(tmp_path):
    return plain_checkpoint(tmp_path / "m", [SIZE, SIZE])


def block_op(n: int, *, file: int = 0, blocks: int = 1) -> ReadOp:
    """Blocks n.. of a file into the same place of the slot."""
    return ReadOp(file, n * BLOCK, ((n * BLOCK, blocks * BLOCK),))


def wait_for(condition, seconds=10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def content(checkpoint, file=0) -> bytes:
    return checkpoint.files[file].path.read_bytes()


class Gate:
    """A fault hook that holds reads until it is opened."""

    def __init__(self):
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()

    def __call__(self, file, offset, nbytes):
        self.entered.release()
        assert self.open.wait(10)


# --- the right bytes ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def random_files(tmp_path_factory):
    checkpoint = plain_checkpoint(tmp_path_factory.mktemp("files"), [FILE_NBYTES, FILE_NBYTES])
    return checkpoint, [content(checkpoint, n) for n in range(2)]


@pytest.mark.parametrize("threads", [1, 4])
@IO
def test_random_plans_bring_the_bytes_of_a_slow_read(random_files, io, threads):
    checkpoint, contents = random_files
    slots = aligned_buffer(1 << 20)
    with Reader(checkpoint, io=io, threads=threads) as r:

        @FAST
        @given(layouts())
        def check(layout):
            layer, experts, align, limit = layout
            plan = plan_group(
                layer,
                experts,
                align=max(align, r.align),
                max_op_nbytes=limit,
                file_sizes=[FILE_NBYTES] * 2,
            )
            slot = slots[: plan.slot_nbytes]
            slot[:] = 0xA5
            before = r.counters
            r.submit(plan.ops, slot).wait()
            after = r.counters
            assert after.bytes - before.bytes == plan.read_nbytes
            assert after.calls - before.calls == len(plan.ops)
            assert after.retries == 0
            for plane, t in zip(plan.planes, layer.tensors, strict=True):
                for e, o in zip(experts, plane.offsets, strict=True):
                    begin = t.offset + e * t.stride
                    assert slot[o : o + t.nbytes].tobytes() == contents[t.file][begin:][: t.nbytes]

        check()
        assert r.counters.busy_seconds > 0


def test_bytes_outside_the_parts_are_not_touched(checkpoint):
    buffer = np.full(100, 7, np.uint8)
    with Reader(checkpoint, io="buffered") as r:
        r.submit([ReadOp(1, 33, ((10, 5), (50, 1), (20, 7)))], buffer).wait()
    expected = np.full(100, 7, np.uint8)
    data = slow_read(checkpoint.files[1].path, 33, 13)
    for begin, end, part in ((10, 15, data[:5]), (50, 51, data[5:6]), (20, 27, data[6:])):
        expected[begin:end] = np.frombuffer(part, np.uint8)
    assert buffer.tobytes() == expected.tobytes()


@IO
def test_last_block_of_a_file(checkpoint, io):
    buffer = aligned_buffer(9 * BLOCK)
    with Reader(checkpoint, io=io) as r:
        r.submit([block_op(8)], buffer).wait()
        assert (r.counters.bytes, r.counters.calls) == (100, 1)
    assert buffer[8 * BLOCK : SIZE].tobytes() == content(checkpoint)[8 * BLOCK :]


def test_empty_ticket_is_done(checkpoint):
    with Reader(checkpoint) as r:
        ticket = r.submit([], aligned_buffer(BLOCK))
        assert ticket.done()
        ticket.wait()
        ticket.cancel()
        ticket.wait()


def test_first_submitted_first_served(checkpoint):
    order = []
    with Reader(checkpoint, threads=1, fault=lambda *call: order.append(call[1])) as r:
        buffer = aligned_buffer(SIZE + BLOCK)
        tickets = [r.submit([block_op(n), block_op(n + 1)], buffer) for n in (4, 0, 6, 2)]
        for ticket in tickets:
            ticket.wait(10)
    assert order == [n * BLOCK for n in (4, 5, 0, 1, 6, 7, 2, 3)]


# --- short reads ----------------------------------------------------------------------------


def cut_reads(monkeypatch, most: int, align: int = 1) -> None:
    """Every preadv returns at most `most` bytes; what lies behind them is garbage."""
    real = os.preadv

    def short(fd, buffers, offset):
        if offset % align:
            raise OSError(errno.EINVAL, "Invalid argument")
        got = real(fd, buffers, offset)
        keep = min(got, most)
        at = 0
        for b in buffers:
            for i in range(max(keep - at, 0), len(b)):
                b[i] = 0xEE
            at += len(b)
        return keep

    monkeypatch.setattr(read_op.os, "preadv", short)


@pytest.mark.parametrize("most", [1, 7, 4095, 5000])
def test_short_reads_are_continued(checkpoint, monkeypatch, most):
    blocks = 1 if most < 100 else 4
    op = ReadOp(0, 5, ((0, 100), (200, 1), (300, blocks * 1000)))
    buffer = np.zeros(6000, np.uint8)
    with Reader(checkpoint, io="buffered") as r:
        cut_reads(monkeypatch, most)
        r.submit([op], buffer).wait()
        calls = -(-op.nbytes // most)
        assert (r.counters.bytes, r.counters.calls) == (op.nbytes, calls)
        assert r.counters.retries == calls - 1
    got = b"".join(buffer[o : o + n].tobytes() for o, n in op.parts)
    assert got == content(checkpoint)[5 : 5 + op.nbytes]


@pytest.mark.parametrize("most", [512, 700, 4096, 5000])
def test_short_reads_are_continued_at_aligned_places(checkpoint, monkeypatch, most):
    """O_DIRECT cannot go on in the middle of a block: that block is read again."""
    buffer = aligned_buffer(9 * BLOCK)
    with Reader(checkpoint, io="buffered") as r:
        r._workers.align = 512  # as if O_DIRECT
        cut_reads(monkeypatch, most, align=512)
        r.submit([block_op(0, blocks=9)], buffer).wait()
        assert r.counters.bytes >= SIZE
    assert buffer[:SIZE].tobytes() == content(checkpoint)


def test_reads_that_never_progress_end(checkpoint, monkeypatch):
    with Reader(checkpoint) as r:
        monkeypatch.setattr(read_op.os, "preadv", lambda *a: 0)
        with pytest.raises(ReadError, match="return no data") as caught:
            r.submit([block_op(0)], aligned_buffer(BLOCK)).wait(10)
        assert not isinstance(caught.value, EndOfFileError)
        assert r.counters.calls == read_op.MAX_STALLS


# --- failures -------------------------------------------------------------------------------


@IO
def test_eio_fails_its_ticket_only(checkpoint, io):
    def fault(file, offset, nbytes):
        calls.append((file, offset))
        if file == 1:
            raise OSError(errno.EIO, "Input/output error")

    calls: list = []
    buffer, other = aligned_buffer(SIZE + BLOCK), aligned_buffer(SIZE + BLOCK)
    with Reader(checkpoint, io=io, threads=1, fault=fault) as r:
        bad = r.submit([block_op(n, file=n == 1) for n in range(8)], buffer)
        good = r.submit([block_op(3)], other)
        with pytest.raises(ReadError, match="Input/output error") as caught:
            bad.wait(10)
        good.wait(10)
        with pytest.raises(ReadError):  # it stays failed
            bad.wait()
        bad.cancel()
        assert r.counters.calls == 2
    assert calls == [(0, 0), (1, BLOCK), (0, 3 * BLOCK)]  # the rest was dropped
    error = caught.value
    assert error.file == str(checkpoint.files[1].path)
    assert f"offset {BLOCK}" in error.actual
    assert "disk" in error.remedy
    assert isinstance(error.__cause__, OSError)
    assert other[3 * BLOCK : 4 * BLOCK].tobytes() == content(checkpoint)[3 * BLOCK : 4 * BLOCK]


def test_eio_from_the_system(checkpoint, monkeypatch):
    def fail(*args):
        raise OSError(errno.EIO, "Input/output error")

    with Reader(checkpoint) as r:
        monkeypatch.setattr(read_op.os, "preadv", fail)
        with pytest.raises(ReadError, match="Input/output"):
            r.submit([block_op(0)], aligned_buffer(BLOCK)).wait(10)
        assert r.counters.calls == 0


def test_a_broken_hook_does_not_kill_a_thread(checkpoint):
    def fault(*call):
        raise ZeroDivisionError("bug in a test")

    with Reader(checkpoint, threads=1, fault=fault) as r:
        for _ in range(3):
            with pytest.raises(ReadError, match="bug in a test"):
                r.submit([block_op(0)], aligned_buffer(BLOCK)).wait(10)


@IO
@pytest.mark.parametrize("left", [0, BLOCK, 2 * BLOCK + 10])
def test_file_truncated_under_us(checkpoint, io, left):
    path = checkpoint.files[0].path
    with Reader(checkpoint, io=io) as r:
        os.truncate(path, left)
        with pytest.raises(EndOfFileError) as caught:
            r.submit([block_op(1, blocks=3)], aligned_buffer(4 * BLOCK)).wait(10)
        assert caught.value.file == str(path)
        assert str(SIZE) in caught.value.expected
        assert f"{left} bytes now" in caught.value.actual
        assert f"offset {BLOCK}" in caught.value.actual


def test_a_failed_ticket_does_not_keep_its_buffer(checkpoint):
    def fault(*call):
        raise OSError(errno.EIO, "Input/output error")

    with Reader(checkpoint, fault=fault) as r:
        buffer = aligned_buffer(BLOCK)
        alive = weakref.ref(buffer)
        ticket = r.submit([block_op(0)], buffer)
        while not ticket.done():
            time.sleep(0.001)
        del buffer
        gc.collect()
        assert alive() is None
        with pytest.raises(ReadError):
            ticket.wait()


def test_a_done_ticket_does_not_keep_its_buffer(checkpoint):
    with Reader(checkpoint) as r:
        buffer = aligned_buffer(BLOCK)
        alive = weakref.ref(buffer)
        ticket = r.submit([block_op(0)], buffer)
        ticket.wait(10)
        del buffer
        assert alive() is None
        assert ticket.done()


# --- files that change ----------------------------------------------------------------------


def replace_file(path):
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes())
    os.replace(other, path)


CHANGES = {
    "replaced": replace_file,
    "appended": lambda p: p.write_bytes(p.read_bytes() + b"x"),
    "touched": lambda p: os.utime(p, ns=(1, 1)),
    "truncated": lambda p: os.truncate(p, 5),
    "removed": lambda p: p.unlink(),
}


@IO
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_changed_between_header_and_open(checkpoint, change, io):
    change(checkpoint.files[1].path)
    with pytest.raises(FileChangedError) as caught:
        Reader(checkpoint, io=io)
    assert caught.value.file == str(checkpoint.files[1].path)
    assert "load the model again" in caught.value.remedy


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_changed_after_open(checkpoint, change):
    with Reader(checkpoint) as r:
        r.check_unchanged()
        change(checkpoint.files[1].path)
        with pytest.raises(FileChangedError) as caught:
            r.check_unchanged()
        assert caught.value.file == str(checkpoint.files[1].path)


def test_unreadable_file(checkpoint, monkeypatch):
    def refuse(path, *args):
        if str(path) == str(checkpoint.files[1].path):
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, *args)

    real = os.open
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ReadError, match="Too many open files") as caught:
        Reader(checkpoint)
    assert "ulimit" in caught.value.remedy


# --- runs of small ops ----------------------------------------------------------------------


def test_small_ops_are_read_by_one_thread_and_large_ones_are_shared(checkpoint, monkeypatch):
    monkeypatch.setattr(read_workers, "RUN_NBYTES", 3 * BLOCK)
    seen, lock = [], threading.Lock()

    def note(file, offset, nbytes):
        with lock:
            seen.append((threading.current_thread().name, offset // BLOCK))

    buffer = aligned_buffer(SIZE + BLOCK)
    with Reader(checkpoint, threads=3, fault=note) as r:
        r.submit([block_op(n) for n in range(8)], buffer).wait(10)
        assert r.counters.calls == 8
    by_thread = {}
    for thread, block in seen:
        by_thread.setdefault(thread, []).append(block)
    runs = [[0, 1, 2], [3, 4, 5], [6, 7]]
    for blocks in by_thread.values():
        assert any(blocks[: len(run)] == run for run in runs), "runs start at a run's first op"
    assert sorted(block for _, block in seen) == list(range(8))


def test_a_run_ends_at_its_first_failure(checkpoint, monkeypatch):
    monkeypatch.setattr(read_workers, "RUN_NBYTES", 1 << 20)
    seen = []

    def fail(file, offset, nbytes):
        seen.append(offset // BLOCK)
        if offset == 2 * BLOCK:
            raise OSError(errno.EIO, "no")

    with Reader(checkpoint, threads=2, fault=fail) as r:
        ticket = r.submit([block_op(n) for n in range(8)], aligned_buffer(SIZE + BLOCK))
        with pytest.raises(ReadError, match="offset 8192"):
            ticket.wait(10)
        r.submit([block_op(0)], aligned_buffer(BLOCK)).wait(10)
    assert seen == [0, 1, 2, 0]


# --- cancel and close -----------------------------------------------------------------------


def test_cancel_in_the_middle(checkpoint):
    gate, buffer = Gate(), aligned_buffer(SIZE + BLOCK)
    with Reader(checkpoint, threads=2, fault=gate) as r:
        ticket = r.submit([block_op(n) for n in range(8)], buffer)
        other = r.submit([block_op(0)], aligned_buffer(BLOCK))
        gate.entered.acquire()
        gate.entered.acquire()
        ticket.cancel()
        with pytest.raises(TimeoutError):  # two reads still write to the buffer
            ticket.wait(0.05)
        assert not ticket.done()
        gate.open.set()
        with pytest.raises(ReadCancelled):
            ticket.wait(10)
        assert ticket.done()
        other.wait(10)
        assert r.counters.calls == 3
    assert (buffer[2 * BLOCK :] == 0xA5).all()


def test_cancel_before_the_start(checkpoint):
    gate = Gate()
    with Reader(checkpoint, threads=1, fault=gate) as r:
        first = r.submit([block_op(0)], aligned_buffer(BLOCK))
        gate.entered.acquire()
        second = r.submit([block_op(0)], aligned_buffer(BLOCK))
        second.cancel()
        with pytest.raises(ReadCancelled):
            second.wait(1)
        gate.open.set()
        first.wait(10)
        first.cancel()  # too late: no effect
        first.wait()
        assert r.counters.calls == 1


def test_close_while_reading(checkpoint):
    gate = Gate()
    r = Reader(checkpoint, threads=2, fault=gate)
    tickets = [r.submit([block_op(n)], aligned_buffer(SIZE + BLOCK)) for n in range(6)]
    gate.entered.acquire()
    gate.entered.acquire()
    timer = threading.Timer(0.1, gate.open.set)
    timer.start()
    r.close()
    timer.join()
    for ticket in tickets[:2]:
        ticket.wait(1)  # they had begun, and ended well
    for ticket in tickets[2:]:
        with pytest.raises(ReadCancelled):
            ticket.wait(1)
    r.close()
    with pytest.raises(ReadCancelled):
        r.submit([block_op(0)], aligned_buffer(BLOCK))
    with pytest.raises(ReadCancelled):
        r.check_unchanged()


def test_close_does_not_wait_for_ever(checkpoint, monkeypatch):
    gate = Gate()
    r = Reader(checkpoint, threads=2, fault=gate)
    r.submit([block_op(0)], aligned_buffer(BLOCK))
    gate.entered.acquire()
    monkeypatch.setattr(reader, "CLOSE_TIMEOUT", 0.1)
    with pytest.raises(ReadError, match="does not return"):
        r.close()
    gate.open.set()
    monkeypatch.undo()
    r.close()  # the second try finds the thread ended


def test_cancel_and_close_from_everywhere(checkpoint):
    """Many tickets, cancelled and waited for by several threads while the reader closes."""
    r = Reader(checkpoint, threads=4)
    buffer = aligned_buffer(SIZE + BLOCK)

    def user(seed):
        rng = np.random.default_rng(seed)
        try:
            while True:
                ticket = r.submit([block_op(n) for n in range(8)], buffer)
                if rng.random() < 0.5:
                    ticket.cancel()
                ticket.wait(10)
        except ReadCancelled:
            if not r._workers.closed:
                return user(seed + 10)

    users = [threading.Thread(target=user, args=(n,)) for n in range(3)]
    for u in users:
        u.start()
    time.sleep(0.2)
    r.close()
    for u in users:
        u.join(10)
        assert not u.is_alive()


def test_ctrl_c_interrupts_wait(checkpoint):
    gate = Gate()
    with Reader(checkpoint, fault=gate) as r:
        ticket = r.submit([block_op(0)], aligned_buffer(BLOCK))
        timer = threading.Timer(0.1, lambda: signal.raise_signal(signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            ticket.wait()
        timer.join()
        assert not ticket.done()
        gate.open.set()
        ticket.wait(10)


def test_wait_is_woken_and_does_not_poll(checkpoint, monkeypatch):
    monkeypatch.setattr("mlx_stream.storage.ticket.POLL", 60)
    gate = Gate()
    with Reader(checkpoint, fault=gate) as r:
        ticket = r.submit([block_op(0)], aligned_buffer(BLOCK))
        timer = threading.Timer(0.1, gate.open.set)
        timer.start()
        began = time.monotonic()
        ticket.wait()
        timer.join()
    assert time.monotonic() - began < 20


def test_threads_have_names_and_die_with_the_process(checkpoint):
    with Reader(checkpoint, threads=3) as r:
        names = {t.name for t in threading.enumerate() if t.daemon and "mlx-stream" in t.name}
        assert names == {f"mlx-stream-reader-{n}" for n in range(3)}
        assert r.counters == reader.ReadCounters(0, 0, 0, 0.0)


# --- dropped without close ------------------------------------------------------------------


def test_a_dropped_reader_ends_its_threads_and_closes_its_files(checkpoint):
    before = resources(checkpoint.path)
    r = Reader(checkpoint, threads=3)
    r.submit([block_op(0)], aligned_buffer(BLOCK)).wait(10)
    assert resources(checkpoint.path) != before
    del r
    wait_for(lambda: resources(checkpoint.path) == before)


def test_a_reader_in_a_cycle_is_collected(checkpoint):
    before = resources(checkpoint.path)
    r = Reader(checkpoint)
    r.itself = r
    del r
    gc.collect()
    wait_for(lambda: resources(checkpoint.path) == before)


def test_a_reader_dropped_while_it_reads(checkpoint):
    """What runs ends well, what is queued is cancelled; nobody waits for ever."""
    before, gate = resources(checkpoint.path), Gate()
    r = Reader(checkpoint, threads=1, fault=gate)
    first = r.submit([block_op(0)], aligned_buffer(BLOCK))
    queued = r.submit([block_op(n) for n in range(4)], aligned_buffer(4 * BLOCK))
    gate.entered.acquire()
    del r
    gate.open.set()
    first.wait(10)
    with pytest.raises(ReadCancelled):
        queued.wait(10)
    wait_for(lambda: resources(checkpoint.path) == before)


def test_a_reader_may_be_collected_inside_its_own_lock(checkpoint):
    """A collection begins anywhere: the finalizer must take no lock."""
    before = resources(checkpoint.path)
    r = Reader(checkpoint)
    workers = r._workers
    with workers._lock:
        del r
        assert workers.closed
    wait_for(lambda: resources(checkpoint.path) == before)


@pytest.mark.parametrize("state", ["idle", "reading", "throttled"])
def test_the_interpreter_ends_with_an_open_reader(checkpoint, state):
    code = (
        "import sys, threading\n"
        "from tests.storage.test_reader import *\n"
        "from tests.storage.builders import *\n"
        "from mlx_stream.storage.throttle import Throttle\n"
        "from mlx_stream.storage.checkpoint import Checkpoint, FileIdentity\n"
        "path = Path(sys.argv[1])\n"
        "files = (FileIdentity.of(path, os.stat(path)),)\n"
        "entered = threading.Event()\n"
        "def fault(*op):\n"
        "    entered.set()\n"
        "    if sys.argv[2] == 'reading': threading.Event().wait()\n"
        "throttle = Throttle(1e3) if sys.argv[2] == 'throttled' else None\n"
        "r = Reader(Checkpoint(path.parent, {}, files, {}), fault=fault, throttle=throttle)\n"
        "ticket = r.submit([block_op(n) for n in range(8)], aligned_buffer(SIZE + BLOCK))\n"
        "entered.wait(10)\n"
        "if sys.argv[2] == 'idle': ticket.wait(10)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(checkpoint.files[0].path), state],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_no_thread_can_be_started(checkpoint, monkeypatch):
    started = []

    def start(thread):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        real(thread)

    real = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="new thread"):
        Reader(checkpoint, threads=2)


# --- callers' bugs --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "op",
    [
        ReadOp(2, 0, ((0, BLOCK),)),
        ReadOp(-1, 0, ((0, BLOCK),)),
        ReadOp(0, -BLOCK, ((0, BLOCK),)),
        ReadOp(0, 9 * BLOCK, ((0, BLOCK),)),
        ReadOp(0, 0, ()),
        ReadOp(0, 0, ((0, 0),)),
        ReadOp(0, 0, ((BLOCK, BLOCK),)),
        ReadOp(0, 0, ((-BLOCK, BLOCK),)),
    ],
)
def test_ops_that_do_not_fit(checkpoint, op):
    with Reader(checkpoint) as r, pytest.raises(ValueError, match="ReadOp"):
        r.submit([op], aligned_buffer(BLOCK))


def test_buffers_that_do_not_fit(checkpoint):
    frozen = aligned_buffer(BLOCK)
    frozen.flags.writeable = False
    bad = [frozen, aligned_buffer(2 * BLOCK)[::2], np.zeros((1, BLOCK), np.uint8)]
    with Reader(checkpoint) as r:
        for buffer in [*bad, np.zeros(BLOCK, np.int8)]:
            with pytest.raises(ValueError, match="buffer"):
                r.submit([block_op(0)], buffer)


def test_unaligned_reads_are_refused_before_they_fail(checkpoint):
    with Reader(checkpoint) as r:
        if r.align == 1:
            pytest.skip("no O_DIRECT here")
        buffer = aligned_buffer(2 * BLOCK)
        for op, target in (
            (ReadOp(0, 1, ((0, BLOCK),)), buffer),
            (ReadOp(0, 0, ((0, 100),)), buffer),
            (ReadOp(0, 0, ((8, BLOCK),)), buffer),
            (ReadOp(0, 0, ((0, BLOCK),)), buffer[16:]),
        ):
            with pytest.raises(ValueError, match="aligned"):
                r.submit([op], target)


@pytest.mark.parametrize("arguments", [{"threads": 0}, {"io": "mmap"}])
def test_bad_arguments(checkpoint, arguments):
    with pytest.raises(ValueError, match="not valid"):
        Reader(checkpoint, **arguments)


# --- reads that can wait --------------------------------------------------------------------------


def test_what_is_submitted_behind_waits_for_all_others(checkpoint):
    gate, order = Gate(), []
    buffer = aligned_buffer(8 * BLOCK)

    def fault(file, offset, nbytes):
        order.append(offset // BLOCK)
        gate(file, offset, nbytes)

    with Reader(checkpoint, threads=1, fault=fault) as r:
        first = r.submit([block_op(0)], buffer)
        assert gate.entered.acquire(timeout=10)
        with r.behind():
            later = [r.submit([block_op(n)], buffer) for n in (1, 2)]
        urgent = [r.submit([block_op(n)], buffer) for n in (3, 4)]
        with pytest.raises(RuntimeError), r.behind():  # it ends when the block does
            raise RuntimeError
        urgent.append(r.submit([block_op(5)], buffer))
        gate.open.set()
        for ticket in (first, *later, *urgent):
            ticket.wait(10)
    assert order == [0, 3, 4, 5, 1, 2]
    assert bytes(buffer[: 6 * BLOCK]) == content(checkpoint)[: 6 * BLOCK]


def test_closing_drops_what_waits_behind(checkpoint):
    gate, buffer = Gate(), aligned_buffer(8 * BLOCK)
    r = Reader(checkpoint, threads=1, fault=gate)
    running = r.submit([block_op(0)], buffer)
    assert gate.entered.acquire(timeout=10)
    with r.behind():
        waiting = r.submit([block_op(1)], buffer)
    closing = threading.Thread(target=r.close)
    closing.start()
    with pytest.raises(ReadCancelled):
        waiting.wait(10)
    gate.open.set()
    closing.join(10)
    running.wait(1)
