"""Reads ahead are hints: they never change a token, never take a used record's place, and count."""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest

from mlx_stream.decode.predict import (
    REST_TOKENS,
    WINDOW_TOKENS,
    Lookahead,
    PayMeter,
    PreviousToken,
)
from mlx_stream.decode.readahead import GUESS_SETS, LEAST_SETS
from mlx_stream.experts.streamed_experts import set_executor
from tests.decode.running import answer, check_slots, hold, settled_answer

N, STEPS, TOP_K = 30, 32, 2
ENOUGH = LEAST_SETS * TOP_K


@pytest.fixture
def run(checkpoint, stock, request, monkeypatch):
    """``run(predict, held)``: an engine that has given STEPS right tokens."""

    def start(predict, held=ENOUGH, *, kind="open_engine", steps=STEPS, before=lambda engine: None):
        path = checkpoint("qwen3_moe")
        prompt, expected = settled_answer(stock, path, N, steps)
        options = {"io": "buffered"} if kind == "open_engine" else {}
        engine = request.getfixturevalue(kind)(
            path, decode_path="exact", predict=predict, seed_policy="none", **options
        )
        hold(engine, monkeypatch, held)
        before(engine)
        assert answer(engine, prompt, steps) == expected
        check_slots(engine)
        return engine

    return start


LIES = {
    "always the same": lambda e: mx.zeros((1, TOP_K), dtype=mx.uint32),
    "ever another": lambda e: mx.random.randint(0, 8, (1, TOP_K)),
    "all of them": lambda e: mx.arange(8, dtype=mx.uint32)[None],
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("kind", ["open_engine", "open_metal"])
def test_a_predictor_that_lies_changes_no_token(run, monkeypatch, kind, lie):
    monkeypatch.setattr(Lookahead, "route", lambda self, experts, x: LIES[lie](experts))
    engine = run("lookahead", 14, kind=kind)
    counts = engine.decoder.cache.counts
    assert counts.guesses > 0
    assert lie == "always the same" or counts.wasted_nbytes > 0


@pytest.mark.parametrize("kind", ["open_engine", "open_metal"])
def test_a_liar_of_the_previous_token_changes_no_token(run, monkeypatch, kind):
    """It names just what the last token did not use."""
    monkeypatch.setattr(
        PreviousToken,
        "experts",
        lambda self, layer: np.setdiff1d(np.arange(8), self._last.get(layer, [])),
    )
    engine = run("previous", 14, kind=kind)
    assert engine.decoder.cache.counts.guesses > 0


def test_recall_of_the_previous_token_equals_a_recount(run):
    """By the observer: layers after the first, from the second token on."""
    routed = []

    def watch(engine):
        engine.decoder.observer = lambda layer, ids, prefill: (
            prefill or routed.append((layer, set(ids.reshape(-1).tolist())))
        )

    engine = run("previous", before=watch)
    first = engine.index.layers[0].index
    last, predicted, correct, total = {}, 0, 0, 0
    for layer, ids in routed:
        if layer != first and layer in last:
            predicted += len(last[layer])
            correct += len(last[layer] & ids)
            total += len(ids)
        last[layer] = ids
    totals = engine.decode_metrics.totals
    assert (totals.predicted, totals.predicted_used) == (predicted, correct)
    assert totals.routed_in_predicted == total
    assert engine.decoder.exact.ahead.counts.recall == correct / total
    assert 0 < correct < predicted


def test_recall_of_lookahead_equals_a_recount(run):
    """The next block's gate on this layer's input, by hand."""
    calls = []

    def watch(engine):
        exact = engine.decoder.exact

        def spy(experts, x, indices):
            calls.append((experts, x, set(np.array(indices).reshape(-1).tolist())))
            return exact(experts, x, indices)

        set_executor(engine._loaded.slot, spy)

    engine = run("lookahead", before=watch)
    streamed = engine._loaded.streamed
    blocks = {id(m.switch_mlp): m for _, m in engine.model.named_modules() if "switch_mlp" in m}
    predicted, correct, total = 0, 0, 0
    for (here, x, _), (there, _, ids) in pairwise(calls):
        if here is streamed[-1]:
            continue
        gate = np.array(blocks[id(there)].gate(x)).reshape(-1)
        named = set(np.argsort(-gate)[:TOP_K].tolist())
        predicted += len(named)
        correct += len(named & ids)
        total += len(ids)
    totals = engine.decode_metrics.totals
    assert (totals.predicted, totals.predicted_used) == (predicted, correct)
    assert totals.routed_in_predicted == total > 0


@pytest.mark.parametrize("predict", ["previous", "lookahead"])
def test_reads_equal_misses_and_guesses(run, predict):
    """Every read is asked for once; every guess is used, wasted or still there."""
    engine = run(predict)
    cache, totals = engine.decoder.cache, engine.decode_metrics.totals
    counts, expert = cache.counts, engine.index.layers[0].expert_nbytes
    for record in list(cache._guesses.values()):
        cache.finish_read(record)
    prefill = engine.last_receipt.bytes_read
    read = engine.reader.counters.bytes - prefill
    assert read == (totals.misses + counts.guesses) * expert
    wasted = counts.guesses - counts.guesses_used - len(cache._guesses)
    assert counts.wasted_nbytes == wasted * expert
    assert counts.guesses_used > 0
    assert totals.hits >= counts.guesses_used


@pytest.mark.parametrize("predict", ["previous", "lookahead"])
def test_guesses_leave_used_records_their_share(run, monkeypatch, predict):
    """They never hold more than their slots, and only they give way to each other."""
    limits = []

    def watch(engine):
        cache = engine.decoder.cache
        guess = cache.guess

        def counted(mlp, expert, pinned):
            used = cache.keys() - set(cache._guesses)
            done = guess(mlp, expert, pinned)
            lost = used - cache.keys()
            # A used record may leave only while used ones hold more than their share.
            limits.append((len(cache._guesses), cache.guess_limit, len(lost), len(used)))
            assert len(lost) <= 1
            assert not lost or len(used) > cache.evictable
            return done

        monkeypatch.setattr(cache, "guess", counted)

    run(predict, before=watch)
    assert limits
    assert all(held <= limit == GUESS_SETS * TOP_K for held, limit, _, _ in limits)


@pytest.mark.parametrize("held", [1, 3, ENOUGH - 1])
def test_small_caches_are_not_filled_with_guesses(run, held):
    engine = run("lookahead", held)
    assert engine.decoder.cache.counts.guesses == 0
    assert engine.decode_metrics.totals.predicted == 0


def test_it_switches_itself_off_and_on_again(run, monkeypatch):
    """`auto` with a liar: it rests after a window, and tries again after the rest."""
    rest = 40
    monkeypatch.setattr("mlx_stream.decode.predict.REST_TOKENS", rest)
    assert rest < REST_TOKENS
    monkeypatch.setattr(
        Lookahead, "route", lambda self, experts, x: mx.zeros((1, TOP_K), dtype=mx.uint32)
    )
    token = PayMeter.token  # a lie that comes true by chance, on a slow moment, must not count
    monkeypatch.setattr(PayMeter, "token", lambda self, saved, cost: token(self, 0.0, cost))
    steps = 2 * WINDOW_TOKENS + rest + 10
    engine = run("auto", 14, steps=steps)
    named = [step.predicted > 0 for step in engine.decode_metrics.history]
    window = [True] * WINDOW_TOKENS
    assert named == (window + [False] * rest + window + [False] * steps)[: steps - 1]
    assert engine.decoder.exact.ahead.meter.switched_off == 2
