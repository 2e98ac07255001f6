"""The staged path: the next token's experts are named from the last ones, and only hints."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_stream.decode.staged import SPARE_SHARE, RecentTokens
from tests.decode.running import answer, check_slots, hold, settled_answer

N, STEPS, TOP_K = 30, 24, 2


@given(
    tokens=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True), max_size=12),
    keep=st.integers(1, 5),
)
def test_recent_tokens_are_named_latest_first(tokens, keep):
    recent = RecentTokens(keep)
    for token in tokens:
        recent.note(1, token)
        recent.note(2, [0])
    expected = []
    for token in tokens[::-1][:keep]:
        expected += [e for e in token if e not in expected]
    assert list(recent.experts(1)) == expected
    assert list(recent.experts(7)) == []


@pytest.fixture
def run(checkpoint, stock, request, monkeypatch):
    def start(held, *, kind="open_metal", before=lambda engine: None):
        path = checkpoint("qwen3_moe")
        prompt, expected = settled_answer(stock, path, N, STEPS)
        engine = request.getfixturevalue(kind)(path, decode_path="staged", predict="off")
        hold(engine, monkeypatch, held)
        before(engine)
        assert answer(engine, prompt, STEPS) == expected
        check_slots(engine)
        return engine

    return start


@pytest.mark.parametrize("kind", ["open_engine", "open_metal"])
def test_the_predictor_hears_of_every_layer_of_every_token(run, kind):
    """From both kinds of steps, and together with an observer."""
    heard, seen = [], []

    def watch(engine):
        predictor = engine.decoder._token_ahead._predictor
        note = predictor.note
        predictor.note = lambda layer, e: (heard.append((layer, tuple(e))), note(layer, e))
        engine.decoder.observer = lambda layer, ids, prefill: (
            prefill or seen.extend((layer, tuple(row)) for row in ids.tolist())
        )

    engine = run(16, kind=kind, before=watch)
    assert set(engine.decode_metrics.totals.paths) == {"exact", "staged"}
    assert heard == seen
    assert len(seen) == len(engine.index.layers) * (STEPS - 1)
    engine.decoder.observer = None
    answer(engine, list(range(N)), 3)
    assert len(heard) == len(seen) + 2 * len(engine.index.layers)


@pytest.mark.parametrize("held", [5, 6, 8])
def test_what_was_evicted_is_read_again_for_the_next_token(run, held):
    """A cache of less than a token's experts: the last token's are read between steps."""
    engine = run(held)
    counts = engine.decoder.cache.counts
    assert counts.guesses > 0
    assert counts.guesses_used > 0
    assert engine.decoder.cache.guess_limit == held // SPARE_SHARE


@pytest.mark.parametrize("kind", ["open_engine", "open_metal"])
@pytest.mark.parametrize("names", [range(8), range(7, -1, -1), (0,), ()])
def test_a_predictor_that_lies_changes_no_token(run, kind, names):
    class Liar:
        def note(self, layer, experts):
            pass

        def experts(self, layer):
            return list(names)

    def lie(engine):
        engine.decoder._token_ahead._predictor = Liar()

    engine = run(12, kind=kind, before=lie)
    assert bool(engine.decoder.cache.counts.guesses) is bool(names)
