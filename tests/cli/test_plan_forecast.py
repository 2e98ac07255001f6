"""The plan command with a machine profile: forecasts, ranges, and what does not fit."""

import json
import subprocess
import sys

import pytest

from mlx_stream.planner.machine_profile import (
    COPY,
    ELEMENTWISE,
    ComputeRate,
    MachineProfile,
    attention_format,
)
from mlx_stream.storage.read_probe import ReadRate


def rates(bandwidth):
    for order in ("sequential", "random"):
        for n in (1 << 14, 1 << 20, 1 << 23):
            each = n / bandwidth
            yield ReadRate(order, n, 4, bandwidth, each, each, 1 / each, "O_DIRECT")


def computes(flops):
    formats = [
        ("experts", "affine 4-bit"),
        ("linear", "affine 4-bit"),
        ("attention", attention_format(2, 64)),
        ("attention", attention_format(1, 64)),
        ("overhead", ELEMENTWISE),
        ("overhead", COPY),
    ]
    for kind, form in formats:
        for rows in (1, 64, 512):
            yield ComputeRate(kind, form, rows, (2048, 768), flops)


@pytest.fixture
def profile(tmp_path):
    """``profile(bytes a second, FLOP/s) -> file``."""

    def make(bandwidth, flops):
        made = MachineProfile(
            1,
            "test",
            "cpu",
            "O_DIRECT",
            "2026-01-01T00:00:00",
            tuple(rates(bandwidth)),
            tuple(computes(flops)),
        )
        path = tmp_path / f"{bandwidth:.0f}-{flops:.0f}.json"
        made.save(path)
        return path

    return make


def plan(*args):
    return subprocess.run(
        [sys.executable, "-m", "mlx_stream", "plan", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=120,
    )


def objects(run):
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_one_object_a_prompt_length(profile):
    found = objects(plan("-n", "600,5000", "--profile", profile(1e9, 1e11), "--json"))
    assert [f["prompt_tokens"] for f in found] == [600, 5000]
    for one in found:
        low, high = one["ttft_range_seconds"]
        assert 0 < low < one["ttft_seconds"] < high
        assert one["fits"]
        assert sum(one["memory_bytes"].values()) <= one["budget_bytes"]
        longer = max(one["read_seconds"], one["compute_seconds"])
        assert longer <= one["ttft_seconds"] * 1.001
        assert one["ttft_seconds"] <= one["read_seconds"] + one["compute_seconds"] * 1.5
    assert found[0]["ttft_seconds"] < found[1]["ttft_seconds"]


def test_a_slow_disk_makes_it_read_bound(profile):
    (fast,) = objects(plan("-n", 2000, "--profile", profile(1e10, 1e10), "--json"))
    (slow,) = objects(plan("-n", 2000, "--profile", profile(1e5, 1e12), "--json"))
    assert (fast["bound"], slow["bound"]) == ("compute", "read")
    assert slow["ttft_seconds"] == pytest.approx(slow["read_bytes"] / 1e5, rel=0.1)


def test_text_says_it_all(profile):
    run = plan("-n", "2000", "--profile", profile(1e9, 1e11))
    assert run.returncode == 0, run.stderr
    for word in ("first token after about", "tok/s", "-bound", "resident", "staging", "decode:"):
        assert word in run.stdout


def test_a_table_for_several_lengths_and_a_warning_for_what_does_not_fit(profile):
    run = plan("-n", "600,9000000", "--profile", profile(1e9, 1e11), "--memory-budget", "300MB")
    assert run.returncode == 0, run.stderr
    assert "does not fit" in run.stdout
    assert "the longest prompt that fits is about" in run.stdout
    (_, large) = objects(
        plan(
            "-n",
            "600,9000000",
            "--memory-budget",
            "300MB",
            "--json",
            "--profile",
            profile(1e9, 1e11),
        )
    )
    assert not large["fits"]
    assert large["ttft_seconds"] is None
    assert 600 < large["largest_prompt_tokens"] < 9000000


def test_nothing_fits():
    run = plan("-n", "600", "--memory-budget", "1MB")
    assert run.returncode == 1
    assert "does not fit" in run.stderr
    assert "Traceback" not in run.stderr


def test_without_a_profile_it_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run = plan("-n", "600")
    assert run.returncode == 0, run.stderr
    assert "mlx_stream probe" in run.stdout
    (one,) = objects(plan("-n", "600", "--json"))
    assert one["fits"]
    assert one["ttft_seconds"] is None


@pytest.mark.parametrize("lengths", ["many", "0", "", "3,-1"])
def test_bad_lengths(lengths):
    run = plan("-n", lengths)
    assert run.returncode == 2
    assert "--prompt-tokens takes numbers" in run.stderr
