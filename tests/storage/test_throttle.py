"""The throttle: never faster than asked, latencies overlap, and it lets go when told to."""

from __future__ import annotations

import itertools
import threading
import time

import pytest

from mlx_stream.config import ConfigError, StreamConfig, parse_throttle
from mlx_stream.errors import ReadCancelled
from mlx_stream.storage.read_plan import ReadOp
from mlx_stream.storage.reader import Reader
from mlx_stream.storage.throttle import Throttle

from .builders import aligned_buffer, plain_checkpoint

BLOCK = 4096
BLOCKS = 32


@pytest.fixture
def checkpoint(tmp_path):
    return plain_checkpoint(tmp_path / "m", [BLOCKS * BLOCK])


def ops(count: int = BLOCKS) -> list[ReadOp]:
    return [ReadOp(0, n * BLOCK, ((n * BLOCK, BLOCK),)) for n in range(count)]


def timed_read(checkpoint, throttle: Throttle | None, *, threads: int, count: int = BLOCKS):
    """``(seconds, start of each read, io_mode, busy seconds)``."""
    buffer, starts = aligned_buffer(BLOCKS * BLOCK), []
    note = lambda *op: starts.append(time.monotonic())  # noqa: E731
    with Reader(checkpoint, threads=threads, fault=note, throttle=throttle) as r:
        began = time.monotonic()
        r.submit(ops(count), buffer).wait(60)
        seconds = time.monotonic() - began
        expected = checkpoint.files[0].path.read_bytes()[: count * BLOCK]
        assert buffer[: count * BLOCK].tobytes() == expected
        return seconds, sorted(starts), r.io_mode, r.counters.busy_seconds


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


# --- the schedule


def test_grants_queue_for_the_bandwidth_and_share_the_latency():
    clock = Clock()
    throttle = Throttle(1000, 0.5, clock=lambda: clock.now, sleep=clock.sleep)
    assert throttle.grant(100) == pytest.approx((100.0, 100.6))
    assert throttle.grant(200) == pytest.approx((100.1, 100.8))
    assert throttle.grant(100) == pytest.approx((100.3, 100.9))


def test_idle_time_is_not_saved_up():
    clock = Clock()
    throttle = Throttle(1000, clock=lambda: clock.now, sleep=clock.sleep)
    throttle.grant(100)
    clock.now += 50
    assert throttle.grant(500) == pytest.approx((150.0, 150.5))
    assert throttle.grant(500)[0] == pytest.approx(150.5)


def test_any_span_of_time_holds_at_most_its_share_and_one_read():
    clock = Clock()
    throttle = Throttle(1e6, 1e-3, clock=lambda: clock.now, sleep=clock.sleep)
    reads = []
    for n in range(200):
        nbytes = 1 + (n * 7919) % 5000
        reads.append((throttle.grant(nbytes)[0], nbytes))
        clock.now += (n % 7) * 1e-3
    for (i, (first, _)), (j, (last, _)) in itertools.combinations(enumerate(reads), 2):
        inside = sum(nbytes for _, nbytes in reads[i:j])  # the one that begins at `last` is extra
        assert inside <= (last - first) * 1e6 + 1e-3


def test_waiting_sleeps_in_slices_and_stops():
    clock = Clock()
    throttle = Throttle(1, clock=lambda: clock.now, sleep=clock.sleep)
    assert throttle.wait_until(100.05, lambda: False)
    assert clock.now == pytest.approx(100.05)
    assert max(clock.slept) <= 0.02
    assert throttle.wait_until(99, lambda: False)
    assert not throttle.wait_until(1e9, lambda: clock.now > 101)
    assert clock.now < 101.03
    assert not throttle.wait_until(0, lambda: True)


@pytest.mark.parametrize("rate", [0, -1, float("inf"), float("nan")])
def test_rates_that_are_none(rate):
    with pytest.raises(ValueError, match="no throttle"):
        Throttle(rate)


def test_latencies_that_are_none():
    for latency in (-1e-6, float("nan")):
        with pytest.raises(ValueError, match="no throttle"):
            Throttle(1, latency)


# --- in a reader


@pytest.mark.parametrize("threads", [1, 4])
def test_all_threads_together_keep_to_the_rate(checkpoint, threads):
    rate = BLOCKS * BLOCK / 0.4
    seconds, starts, _, busy = timed_read(checkpoint, Throttle(rate), threads=threads)
    assert 0.4 <= seconds < 4
    assert busy >= 0.39
    for count in (4, 8, 16, 31):  # no burst: the n-th read begins when n were due
        for first, last in zip(starts, starts[count:], strict=False):
            # What one thread oversleeps shortens the gap to the next read, never the sum.
            assert last - first > (count - 1) * BLOCK / rate - 0.15
        assert starts[count] - starts[0] > count * BLOCK / rate - 0.01


def test_latencies_overlap_across_threads(checkpoint):
    """8 reads of 50 ms: one after the other in one thread, together in eight."""
    alone, *_ = timed_read(checkpoint, Throttle(1e9, 0.05), threads=1, count=8)
    together, *_ = timed_read(checkpoint, Throttle(1e9, 0.05), threads=8, count=8)
    assert alone >= 0.4
    assert 0.05 <= together < 0.3


def test_io_mode_says_so(checkpoint):
    plain = timed_read(checkpoint, None, threads=1)[2]
    assert timed_read(checkpoint, Throttle(5e8), threads=1)[2] == (
        f"{plain}, throttled to 500.00 MB/s"
    )
    assert timed_read(checkpoint, Throttle(2e9, 1e-4), threads=1)[2] == (
        f"{plain}, throttled to 2.00 GB/s + 100 us"
    )


def test_close_and_cancel_do_not_wait_for_the_throttle(checkpoint):
    buffer = aligned_buffer(BLOCKS * BLOCK)
    r = Reader(checkpoint, threads=2, throttle=Throttle(1))  # a block an hour
    ticket, other = r.submit(ops(8), buffer), r.submit(ops(1), buffer)
    began = time.monotonic()
    threading.Timer(0.1, ticket.cancel).start()
    with pytest.raises(ReadCancelled):
        ticket.wait(30)
    assert not other.done()
    r.close()
    with pytest.raises(ReadCancelled):
        other.wait(1)
    assert time.monotonic() - began < 10


def test_a_latency_can_be_cancelled_too(checkpoint):
    with Reader(checkpoint, threads=2, throttle=Throttle(1e9, 3600)) as r:
        ticket = r.submit(ops(2), aligned_buffer(BLOCKS * BLOCK))
        ticket.cancel()
        with pytest.raises(ReadCancelled):
            ticket.wait(10)


# --- from text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2GB/s", (2e9, 0)),
        ("0.5GB/s:100us", (5e8, 1e-4)),
        (" 200 MiB/s : 1.5 ms ", (200 * 2**20, 1.5e-3)),
        ("1000/s:2s", (1000, 2)),
    ],
)
def test_parse(text, expected):
    assert parse_throttle(text) == pytest.approx(expected)
    throttle = Throttle.parse(text)
    assert (throttle.bytes_per_second, throttle.latency_seconds) == pytest.approx(expected)
    assert StreamConfig(throttle=text).throttle == text


@pytest.mark.parametrize("text", ["", "2GB", "2GB/m", "/s", "fast/s", "0/s", "1GB/s:", "1GB/s:9"])
def test_text_that_is_no_rate(text):
    for reject in (parse_throttle, Throttle.parse, lambda t: StreamConfig(throttle=t)):
        with pytest.raises(ConfigError, match="not a read rate"):
            reject(text)


def test_no_text_is_no_throttle():
    assert Throttle.parse(None) is None
