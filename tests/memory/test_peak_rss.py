"""The budget from outside: what the kernel saw, prompts and answers together.

The interpreter and its libraries take about 110 MB of the allowance; the rest is slack.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.support.checkpoints import build_family
from tests.support.watch import Report, cgroups_missing, prompts_command, run_watched

pytestmark = pytest.mark.slow

ALLOWANCE = 250_000_000
DECODE = 8
# Its experts are more than any of the budgets: 64 of 885 KB in each of 8 layers.
MEDIUM = {
    "hidden_size": 1024,
    "moe_intermediate_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_experts": 64,
    "num_experts_per_tok": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 2048,
}
LARGE = MEDIUM | {
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 9,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 4096,
}


def _build(folder: Path, config: dict, least: int) -> Path:
    out = build_family("qwen3_moe", folder / "checkpoint", dtype="bfloat16", changes=config)
    assert sum(p.stat().st_size for p in out.iterdir()) > least
    return out


@pytest.fixture(scope="module")
def medium(tmp_path_factory):
    """About 410 MB; removed at the end."""
    folder = tmp_path_factory.mktemp("medium")
    yield _build(folder, MEDIUM, 400_000_000)
    shutil.rmtree(folder)


def _check(report: Report, budget: int) -> None:
    """The child finished, within its budget and the allowance, and did the work."""
    assert report.exit_code == 0, report.err[-2000:] or "killed: out of memory"
    over = report.peak_rss - budget
    print(f"peak RSS {report.peak_rss / 1e6:.0f} MB, {over / 1e6:+.0f} MB of the budget")
    assert over <= ALLOWANCE
    receipt = report.result["receipt"]
    assert receipt["budget_bytes"] == budget
    assert receipt["peak_bytes"] <= budget, "by its own account"
    if report.usage is not None:
        assert report.usage.oom_kills in (0, None)
        assert report.usage.max_usage_bytes <= budget + ALLOWANCE


@pytest.mark.parametrize(
    ("budget", "tokens", "prompts"),
    [
        (165_000_000, 768, 1),  # about the least that fits
        (250_000_000, 1024, 2),  # the second prompt routes to other experts
        (400_000_000, 512, 1),  # nearly all experts fit in the decode cache
        (250_000_000, 12, 4),  # only the routed experts are read
    ],
)
def test_peak_stays_within_the_budget(medium, budget, tokens, prompts):
    """Under a hard limit where that is possible: a process over it would be killed."""
    limit = budget + ALLOWANCE if cgroups_missing() is None else None
    command = prompts_command(medium, tokens=tokens, decode=DECODE, budget=budget, prompts=prompts)
    _check(run_watched(command, limit=limit), budget)


@pytest.mark.root
@pytest.mark.skipif(cgroups_missing() is not None, reason=str(cgroups_missing()))
def test_the_limit_is_real():
    """The watcher's own test: a child that takes more than its limit is killed."""
    report = run_watched(["python3", "-c", "x = b'x' * (200 << 20)"], limit=60_000_000)
    assert report.exit_code == -9
    assert report.usage is not None
    assert report.usage.oom_kills == 1


def test_the_watcher_sees_a_peak():
    code = "import time; x = b'x' * (200 << 20); time.sleep(0.5); del x; time.sleep(0.2)"
    report = run_watched(["python3", "-c", code])
    assert 200 << 20 <= report.peak_rss <= 260 << 20
    assert 200 << 20 <= report.peak_anonymous <= 260 << 20


@pytest.mark.skipif(os.environ.get("MLX_STREAM_BIG") != "1", reason="MLX_STREAM_BIG=1 runs it")
def test_large_checkpoint_in_one_gigabyte(tmp_path):
    """2.8 GB of experts, 4096 tokens of prompt, 32 of answer, memory_budget='1GB'."""
    model = _build(tmp_path, LARGE, 2_500_000_000)
    command = prompts_command(model, tokens=4096, decode=32, budget=10**9)
    try:
        limit = 10**9 + ALLOWANCE if cgroups_missing() is None else None
        report = run_watched(command, limit=limit)
    finally:
        shutil.rmtree(model)
    _check(report, 10**9)
    assert report.result["receipt"]["segments"] == 1
