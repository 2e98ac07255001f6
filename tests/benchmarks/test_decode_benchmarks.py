"""The decode benchmarks: they run, their arms differ in what they say, and counts are right."""

import json

import pytest
from click.testing import CliRunner

from benchmarks import decode_budget, prerouter, seed_policies
from mlx_stream.config import StreamConfig
from mlx_stream.decode.policy import DEFAULT_POLICY
from mlx_stream.decode.replay import replay
from mlx_stream.engine import Engine
from mlx_stream.hub import demo_path


@pytest.fixture
def engine():
    options = {"decode_path": "exact", "predict": "off", "prerouter": "off"}
    config = StreamConfig.build(memory_budget="1GB", **options)
    opened = Engine(demo_path(), config)
    yield opened
    opened.close()


def last_line(main, *args):
    result = CliRunner().invoke(main, [str(a) for a in args])
    assert result.exit_code == 0, result.output
    return result.output, json.loads(result.output.splitlines()[-1])


def test_decode_budget_runs_every_arm_every_round():
    args = ("--tokens", 2, "--warm", 1, "--rounds", 2, "--shares", "1,0.25")
    output, found = last_line(decode_budget.main, *args)
    assert [(a["predict"], a["share"]) for a in found["arms"]] == [
        ("off", 1.0),
        ("off", 0.25),
        ("auto", 1.0),
        ("auto", 0.25),
    ]
    assert all(len(a["rounds"]) == 2 for a in found["arms"])
    full, quarter = found["arms"][0]["rounds"][0], found["arms"][1]["rounds"][0]
    assert full["hit_rate"] > quarter["hit_rate"]
    assert quarter["bytes_per_token"] > 0
    assert "throttled to 2.00 GB/s" in found["io"]
    assert "x full" in output


def test_the_pinned_cache_keeps_its_size(engine):
    records = decode_budget.pin_cache(engine, 0.25)
    assert records == sum(layer.num_experts for layer in engine.index.layers) // 4
    prompt = decode_budget.make_prompt(demo_path(), 4096, 40)
    timed = decode_budget.decode_steps(engine, prompt, 1, 2)
    assert 0 < timed.hit_rate < 1
    assert timed.cpu_ms > 0
    assert engine.decoder.cache.capacity == records
    assert len(engine.decoder.cache) == records


def test_a_checkpoint_without_tokenizer_gets_random_ids(checkpoint):
    folder = checkpoint("qwen3_moe")
    prompt = decode_budget.make_prompt(folder, 100, 20)
    assert len(prompt) == 20
    assert max(prompt) < 100


def test_seed_policies_table():
    args = ("--prompts", 2, "--tokens", 32, "--prompt-tokens", 64)
    output, found = last_line(seed_policies.main, *args)
    arms = {a["arm"]: a for a in found["arms"]}
    assert list(arms) == ["none", "last-token", "weighted", "frequency", "belady", "belady+oracle"]
    assert all(len(a["hit_rates"][0]) == 2 for a in arms.values())
    assert arms["belady+oracle"]["hit_rate"] > arms["none"]["hit_rate"]
    assert arms["belady"]["hit_rate"] > arms["none"]["hit_rate"]
    assert "points behind" in output


def test_the_text_is_decoded_and_the_engine_counts_as_the_replay(engine):
    ids = decode_budget.make_prompt(demo_path(), 4096, 60)
    (piece,) = seed_policies.pieces(ids, 1, 40, 12)
    records = seed_policies.empty_cache(engine, 0.2)
    trace, live = seed_policies.decode_piece(engine, piece)
    assert trace.tokens.tolist() == piece[1]
    again = replay(trace, DEFAULT_POLICY, records * max(trace.expert_nbytes))
    assert live.hits.tolist() == again.hits.tolist()
    assert live.misses.tolist() == again.misses.tolist()
    assert (live.nbytes[live.misses > 0] > 0).all()


def test_a_second_piece_starts_from_an_empty_cache(engine):
    ids = decode_budget.make_prompt(demo_path(), 4096, 60)
    (piece,) = seed_policies.pieces(ids, 1, 40, 6)
    results = []
    for _ in range(2):
        seed_policies.empty_cache(engine, 0.2)
        results.append(seed_policies.decode_piece(engine, piece)[1].misses.tolist())
    assert results[0] == results[1]


def test_prerouter_compares_the_same_routing_read_early_and_late():
    args = ("--tokens", 3, "--warm", 2, "--rounds", 1, "--backend", "cpu")
    output, found = last_line(prerouter.main, *args)
    assert found["heads"] == "demo_k4"  # those that the demo model comes with
    assert "heads: demo_k4" in output
    arms = {(a["disk"], a["way"]): a["rounds"] for a in found["arms"]}
    assert set(arms) == {(d, w) for d in prerouter.DISKS for w in prerouter.WAYS}
    assert all(len(rounds) == 1 for rounds in arms.values())
    slow = {way: arms["slow", way][0] for way in prerouter.WAYS}
    assert slow["prerouter"]["waits_avoided"] > 0
    assert slow["same routing"]["waits_avoided"] == slow["on-demand"]["waits_avoided"] == 0
    assert all(timed["bytes_per_token"] > 0 for timed in slow.values())
    assert all(arms["fast", way][0]["stall_ms"] == 0 for way in prerouter.WAYS)
    assert all(timed["dropped"] == 0 for rounds in arms.values() for timed in rounds)
    pairs = {f"prerouter to {base}, {d}" for base in prerouter.WAYS[:2] for d in prerouter.DISKS}
    assert set(found["ratios"]) == pairs
    for name, ratios in found["ratios"].items():
        assert len(ratios["tokens_per_second"]) == 1
        assert len(ratios["stall"]) == len(ratios["bytes"]) == name.endswith("slow")
