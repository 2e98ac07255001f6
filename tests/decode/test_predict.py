"""Prediction: whose router it asks, and when it pays."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_stream.decode.predict import (
    REST_TOKENS,
    WINDOW_TOKENS,
    Lookahead,
    PayMeter,
    PredictionCounts,
    PreviousToken,
)
from tests.decode.running import answer


def lookahead(engine):
    loaded = engine._loaded
    return Lookahead(
        loaded.model,
        loaded.streamed,
        loaded.slot,
        hidden=loaded.shape.hidden,
        dtype=loaded.dtype,
    )


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral", "olmoe"])
def test_it_asks_the_next_layers_own_router(checkpoint, open_engine, name):
    """Equal to the top k of the next block's gate on the same input."""
    engine = open_engine(checkpoint(name))
    ahead = lookahead(engine)
    streamed = engine._loaded.streamed
    assert ahead.layers == len(streamed) - 1
    blocks = [m for _, m in engine.model.named_modules() if "gate" in m and "switch_mlp" in m]
    blocks = sorted(blocks, key=lambda m: m.switch_mlp.mlp.layer.index)
    x = mx.random.normal((1, 3, engine._shape.hidden), key=mx.random.key(5))
    for n, here in enumerate(streamed[:-1]):
        ids = np.array(ahead.route(here, x))
        scores = np.array(blocks[n + 1].gate(x.reshape(3, -1)))
        best = np.argsort(-scores, axis=-1)[:, : engine._shape.top_k]
        assert (np.sort(ids) == np.sort(best)).all()
        assert ahead.next_layer(here) is streamed[n + 1]
    assert ahead.route(streamed[-1], x) is None
    assert ahead.next_layer(streamed[-1]) is None


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "qwen3_next", "deepseek_v3", "llama4"])
def test_asking_computes_no_expert_and_reads_nothing(checkpoint, open_engine, name):
    engine = open_engine(checkpoint(name))
    before, executor = engine.reader.counters, engine._loaded.slot.executor
    ahead = lookahead(engine)
    x = mx.zeros((1, 1, engine._shape.hidden), dtype=engine._loaded.dtype)
    for here in engine._loaded.streamed:
        ids = ahead.route(here, x)
        if ids is not None:
            mx.eval(ids)
            assert ids.shape == (1, engine._shape.top_k)
    assert ahead.layers > 0
    assert engine.reader.counters == before
    assert engine._loaded.slot.executor is executor, "the executor in charge is put back"


def test_blocks_that_cannot_be_asked_are_left_out(checkpoint, open_engine, monkeypatch):
    """A block that fails on a probe is not predicted, and decoding goes on."""
    path = checkpoint("qwen3_moe")
    plain = answer(open_engine(path, predict="off"), list(range(30)), 8)

    def refuse(self, block, x):
        raise TypeError("this block takes more than a hidden state")

    monkeypatch.setattr(Lookahead, "_indices", refuse)
    engine = open_engine(path, predict="lookahead")
    assert lookahead(engine).layers == 0
    assert engine.decoder.exact.ahead._lookahead is None
    assert answer(engine, list(range(30)), 8) == plain


def test_experts_of_another_width_are_not_predicted(checkpoint, open_engine):
    loaded = open_engine(checkpoint("qwen3_moe"))._loaded
    ahead = Lookahead(loaded.model, loaded.streamed, loaded.slot, hidden=64, dtype=loaded.dtype)
    assert ahead.layers == 0


def test_the_previous_tokens_experts():
    previous = PreviousToken()
    assert previous.experts(3).tolist() == []
    previous.note(3, [5, 1])
    previous.note(4, np.array([2]))
    assert previous.experts(3).tolist() == [5, 1]
    previous.note(3, [7])
    assert previous.experts(3).tolist() == [7]


def test_counts():
    assert PredictionCounts().recall == 0.0
    counts = PredictionCounts(predicted=8, correct=3, routed=6)
    assert counts.recall == 0.5
    assert counts.as_tuple() == (8, 3, 6)


def test_it_switches_off_rests_and_tries_again():
    meter = PayMeter(always=False)
    for _ in range(WINDOW_TOKENS):
        assert meter.active
        meter.token(0.0, 1.0)
    assert not meter.active
    for _ in range(REST_TOKENS):
        assert not meter.active
        meter.token(9.0, 0.0)  # what happens meanwhile does not count
    for _ in range(3 * WINDOW_TOKENS):
        assert meter.active
        meter.token(1.0, 0.5)
    assert meter.switched_off == 1
    for _ in range(WINDOW_TOKENS):
        meter.token(0.5, 0.5)
    assert not meter.active, "what saves nothing is not worth it"
    assert meter.switched_off == 2


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=200))
def test_it_decides_by_sums_over_windows(tokens):
    """Against a plain recount, window by window; `always` never rests."""
    meter, always = PayMeter(always=False), PayMeter(always=True)
    window, resting = [], 0
    for saved, cost in tokens:
        assert meter.active is (resting == 0)
        assert always.active
        meter.token(saved, cost)
        always.token(saved, cost)
        if resting:
            resting -= 1
            continue
        window.append((saved, cost))
        if len(window) == WINDOW_TOKENS:
            gained = sum(s for s, _ in window) > sum(c for _, c in window)
            resting, window = (0 if gained else REST_TOKENS), []
    assert always.switched_off == 0
