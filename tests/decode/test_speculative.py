"""Speculative decoding: the tokens of plain decoding, a cache to go on from, one read a round."""

from __future__ import annotations

from collections import Counter
from itertools import islice

import mlx.core as mx
import pytest
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors

from mlx_stream.decode.speculative import Drafter, Rounds, check_trimmable
from mlx_stream.errors import CapabilityError, ReadError
from mlx_stream.prefill.cache_views import cache_offset
from tests.decode.running import check_slots, hold, records, settled_answer
from tests.prefill.running import greedy, relative, stock_decode
from tests.support.checkpoints import random_tokens, stock_prefill
from tests.support.faults import FailingReads, install_fault

N, STEPS = 30, 32
DRAFTS = ("same", "other", "wrong", "sometimes")


@pytest.fixture
def load(checkpoint, request, monkeypatch):
    """``load(draft, tokens, ...)``: an engine with a draft model of that kind."""

    def make(draft, tokens, *, name="qwen3_moe", kind="open_engine", **options):
        path = checkpoint(name)
        engine = request.getfixturevalue(kind)(path, **options)
        engine.load_draft(checkpoint(name, seed=7) if draft == "other" else path, tokens)
        _spoil(monkeypatch, engine, draft)
        return engine

    return make


def _spoil(monkeypatch, engine, draft):
    propose, vocab = Drafter.propose, engine._shape.vocab

    def wrong(self, token, count):
        return [(t + 1) % vocab for t in propose(self, token, count)]

    def sometimes(self, token, count):
        """Right up to a place that moves, so that every number of tokens is accepted."""
        right, place = propose(self, token, count), token % (count + 1)
        return [t if n < place else (t + 1) % vocab for n, t in enumerate(right)]

    if draft in ("wrong", "sometimes"):
        monkeypatch.setattr(Drafter, "propose", {"wrong": wrong, "sometimes": sometimes}[draft])


def speculate(engine, prompt, count, **options):
    result = engine.prefill(prompt)
    drawn = engine.decode_speculative(result, prompt, sampler=greedy, **options)
    taken = list(islice(drawn, count))
    drawn.close()
    return taken, result.cache


@pytest.mark.parametrize(
    ("draft", "tokens", "kind", "options"),
    [
        ("sometimes", 1, "open_engine", {}),
        ("sometimes", 3, "open_engine", {"decode_path": "hot"}),
        ("sometimes", 3, "open_metal", {"decode_path": "exact"}),
        ("sometimes", 4, "open_metal", {"decode_path": "hot"}),
        ("sometimes", 3, "open_metal", {"decode_path": "staged"}),
        ("sometimes", 6, "open_metal", {"predict": "previous"}),
        ("same", 3, "open_engine", {}),
        ("same", 4, "open_metal", {"decode_path": "hot"}),
        ("other", 3, "open_engine", {}),
        ("other", 2, "open_metal", {"decode_path": "hot"}),
        ("wrong", 3, "open_engine", {}),
        ("wrong", 1, "open_metal", {"decode_path": "hot"}),
    ],
)
def test_tokens_equal_stock(stock, load, draft, tokens, kind, options):
    engine = load(draft, tokens, kind=kind, **options)
    prompt, expected = settled_answer(stock, engine.path, N, STEPS)
    drawn, _ = speculate(engine, prompt, STEPS)
    assert [d.token for d in drawn] == expected
    taken = sum(d.from_draft for d in drawn)
    totals = engine.decode_metrics.totals
    if draft == "same":
        assert taken >= (STEPS - 1) * tokens // (tokens + 1) - tokens
        assert totals.steps <= -(-(STEPS - 1) // (tokens + 1))
    elif draft == "wrong":
        assert taken == 0
        assert totals.steps == STEPS - 1
    assert totals.tokens == totals.steps * (tokens + 1)


@pytest.mark.parametrize("name", ["deepseek_v3", "llama4"])
def test_other_caches_that_can_be_trimmed(stock, load, name):
    """MLA, and attention in chunks, whose caches drop their front as they grow."""
    engine = load("sometimes", 3, name=name)
    prompt, expected = settled_answer(stock, engine.path, N, STEPS)
    drawn, _ = speculate(engine, prompt, STEPS)
    assert [d.token for d in drawn] == expected


@pytest.mark.parametrize("held", [1, 3, 9])
def test_small_caches(stock, load, monkeypatch, held):
    engine = load("sometimes", 3)
    hold(engine, monkeypatch, held)
    prompt, expected = settled_answer(stock, engine.path, N, STEPS)
    drawn, _ = speculate(engine, prompt, STEPS)
    assert [d.token for d in drawn] == expected
    check_slots(engine)


@pytest.mark.parametrize("draft", DRAFTS)
def test_processors_see_prompt_and_answer(stock, load, draft):
    """A repetition penalty gives what it gives to stock mlx-lm; no call sees a wrong history."""
    engine = load(draft, 3)
    model, prompt = stock(engine.path), random_tokens(160, N, seed=4)

    def penalty():
        return make_logits_processors(repetition_penalty=1.7, repetition_context_size=12)

    logits, cache = stock_prefill(model, prompt, 16)
    history, expected, row = list(prompt), [], mx.array(logits)[None]
    for _ in range(STEPS):
        for processor in penalty():
            row = processor(mx.array(history), row)
        expected.append(int(mx.argmax(row[0]).item()))
        history.append(expected[-1])
        row = model(mx.array([[expected[-1]]]), cache=cache)[0, -1:].astype(mx.float32)

    seen = []

    def spy(tokens, logits):
        seen.append(tokens.tolist())
        return logits

    drawn, _ = speculate(engine, prompt, STEPS, processors=[*penalty(), spy])
    assert [d.token for d in drawn] == expected
    assert seen[:STEPS] == [prompt + expected[:n] for n in range(STEPS)]


@pytest.mark.parametrize(
    ("draft", "kind"),
    [("same", "open_engine"), ("sometimes", "open_engine"), ("sometimes", "open_metal")],
)
def test_stopping_anywhere_leaves_a_cache_to_go_on_from(stock, load, draft, kind):
    """The cache holds all tokens but the last one given, as after plain decoding."""
    options = {"decode_path": "hot"} if kind == "open_metal" else {}
    engine = load(draft, 3, kind=kind, **options)
    prompt, expected = settled_answer(stock, engine.path, N, STEPS)
    logits, cache = stock_prefill(stock(engine.path), prompt, 16)
    rows = stock_decode(stock(engine.path), logits, cache, 11)
    for count in (1, 2, 3, 4, 5, 6, 7, 10):
        drawn, cache = speculate(engine, prompt, count)
        assert [d.token for d in drawn] == expected[:count]
        assert cache_offset(cache) == N + count - 1
        again = engine.prefill([drawn[-1].token], cache)
        assert relative(again.logits, rows[count]) < 1e-4


# --- what cannot be


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_next"])
def test_caches_that_cannot_be_trimmed_are_refused_at_once(checkpoint, open_engine, name):
    """Rotating ones too, although they could be trimmed until they wrap."""
    engine = open_engine(checkpoint(name))
    before, used = engine.reader.counters, engine.budget.used
    with pytest.raises(CapabilityError, match="trimmed"):
        engine.load_draft(checkpoint(name), 3)
    assert engine.reader.counters == before
    assert engine.budget.used == used
    assert not engine.drafts


def test_a_draft_that_cannot_be_trimmed_is_refused(checkpoint, open_engine):
    engine = open_engine(checkpoint("qwen3_moe"))
    with pytest.raises(CapabilityError, match="draft model"):
        engine.load_draft(checkpoint("gpt_oss"), 3)
    assert not engine.drafts


def test_the_whole_layer_path_is_refused(checkpoint, open_engine):
    """It has no logits but the last token's."""
    engine = open_engine(checkpoint("qwen3_moe"), decode_path="whole-layer")
    with pytest.raises(CapabilityError, match="whole-layer"):
        engine.load_draft(checkpoint("qwen3_moe"), 3)


def test_a_window_asked_for_is_refused_before_any_step(stock, load):
    """--max-kv-size makes rotating caches of plain ones."""
    engine = load("same", 3)
    cache = [RotatingKVCache(max_size=200) for _ in make_prompt_cache(stock(engine.path))]
    result = engine.prefill(list(range(N)), cache)
    before = engine.reader.counters
    with pytest.raises(CapabilityError, match="RotatingKVCache"):
        next(engine.decode_speculative(result, list(range(N)), sampler=greedy))
    assert engine.reader.counters == before
    assert engine.decode_metrics.totals.steps == 0
    with pytest.raises(CapabilityError):
        Rounds(None, cache, engine._drafter, prompt=(), sampler=greedy)


def test_layers_without_a_cache_are_refused_by_name():
    with pytest.raises(CapabilityError, match="NoneType"):
        check_trimmable("model", [None])


# --- reads


@pytest.mark.parametrize("held", ["all", 9])
def test_the_union_is_read_once_a_round(stock, load, monkeypatch, held):
    """Tokens of a round that share an expert share its read."""
    engine = load("sometimes", 5, predict="off", seed_policy="none")
    hold(engine, monkeypatch, records(engine) if held == "all" else held)
    cache, rounds = engine.decoder.cache, []
    start_read, step = cache.start_read, engine.decoder.steps._run

    def counted(mlp, expert, pinned):
        record = start_read(mlp, expert, pinned)
        if record is not None:
            rounds[-1]["read"][record.key] += 1
        return record

    def run(tokens, prompt_cache):
        routed, before = Counter(), cache.keys()
        rounds.append({"read": Counter(), "routed": routed, "before": before})
        engine.decoder.observer = lambda layer, ids, _: routed.update(
            (layer, e) for e in ids.reshape(-1).tolist()
        )
        return step(tokens, prompt_cache)

    monkeypatch.setattr(cache, "start_read", counted)
    monkeypatch.setattr(engine.decoder.steps, "_run", run)
    prompt, expected = settled_answer(stock, engine.path, N, STEPS)
    drawn, _ = speculate(engine, prompt, STEPS)
    assert [d.token for d in drawn] == expected
    shared = 0
    for found in rounds:
        assert set(found["read"].values()) <= {1}
        assert found["read"].keys() >= found["routed"].keys() - found["before"]
        if held == "all":
            assert found["read"].keys() == found["routed"].keys() - found["before"]
        shared += sum(n > 1 for n in found["routed"].values())
    assert shared > 0
    assert sum(sum(f["read"].values()) for f in rounds) > 0
    if held == "all":
        assert engine.decode_metrics.totals.misses == len(cache)


@pytest.mark.parametrize("kind", ["open_engine", "open_metal"])
def test_a_failing_round_leaves_the_cache_as_before_it(stock, load, monkeypatch, kind):
    fault = FailingReads()
    install_fault(monkeypatch, fault)
    engine = load("sometimes", 3, kind=kind)
    hold(engine, monkeypatch, 2)
    prompt, expected = settled_answer(stock, engine.path, N, STEPS)
    for skip in range(0, 30, 5):
        result = engine.prefill(prompt)
        drawn = engine.decode_speculative(result, prompt, sampler=greedy)
        fault.arm(skip=skip)
        got = []
        with pytest.raises(ReadError):
            got.extend(d.token for d in drawn)
        fault.disarm()
        check_slots(engine)
        if not got:
            got = [next_token(result)]
        assert got == expected[: len(got)]
        rest = engine.prefill([got[-1]], result.cache)
        more = engine.decode(rest, prompt, sampler=greedy)
        assert [t for t, _ in islice(more, 4)] == expected[len(got) : len(got) + 4]


def next_token(result):
    return int(mx.argmax(result.logits).item())
