"""``--prerouter`` from the command line."""

from __future__ import annotations

import json

import pytest

from tests.cli.runner import assert_failed
from tests.prerouter.making import form, random_heads, with_heads

PROMPT = ("--prompt", "1 2 3 4 5 6 7 8 9", "--max-tokens", "5")


@pytest.fixture(scope="module")
def headed(tmp_path_factory, checkpoint):
    """A tiny checkpoint with trained heads."""
    plain = checkpoint("qwen3_moe", changes={"mlp_only_layers": []})
    spec = form("35b", range(3), range(1, 4))
    out = tmp_path_factory.mktemp("headed") / "model"
    return with_heads(plain, out, spec, random_heads(spec, 128, 8))


def test_the_stats_and_the_receipt_say_what_was_predicted(invoke, headed, tmp_path):
    receipt = tmp_path / "receipt.json"
    result = invoke("--model", headed, *PROMPT, "--stats", "--receipt", receipt)
    assert result.returncode == 0, result.stderr
    assert "prerouter        on: test 35b" in result.stderr
    assert "prerouted        9 layer-steps" in result.stderr
    assert "dropped          0 experts" in result.stderr
    found = json.loads(receipt.read_text())["decode"]
    assert (found["predicted_layer_steps"], found["dropped_experts"]) == (9, 0)


def test_off_and_without_heads(invoke, headed, bare):
    result = invoke("--model", headed, *PROMPT, "--stats", "--prerouter", "off")
    assert "prerouter        off: as asked" in result.stderr
    assert "prerouted" not in result.stderr
    result = invoke("--model", bare, *PROMPT, "--stats")
    assert "prerouter        off: the folder has no prerouter.json" in result.stderr


def test_on_without_heads_is_an_error(invoke, bare):
    assert_failed(invoke("--model", bare, *PROMPT, "--prerouter", "on"), "has no Prerouter")


def test_a_spec_by_hand(invoke, headed, bare, tmp_path):
    spec = headed / "prerouter.json"
    result = invoke("--model", headed, *PROMPT, "--stats", "--prerouter-spec", spec)
    assert "on: test 35b" in result.stderr
    bad = tmp_path / "spec.json"
    bad.write_text("{}")
    result = invoke("--model", bare, *PROMPT, "--prerouter-spec", bad)
    assert_failed(result, "bad value: format_version")
