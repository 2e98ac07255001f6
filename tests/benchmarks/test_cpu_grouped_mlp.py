"""The benchmark of the CPU backend: it runs, and what it counts is what it computes."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import cpu_grouped_mlp as bench
from mlx_stream.backends.cpu.pool import WorkerPool

TINY = bench.Shapes(experts=3, dims=64, hidden=128, top_k=2)
ROWS = 5


def silu(x):
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize("name", bench.FORMATS)
def test_our_arm_computes_the_experts_whose_flops_it_counts(name):
    group = bench.make_group(TINY, bench.FORMATS[name])
    with WorkerPool(2) as pool:
        arm = bench.OurArm(TINY, group, ROWS, pool)
        assert arm() == TINY.flops(ROWS) == 2 * 3 * ROWS * 3 * 64 * 128
    expected = np.zeros_like(arm.x)
    for e, w in enumerate(group.dense):  # MLX dequantized them, numpy multiplies here
        x = arm.x[arm.routed[e]]
        hidden = silu(x @ w["gate_proj"].T) * (x @ w["up_proj"].T)
        expected[arm.routed[e]] += arm.scores[e] * (hidden @ w["down_proj"].T)
    assert np.abs(arm.y - expected).max() <= 1e-4 * np.abs(expected).max()


def test_every_sgemm_arm_multiplies_the_same_shapes():
    group = bench.make_group(TINY, bench.FORMATS["mxfp4"])
    arms = bench.sgemm_arms(TINY, group.dense, ROWS)
    for arm in arms.values():
        with arm.ready() as run:
            assert run() == TINY.flops(ROWS)


def test_the_command_prints_a_table_and_one_json_line():
    options = ["--experts", "2", "--dims", "64", "--hidden", "64", "--rows", "1,3", "--rounds", "2"]
    result = CliRunner().invoke(bench.main, options, catch_exceptions=False)
    *table, line = result.output.splitlines()
    summary = json.loads(line)
    cases = [(name, rows) for name in bench.FORMATS for rows in (1, 3)]
    assert [(r["format"], r["rows"]) for r in summary["results"]] == cases
    assert len(table) == 2 + len(cases)
    for r in summary["results"]:
        for median, low, high in (r["ours"], r["sgemm"], r["ratio"]):
            assert 0 < low <= median <= high
