"""`mlx_stream trace`: records what the router said, in prefill and in decode."""

from __future__ import annotations

import numpy as np
import pytest

from mlx_stream import load
from mlx_stream.decode.routing_trace import RoutingTrace
from mlx_stream.hub import demo_path
from mlx_stream.storage.checkpoint import open_checkpoint
from mlx_stream.storage.expert_index import build_expert_index
from mlx_stream.trace_command import record_trace
from tests.cli.runner import assert_failed
from tests.prefill.running import recorded_routing
from tests.support.checkpoints import random_tokens, stock_greedy, stock_model, stock_prefill

STEPS = 6


def stock_routing(model, tokens):
    """``[layers][tokens, K]`` sorted ids, by stock mlx-lm in one go."""
    with recorded_routing() as calls:
        stock_prefill(model, tokens, 2048)
    layers = len({id(module) for module, _ in calls})
    each = [[ids for _, ids in calls[i::layers]] for i in range(layers)]
    return [np.sort(np.concatenate(parts), axis=-1) for parts in each]


def test_records_what_stock_mlx_lm_routes(invoke_cli, bare, tmp_path):
    model = stock_model(bare)
    prompt = random_tokens(model, 40, seed=3)
    answer = stock_greedy(model, prompt, STEPS)
    out = tmp_path / "t.npz"
    text = " ".join(map(str, prompt))
    result = invoke_cli("trace", bare, "-p", text, "-m", STEPS, "-o", out)
    assert result.returncode == 0, result.stderr
    assert f"40 prompt tokens, {STEPS} decoded tokens" in result.stdout

    trace = RoutingTrace.load(out)
    index = build_expert_index(open_checkpoint(bare))
    assert trace.model == bare.name
    assert trace.layers == tuple(layer.index for layer in index.layers)
    assert trace.num_experts == tuple(layer.num_experts for layer in index.layers)
    assert trace.total_nbytes == index.nbytes
    assert trace.tokens.tolist() == answer
    for ours, decoded, theirs in zip(
        trace.prompt, trace.decode, stock_routing(model, prompt + answer), strict=True
    ):
        np.testing.assert_array_equal(np.sort(ours, axis=-1), theirs[:40])
        np.testing.assert_array_equal(np.sort(decoded, axis=-1), theirs[40:])


def test_a_small_budget_gives_the_same_trace(bare, tmp_path):
    prompt = " ".join(map(str, random_tokens(stock_model(bare), 30, seed=4)))
    with load(bare, decode_path="exact") as runtime:
        roomy = record_trace(runtime, prompt, STEPS)
        budget = runtime.plan(30).memory.total
    with load(bare, decode_path="exact", memory_budget=budget, chunk_tokens=7) as runtime:
        small = record_trace(runtime, prompt, STEPS)
        assert runtime.engine.decoder.observer is None, "the recorder is gone"
    assert roomy.tokens.tolist() == small.tokens.tolist()
    for a, b in zip((*roomy.prompt, *roomy.decode), (*small.prompt, *small.decode), strict=True):
        np.testing.assert_array_equal(np.sort(a, axis=-1), np.sort(b, axis=-1))


@pytest.mark.skipif(not (demo_path() / "tokenizer.json").is_file(), reason="no demo model")
def test_text_of_the_demo_model(invoke_cli, tmp_path):
    (tmp_path / "p.txt").write_text("And it came to pass", encoding="utf-8")
    runs = []
    for name, args in {
        "a": ("--prompt", "And it came to pass"),
        "b": ("--prompt-file", tmp_path / "p.txt"),
        "c": (),
    }.items():
        out = tmp_path / f"{name}.npz"
        result = invoke_cli("trace", *args, "-m", "4", "-o", out)
        assert result.returncode == 0, result.stderr
        runs.append(RoutingTrace.load(out))
    for other in runs[1:]:
        assert other.tokens.tolist() == runs[0].tokens.tolist()
        for a, b in zip(other.decode, runs[0].decode, strict=True):
            np.testing.assert_array_equal(a, b)


def test_sampling_follows_its_seed(invoke_cli, bare, tmp_path):
    tokens = []
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        out = tmp_path / f"{name}.npz"
        args = ("-p", "1 2 3", "--temp", "1.5", "--seed", seed, "-m", "12", "-o", out)
        assert invoke_cli("trace", bare, *args).returncode == 0
        tokens.append(RoutingTrace.load(out).tokens.tolist())
    assert tokens[0] == tokens[1] != tokens[2]


def test_mistakes(invoke_cli, bare, tmp_path):
    out = tmp_path / "t.npz"
    prompt = ("-p", "1 2")
    both = invoke_cli("trace", bare, *prompt, "--prompt-file", __file__, "-o", out)
    assert_failed(both, "exclude each other", code=2)
    assert_failed(invoke_cli("trace", bare, *prompt), "--output", code=2)
    assert_failed(invoke_cli("trace", bare, *prompt, "-m", "0", "-o", out), code=2)
    folder = invoke_cli("trace", bare, *prompt, "-o", tmp_path / "no" / "t.npz")
    assert_failed(folder, "cannot be written", "--output")
    assert_failed(invoke_cli("trace", bare, "-p", "hello", "-o", out), "no tokenizer")
    assert_failed(invoke_cli("trace", bare, "-p", "999999", "-o", out), "outside the vocabulary")
    assert not out.exists()
