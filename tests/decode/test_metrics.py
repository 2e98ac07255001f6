"""Decode metrics: sums, ratios, percentiles are what their definitions say; memory is bounded."""

import json
import threading

import pytest

from mlx_stream.decode.metrics import DecodeMetrics, DecodeTotals, StepMetrics

FIRST = StepMetrics(
    path="exact",
    hits=6,
    misses=2,
    bytes_read=2000,
    read_calls=4,
    stall_seconds=0.1,
    syncs=5,
    wall_seconds=0.4,
)
SECOND = StepMetrics(
    path="staged",
    tokens=3,
    hits=8,
    misses=0,
    bytes_read=1000,
    read_calls=2,
    stall_seconds=0.05,
    syncs=1,
    predicted=10,
    predicted_used=6,
    routed_in_predicted=8,
    wasted_bytes=600,
    redone=1,
    cache_bytes=12_000_000,
    wall_seconds=0.1,
)


@pytest.fixture
def metrics():
    both = DecodeMetrics()
    both.add(FIRST)
    both.add(SECOND)
    return both


def test_totals_are_sums(metrics):
    assert metrics.totals == DecodeTotals(
        steps=2,
        tokens=4,
        hits=14,
        misses=2,
        bytes_read=3000,
        read_calls=6,
        stall_seconds=pytest.approx(0.15),
        syncs=6,
        predicted=10,
        predicted_used=6,
        routed_in_predicted=8,
        wasted_bytes=600,
        redone=1,
        wall_seconds=pytest.approx(0.5),
        paths={"exact": 1, "staged": 1},
    )
    assert metrics.last is SECOND
    assert metrics.history == (FIRST, SECOND)


def test_derived_values(metrics):
    t = metrics.totals
    assert t.hit_rate == pytest.approx(14 / 16)
    assert t.bytes_per_token == pytest.approx(750)
    assert t.tokens_per_second == pytest.approx(8)
    assert t.stall_share == pytest.approx(0.3)
    assert t.prediction_recall == pytest.approx(6 / 8)
    assert t.prediction_precision == pytest.approx(6 / 10)
    assert t.wasted_share == pytest.approx(0.2)
    assert t.syncs_per_token == pytest.approx(1.5)


def test_nothing_counted_is_no_division_by_zero():
    empty = DecodeMetrics()
    data = empty.as_dict()
    assert data["last"] is None
    assert data["paths"] == {}
    assert data["prerouter"] == "off"
    assert not any(v for k, v in data.items() if k not in ("last", "paths", "prerouter"))
    assert empty.summary() == "decode 0 tokens"
    assert "hit rate 0.0%" in empty.table()
    empty.add(StepMetrics("exact"))  # a clock too coarse for the step
    assert empty.totals.tokens_per_second == 0


def test_percentiles_are_nearest_rank():
    metrics = DecodeMetrics()
    assert metrics.wall_p50 == 0
    for n in reversed(range(1, 101)):
        metrics.add(StepMetrics("exact", wall_seconds=n))
    assert (metrics.wall_p50, metrics.wall_p99) == (50, 99)
    assert metrics.wall_percentile(100) == 100
    assert metrics.wall_percentile(0) == 1
    metrics.add(StepMetrics("exact", wall_seconds=1000))
    assert (metrics.wall_p50, metrics.wall_p99) == (51, 100)


def test_history_is_bounded_and_totals_are_not():
    metrics = DecodeMetrics(history=8)
    for n in range(100):
        metrics.add(StepMetrics("exact", hits=1, wall_seconds=float(n)))
    assert [s.wall_seconds for s in metrics.history] == list(range(92, 100))
    assert metrics.totals.hits == metrics.totals.tokens == 100
    assert metrics.as_dict()["history_steps"] == 8
    assert metrics.wall_p50 == 95


def test_as_dict_is_json_and_complete(metrics):
    data = json.loads(json.dumps(metrics.as_dict()))
    assert data == metrics.as_dict()
    for name in ("tokens", "hit_rate", "prediction_recall", "wall_p99", "syncs_per_token"):
        assert isinstance(data[name], int | float)
    assert data["last"]["path"] == "staged"


def test_summary_is_one_line(metrics):
    line = metrics.summary()
    assert "\n" not in line
    for part in ("4 tokens", "8.0 tok/s", "hits 88%", "750 B/token", "stall 30%", "predicted 75%"):
        assert part in line
    plain = DecodeMetrics()
    plain.add(FIRST)
    assert "predicted" not in plain.summary()


def test_table_is_plain_lines_in_two_columns(metrics):
    lines = metrics.table().splitlines()
    values = {line.partition("  ")[0]: line.partition("  ")[2].strip() for line in lines}
    assert values["tokens"] == "4"
    assert values["steps"] == "2 (exact 1, staged 1), 1 redone"
    assert values["step"] == "p50 100.00 ms, p99 400.00 ms"
    assert values["cache"] == "14 hits, 2 misses, hit rate 87.5%"
    assert values["cache size"] == "12.00 MB"
    assert values["recall"] == "75.0% of 8 routed"
    assert values["wasted"] == "600 B, 20.0% of the bytes"
    assert len({len(line) - len(line.partition("  ")[2].lstrip()) for line in lines}) == 1


def test_reading_while_another_thread_adds():
    metrics, stop, seen = DecodeMetrics(history=64), threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            data = metrics.as_dict()
            seen.append(data["steps"])
            assert data["hits"] == 2 * data["steps"]

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(2000):
        metrics.add(StepMetrics("exact", hits=2, wall_seconds=0.001))
    stop.set()
    reader.join(10)
    assert seen == sorted(seen)
