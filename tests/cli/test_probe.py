"""`mlx_stream probe`: measures, shows, saves; leaves no file behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import mlx.core as mx
import pytest

from mlx_stream import compute_probe
from mlx_stream.backends.select import select_backend
from mlx_stream.compute_probe import ProbeShapes, probe_compute
from mlx_stream.overlap_probe import overlap_cost
from mlx_stream.planner.forecast import forecast_for
from mlx_stream.planner.machine_profile import (
    COPY,
    ELEMENTWISE,
    MachineProfile,
    default_profile_path,
    load_default,
)
from mlx_stream.probe_arms import FLOATS, PACKED, BlockShape
from mlx_stream.storage import read_probe
from mlx_stream.storage.checkpoint import open_checkpoint
from mlx_stream.storage.expert_index import build_expert_index
from tests.cli.runner import COMMAND, assert_failed, environment

SMALL = ProbeShapes(
    blocks=(BlockShape(128, 4, 2, 32, experts=8, expert_hidden=64),),
    expert_formats=((*PACKED, mx.bfloat16), (*FLOATS, mx.float32)),
    rows=(1, 8),
    most_rows=16,
    chunk_rows=(1, 32),
    attention=((32, 1, 64), (32, 32, 64)),
)


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """Tiny shapes, a tiny scratch file, a cache folder of its own."""
    monkeypatch.setattr(compute_probe, "DEFAULT", SMALL)
    monkeypatch.setattr(read_probe, "SIZES", (16 << 10, 1 << 20))
    monkeypatch.setattr(read_probe, "DEPTHS", (1, 2))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "120")
    folder = tmp_path / "disk"
    folder.mkdir()
    return folder


ARGS = ("--scratch", "64MiB", "--seconds", "0.05", "--backend", "cpu")


def test_every_kind_is_measured():
    backend = select_backend("cpu")
    told = []
    try:
        rates = probe_compute(
            backend, seconds=0.01, shapes=SMALL, progress=lambda *at: told.append(at)
        )
    finally:
        backend.close()
    kinds = {(r.kind, r.format) for r in rates}
    assert kinds == {
        ("experts", "affine 4-bit g64"),
        ("experts", "32-bit floats"),
        ("linear", "affine 4-bit g64"),
        ("linear", "32-bit floats"),
        ("attention", "head 32"),
        ("attention", "token 32"),
        ("overhead", ELEMENTWISE),
        ("overhead", COPY),
    }
    assert len({(r.kind, r.format, r.rows, r.dims) for r in rates}) == len(rates)
    assert all(r.flops_per_second > 0 and r.spread >= 0 for r in rates)
    assert told[-1][0] == told[-1][1]
    assert {r.rows for r in rates if r.kind == "experts"} == {1, 8, 16}


def test_what_overlapping_costs():
    assert overlap_cost(1.0, 1.0) == 0
    assert overlap_cost(0.5, 0.5) == overlap_cost(1.0, 0.0) == 1
    assert overlap_cost(0.1, 0.1) == 1, "never worse than one after the other"
    assert overlap_cost(1.1, 1.0) == 0
    assert 0 < overlap_cost(0.9, 0.7) < overlap_cost(0.7, 0.7) < 1


def test_shows_tables_and_saves(invoke_cli, quick):
    result = invoke_cli("probe", "--folder", quick, *ARGS)
    assert result.returncode == 0, result.stderr
    for word in ("in flight", "16 KiB", "random", "experts", "elementwise", "kept in"):
        assert word in result.stdout
    assert list(quick.iterdir()) == []
    profile = load_default()
    assert profile is not None
    assert len(profile.reads) == 8
    assert profile.backend == "cpu"
    assert 0 <= profile.overlap_cost <= 1
    assert MachineProfile.load(default_profile_path()) == profile


def test_a_forecast_follows_from_it(invoke_cli, quick, bare, open_engine):
    assert invoke_cli("probe", "--folder", quick, *ARGS).returncode == 0
    checkpoint = open_checkpoint(bare)
    plan = open_engine(bare).plan(50)
    profile = load_default()
    found = forecast_for(build_expert_index(checkpoint), checkpoint.config, plan, profile)
    assert 0 < found.low < found.ttft_seconds < found.high


def test_json_is_the_profile_and_no_save_saves_nothing(invoke_cli, quick, tmp_path):
    result = invoke_cli("probe", "--folder", quick, "--json", "--no-save", *ARGS)
    assert result.returncode == 0, result.stderr
    (tmp_path / "p.json").write_text(result.stdout)
    assert json.loads(result.stdout)["reads"]
    assert len(MachineProfile.load(tmp_path / "p.json").computes) > 10
    assert load_default() is None


def test_read_only_writes_nothing(invoke_cli, quick):
    file = quick / "shard.safetensors"
    with file.open("wb") as out:
        out.truncate(64 << 20)
    before = file.stat()
    result = invoke_cli("probe", "--read-only", file, *ARGS)
    assert result.returncode == 0, result.stderr
    assert [p.name for p in quick.iterdir()] == [file.name]
    assert file.stat().st_mtime_ns == before.st_mtime_ns


def test_mistakes(invoke_cli, quick):
    small = quick / "small"
    small.write_bytes(bytes(100))
    assert_failed(invoke_cli("probe", "--read-only", small, *ARGS), "too small", "shard")
    both = invoke_cli("probe", "--folder", quick, "--read-only", small)
    assert_failed(both, "exclude each other", code=2)
    assert_failed(invoke_cli("probe", "--folder", quick / "no"), code=2)
    assert_failed(invoke_cli("probe", "--seconds", "0"), code=2)
    assert_failed(invoke_cli("probe", "--scratch", "much"), "not a size", code=2)
    assert_failed(invoke_cli("probe", "--folder", quick, "--scratch", "1TB"), "free")
    assert load_default() is None


def test_an_interrupt_leaves_no_scratch_file(tmp_path):
    command = [
        *COMMAND,
        "probe",
        "--folder",
        str(tmp_path),
        "--scratch",
        "64MiB",
        "--seconds",
        "60",
    ]
    env = environment(XDG_CACHE_HOME=str(tmp_path / "cache"))
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob(".mlx_stream-probe-*")):
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        error = process.communicate(timeout=60)[1]
    assert process.returncode == 130, error
    assert "interrupted" in error
    assert "Traceback" not in error
    assert not list(tmp_path.iterdir())


def test_the_planner_needs_no_mlx_to_forecast():
    code = (
        "import sys, mlx_stream.planner.forecast, mlx_stream.planner.machine_profile\n"
        "assert not {'mlx', 'mlx_lm', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))
