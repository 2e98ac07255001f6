"""`mlx_stream plan` and `mlx_stream info`: from headers alone, and right."""

from __future__ import annotations

from mlx_stream.config import format_bytes
from mlx_stream.storage.checkpoint import open_checkpoint
from mlx_stream.storage.expert_index import build_expert_index
from tests.cli.runner import COMMAND, run


def test_info(invoke_cli, bare):
    index = build_expert_index(open_checkpoint(bare))
    result = invoke_cli("info", bare)
    assert result.returncode == 0, result.stderr
    for word in (
        str(bare),
        "qwen3_moe",
        f"{len(index.layers)} x 8 experts",
        format_bytes(index.nbytes),
        format_bytes(index.resident_nbytes),
        "affine, 4 bits, groups of 64",
    ):
        assert word in result.stdout


def test_plan(invoke_cli, bare):
    index = build_expert_index(open_checkpoint(bare))
    result = invoke_cli("plan", bare, "--prompt-tokens", "1000", "--memory-budget", "1GB")
    assert result.returncode == 0, result.stderr
    assert "prefill of 1000 tokens, qwen3_moe" in result.stdout
    assert "stream: 1 segment(s)" in result.stdout
    assert format_bytes(index.nbytes) in result.stdout
    assert "a budget of 1.00 GB" in result.stdout


def test_plan_of_a_long_prompt_in_a_small_budget_says_so(invoke_cli, bare):
    result = invoke_cli("plan", bare, "-n", "100000", "--memory-budget", "600MB")
    assert result.returncode == 0, result.stderr
    assert "note: the held state does not fit" in result.stdout


def test_plan_that_cannot_fit(invoke_cli, bare):
    result = invoke_cli("plan", bare, "-n", "1000", "--memory-budget", "1MB")
    assert result.returncode == 1
    assert "set memory_budget to" in result.stderr
    needed = result.stderr.split("set memory_budget to ")[1].split(" or more")[0]
    again = invoke_cli("plan", bare, "-n", "1000", "--memory-budget", needed.replace(" ", ""))
    assert again.returncode == 0, again.stderr


def test_plan_and_info_of_the_demo_by_default(invoke_cli):
    for command in ("plan", "info"):
        result = invoke_cli(command)
        assert result.returncode == 0, result.stderr
        assert result.stdout.strip()


def test_usage_errors(invoke_cli, bare):
    for args in (["plan", bare, "-n", "0"], ["info", bare, "more"], ["sing"]):
        result = invoke_cli(*args)
        assert result.returncode == 2
        assert result.stderr.count("\n") == 1


def test_unknown_model(invoke_cli):
    for command in ("plan", "info"):
        result = invoke_cli(command, "/no/such/folder")
        assert result.returncode == 1
        assert "cannot find the model" in result.stderr


def test_module_and_command_are_the_same(bare):
    result = run("info", bare, command=COMMAND)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "expert layers" in result.stdout
