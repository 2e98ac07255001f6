"""Seeding: decode starts with the experts that the end of the prompt used, at no extra read."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_stream.decode.lfu_policy import HALF_LIFE
from mlx_stream.decode.seed import LAYER_NBYTES, ROUTED_SETS, PromptSeeder
from tests.prefill.running import decode, recorded_routing, settled_prompt
from tests.support.checkpoints import stock_prefill

FAST = settings(max_examples=100, deadline=None)


class Layer:
    index, num_experts = 0, 16


class Mlp:
    layer = Layer()


class Cache:
    def __init__(self, capacity):
        self.capacity = capacity
        self.slot_nbytes = LAYER_NBYTES  # so large that the routed sets are the limit
        self.copied = []

    def copy_in(self, mlp, expert, read, buffer, weight):
        self.copied.append(expert)
        return expert % 2 == 0


@FAST
@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=5).filter(any),
    k=st.integers(1, 3),
    capacity=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
)
def test_choice_equals_a_plain_loop(sizes, k, capacity, seed):
    rng = np.random.default_rng(seed)
    chunks = [rng.integers(0, 16, (size, k)) for size in sizes]
    seeder = PromptSeeder(Cache(capacity), 1, "weighted")
    chosen = seeder.choose(Mlp(), chunks)

    rows = [row for chunk in chunks for row in chunk.tolist()]
    scores = dict.fromkeys(range(16), 0.0)
    for age, row in enumerate(reversed(rows)):
        for expert in row:
            scores[expert] += 0.5 ** (age / HALF_LIFE)
    scores = {expert: round(score, 9) for expert, score in scores.items()}
    ranked = sorted(scores, key=lambda e: (-scores[e], e))
    room = min(capacity, ROUTED_SETS * k)
    assert len(chosen) == sum(scores[e] > 0 for e in ranked[:room])
    assert sorted(scores[e] for e in chosen) == sorted(scores[e] for e in ranked[: len(chosen)])


@FAST
@given(st.integers(1, 60), st.integers(1, 12))
def test_layers_share_the_whole_cache_evenly(capacity, layers):
    seeder = PromptSeeder(Cache(capacity), layers, "weighted")
    everyone = [np.arange(16).reshape(2, 8)]  # K is so large that it sets no limit
    shares = [len(seeder.choose(Mlp(), everyone)) for _ in range(layers)]
    assert sum(shares) == min(capacity, sum(min(16, s) for s in shares))
    assert max(shares) - min(shares) <= 1
    again = [len(seeder.choose(Mlp(), everyone)) for _ in range(layers)]
    assert again == shares, "the next segment starts over"


def test_only_copies_that_were_kept_are_counted():
    seeder = PromptSeeder(Cache(9), 1, "weighted")
    seeder.choose(Mlp(), [np.array([[1, 2, 4]])])
    seeder.keep(Mlp(), [1, 2, 4], None, None)
    assert seeder.kept == 2


def last_ids(model, prompt):
    """Experts of the last prompt token, layer by layer, by stock mlx-lm."""
    with recorded_routing() as calls:
        stock_prefill(model, prompt, 16)
    layers = len({id(module) for module, _ in calls})
    return [set(ids[-1].tolist()) for _, ids in calls[-layers:]]


@pytest.mark.parametrize("kind", ["open_engine", "open_metal"])
def test_seeding_reads_nothing_and_saves_reads(checkpoint, stock, request, monkeypatch, kind):
    path = checkpoint("qwen3_moe")
    model = stock(path)
    prompt, rows = settled_prompt(model, 60, 6)
    open_one = request.getfixturevalue(kind)

    def run(path):
        engine = open_one(path, **({} if kind == "open_metal" else {"io": "buffered"}))
        result = engine.prefill(prompt)
        after_prefill = engine.reader.counters.bytes
        kept = set(engine.decoder.cache.keys())
        tokens = decode(engine, result, prompt, 6)
        read = engine.reader.counters.bytes - after_prefill
        hits = engine.decoder.cache.counts.hits
        engine.close()
        return result.receipt, kept, tokens, read, hits

    seeded, kept, tokens, read, hits = run(path)
    monkeypatch.setattr(PromptSeeder, "choose", lambda *args: frozenset())
    plain, nothing, same, read_cold, cold_hits = run(path)

    assert seeded.bytes_read == plain.bytes_read, "prefill reads the same bytes either way"
    assert (seeded.cached_experts, plain.cached_experts) == (len(kept), 0)
    assert not nothing
    for layer, experts in enumerate(last_ids(model, prompt)):
        assert {(layer, e) for e in experts} <= kept, "the last token's experts are there"
    assert tokens == same == [int(row.argmax()) for row in rows]
    assert read < read_cold
    assert hits > cold_hits


def test_everything_fits_so_decode_reads_nothing(checkpoint, stock, open_engine):
    path = checkpoint("qwen3_moe")
    prompt, _ = settled_prompt(stock(path), 83, 6)
    engine = open_engine(path)
    result = engine.prefill(prompt)
    before = engine.reader.counters.bytes
    assert len(engine.decoder.cache) == result.receipt.cached_experts
    decode(engine, result, prompt, 6)
    after = engine.reader.counters.bytes
    records = sum(layer.num_experts for layer in engine.index.layers)
    assert len(engine.decoder.cache) == records, "the last 64 tokens used every expert"
    assert after == before
    assert engine.decoder.cache.counts.evictions == 0
