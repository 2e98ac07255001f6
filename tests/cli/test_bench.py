"""The bench command: readable, machine-readable, and clear about bad flags."""

import csv
import json
import subprocess
import sys

import pytest


def bench(*args):
    return subprocess.run(
        [sys.executable, "-m", "mlx_stream", "bench", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_json_and_csv(tmp_path):
    target = tmp_path / "out.csv"
    run = bench(
        "--tokens", 40, "--chunks", 16, "--rounds", 1, "--new-tokens", 3, "--json", "--csv", target
    )
    assert run.returncode == 0, run.stderr
    line = json.loads(run.stdout)
    orders = {r["order"] for r in line["results"]}
    assert orders == {
        "layer-major",
        "chunk-major",
        "stock mlx-lm",
        "read only",
        "compute only",
        "decode",
    }
    assert "layer-major" in run.stderr
    with target.open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(line["results"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tokens", "many"), "whole numbers"),
        (("--tokens", "0"), "whole numbers"),
        (("--orders", "sideways"), "unknown order"),
        (("--budgets", "lots"), "not a size"),
        (("--io", "none"), "direct, buffered or both"),
        (("--throttle-reads", "fast"), "not a read rate"),
        (("--model", "/no/such/folder"), "no such folder"),
        (("--csv", "/no/such/folder/x.csv"), "no such folder"),
    ],
)
def test_bad_flags(flags, message):
    run = bench(*flags)
    assert run.returncode != 0
    assert message in run.stderr
    assert "Traceback" not in run.stderr
