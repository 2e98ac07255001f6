"""The arms do what they say: counted bytes, one pass or many, and the parts alone."""

import csv
import json
import math

import pytest

from mlx_stream.bench import report
from mlx_stream.bench.arms import (
    CHUNK_MAJOR,
    COMPUTE_ONLY,
    DECODE,
    LAYER_MAJOR,
    READ_ONLY,
    STOCK,
    Arm,
    Setting,
)
from mlx_stream.bench.results import collect
from mlx_stream.bench.runner import open_runner

SETTING = Setting(1 << 30, backend="cpu")
TOKENS, CHUNK = 700, 128  # above the length up to which only routed experts are read


@pytest.fixture(scope="module")
def results(checkpoint):
    path = checkpoint("qwen3_moe")
    arms = [
        Arm(order, TOKENS, CHUNK, SETTING, 6 if order == DECODE else 0)
        for order in (LAYER_MAJOR, CHUNK_MAJOR, STOCK, READ_ONLY, COMPUTE_ONLY, DECODE)
    ]
    prompt = [n * 7 % 97 for n in range(TOKENS)]
    told = []
    with open_runner(path, prompt, lambda engine, arm: 1.5) as runner:
        runs = list(runner.run(arms, 2, lambda *args: told.append(args)))
        timeline = runner.timeline(arms[0])
    assert [done for done, _, _ in told] == list(range(12))
    return {r.arm.order: r for r in collect(runs)}, timeline


def test_layer_major_reads_once_and_chunk_major_once_a_chunk(results):
    found, _ = results
    assert found[LAYER_MAJOR].passes == pytest.approx(1.0, abs=0.05)
    chunks = math.ceil(TOKENS / CHUNK)
    assert found[CHUNK_MAJOR].passes == pytest.approx(chunks, rel=0.05)
    assert found[CHUNK_MAJOR].first.bytes_read == chunks * found[LAYER_MAJOR].first.bytes_read


def test_the_halves(results):
    found, _ = results
    assert found[READ_ONLY].first.bytes_read == found[LAYER_MAJOR].first.bytes_read
    assert found[COMPUTE_ONLY].first.bytes_read == 0
    assert found[STOCK].first.bytes_read == 0
    assert found[DECODE].arm.new_tokens == 6
    assert 0 <= found[DECODE].first.hit_rate <= 1


def test_every_arm_ran_every_round(results):
    found, _ = results
    assert {len(r.runs) for r in found.values()} == {2}
    for result in found.values():
        low, high = result.spread
        assert 0 < low <= result.median <= high
    assert found[LAYER_MAJOR].first.forecast_seconds == 1.5
    assert found[CHUNK_MAJOR].first.forecast_seconds is None


def test_reports(results, tmp_path):
    found, _ = results
    rows = list(found.values())
    target = tmp_path / "bench.csv"
    report.append_csv(target, rows, "m")
    report.append_csv(target, rows, "m")
    with target.open(newline="") as file:
        read = list(csv.DictReader(file))
    assert len(read) == 2 * len(rows)
    assert {row["order"] for row in read} == set(found)
    line = json.loads(report.as_json(rows, "m"))
    assert line["results"][0]["bytes_read"] == rows[0].first.bytes_read
    assert len(report.table(rows).rows) == len(rows)
    said = " ".join(report.findings(rows))
    assert f"reads the experts {found[CHUNK_MAJOR].passes:.1f} times" in said


def test_plots(results, tmp_path):
    pytest.importorskip("matplotlib")
    from mlx_stream.bench.plots import write_plots

    found, timeline = results
    files = write_plots(tmp_path / "plots", list(found.values()), timeline, "title")
    assert {f.name for f in files} == {"speed.png", "bytes.png", "timeline.png"}
    for file in files:
        assert file.read_bytes().startswith(b"\x89PNG")
