"""Slots under laziness, Ctrl-C and failing reads at any point: on every path the tokens stay."""

from __future__ import annotations

from itertools import islice

import mlx.core as mx
import pytest

from mlx_stream import interrupts
from mlx_stream.decode.exact import ExactExecutor
from mlx_stream.decode.planar_slots import PlanarSlots
from mlx_stream.decode.readahead import ReadAhead
from mlx_stream.decode.slots import RecordSlots
from mlx_stream.errors import ReadError
from tests.backends.test_slot_reuse import LazyMlx
from tests.decode.running import answer, check_slots, hold, settled_answer
from tests.prefill.running import greedy
from tests.support.faults import FailingReads, install_fault, nothing_left

N, STEPS, TOP_K = 30, 24, 2
RUBBISH = 0xFF  # scales of NaN

# Stacked slots without a mapped step in between: the exact path on planes.
STORES = ("records", "planes")


@pytest.fixture
def lazy_and_poisoned(monkeypatch):
    """No work before somebody waits for it; a slot's old bytes are ruined when it is given away."""
    monkeypatch.setattr("mlx_stream.backends.mlx_ops.mx", LazyMlx())
    poisoned = []

    def ruin(store, slot):
        poisoned.append(slot)
        if isinstance(store, PlanarSlots):
            for key in store.planes:
                store._planes.view(key, slot)[:] = RUBBISH
        else:
            slot.array[:] = RUBBISH

    for cls in (RecordSlots, PlanarSlots):
        start_read, copy_in = cls.start_read, cls.copy_in

        def start(self, mlp, expert, slot, _real=start_read):
            ruin(self, slot)
            return _real(self, mlp, expert, slot)

        def copy(self, mlp, expert, read, source, slot, _real=copy_in):
            ruin(self, slot)
            return _real(self, mlp, expert, read, source, slot)

        monkeypatch.setattr(cls, "start_read", start)
        monkeypatch.setattr(cls, "copy_in", copy)
    return poisoned


def always_guess(monkeypatch):
    """Read ahead even where the cache is much too small for it."""

    def active(self):
        self._cache.guess_limit = min(2, self._cache.capacity - 1)
        return self._cache.guess_limit > 0

    monkeypatch.setattr(ReadAhead, "active", property(active))


def lazy_engine(open_metal, path, store, monkeypatch, capacity, **options):
    engine = open_metal(path, decode_path="hot" if store == "planes" else "exact", **options)
    hold(engine, monkeypatch, capacity)
    return engine


@pytest.mark.parametrize("capacity", range(1, TOP_K + 3))
@pytest.mark.parametrize("store", STORES)
def test_no_slot_is_given_away_while_work_may_read_it(
    checkpoint, stock, open_metal, monkeypatch, lazy_and_poisoned, store, capacity
):
    path = checkpoint("qwen3_moe")
    prompt, expected = settled_answer(stock, path, N, STEPS)
    engine = lazy_engine(open_metal, path, store, monkeypatch, capacity, predict="off")
    assert answer(engine, prompt, STEPS) == expected
    assert len(lazy_and_poisoned) > STEPS


@pytest.mark.parametrize("capacity", [2, 3, 4, 5, 9])
@pytest.mark.parametrize("predict", ["previous", "lookahead"])
@pytest.mark.parametrize("store", STORES)
def test_nor_with_reads_ahead(
    checkpoint, stock, open_metal, monkeypatch, lazy_and_poisoned, store, predict, capacity
):
    always_guess(monkeypatch)
    path = checkpoint("qwen3_moe")
    prompt, expected = settled_answer(stock, path, N, STEPS)
    engine = lazy_engine(open_metal, path, store, monkeypatch, capacity, predict=predict)
    assert answer(engine, prompt, STEPS) == expected
    counts = engine.decoder.cache.counts
    assert capacity == TOP_K or counts.guesses > counts.guesses_used
    check_slots(engine)


@pytest.mark.parametrize("capacity", [6, 8, 12])
def test_nor_on_the_staged_path(
    checkpoint, stock, open_metal, monkeypatch, lazy_and_poisoned, capacity
):
    """Guesses land while steps of both kinds alternate."""
    path = checkpoint("qwen3_moe")
    prompt, expected = settled_answer(stock, path, N, 2 * STEPS)
    engine = open_metal(path, decode_path="staged", predict="off")
    hold(engine, monkeypatch, capacity)
    assert answer(engine, prompt, 2 * STEPS) == expected
    assert engine.decoder.cache.counts.guesses > 0
    assert engine.decode_metrics.totals.redone > 0


@pytest.mark.parametrize("store", STORES)
def test_a_fence_that_forgets_to_wait_is_detected(
    checkpoint, stock, open_metal, monkeypatch, lazy_and_poisoned, store
):
    """The deliberate bug: without the wait, the tests above must see wrong tokens."""

    def forgets(self, *, expected):
        self._fences.clear()
        self._in_use.clear()

    monkeypatch.setattr(ExactExecutor, "_settle", forgets)
    path = checkpoint("qwen3_moe")
    prompt, expected = settled_answer(stock, path, N, STEPS)
    engine = lazy_engine(open_metal, path, store, monkeypatch, 1, predict="off")
    assert answer(engine, prompt, STEPS) != expected


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("store", STORES)
def test_records_in_use_that_are_not_pinned_are_detected(
    checkpoint, stock, open_metal, monkeypatch, lazy_and_poisoned, store, broken
):
    """Another deliberate bug: the cache is not told what is in use."""
    real = ExactExecutor._start

    def start(self, mlp, misses):
        kept, self._in_use = self._in_use, set()
        try:
            return real(self, mlp, misses)
        finally:
            self._in_use |= kept

    # One expert layer: hits may hold every slot when a miss comes.
    path = checkpoint(
        "qwen3_moe",
        changes={"num_hidden_layers": 1, "mlp_only_layers": [], "num_experts_per_tok": 3},
    )
    prompt, expected = settled_answer(stock, path, N, STEPS)
    engine = lazy_engine(open_metal, path, store, monkeypatch, 2, predict="off")
    if broken:
        monkeypatch.setattr(ExactExecutor, "_start", start)
    assert (answer(engine, prompt, STEPS) == expected) is not broken


# --- Ctrl-C and failing reads


class InterruptAt:
    """Ctrl-C at the n-th safe point, and perhaps again at the ones after it."""

    def __init__(self, monkeypatch, when, times=1):
        self._left, self._times, self.raised = when, times, 0
        self._real = interrupts.check
        monkeypatch.setattr(interrupts, "check", self)

    def __call__(self):
        self._left -= 1
        if self._left <= 0 < self._times:
            self._times -= 1
            self.raised += 1
            raise KeyboardInterrupt
        self._real()


CASES = [
    ("open_engine", "exact", "previous", 6),
    ("open_engine", "exact", "lookahead", 14),
    ("open_engine", "staged", "off", 12),
    ("open_metal", "exact", "lookahead", 14),
    ("open_metal", "auto", "previous", 32),
    ("open_metal", "hot", "off", 12),
    ("open_metal", "hot", "off", 32),
    ("open_metal", "staged", "off", 16),
    ("open_metal", "whole-layer", "off", 12),
]


def take(tokens, count, into=None):
    """The next tokens, kept in `into` as they come."""
    into = [] if into is None else into
    into.extend(token for token, _ in islice(tokens, count))
    return into


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(("kind", "path", "predict", "capacity"), CASES)
def test_ctrl_c_at_any_safe_point(
    checkpoint, stock, request, monkeypatch, kind, path, predict, capacity, times
):
    """The cache of the conversation is as before the step, and the expert cache is sound."""
    folder = checkpoint("qwen3_moe")
    prompt, expected = settled_answer(stock, folder, N, STEPS)
    with nothing_left():
        engine = request.getfixturevalue(kind)(folder, decode_path=path, predict=predict)
        hold(engine, monkeypatch, capacity)
        interrupted = 0
        for when in (1, 2, 3, 4, 5, 7, 9, 12, 16, 23):
            result = engine.prefill(prompt)
            tokens = engine.decode(result, prompt, sampler=greedy)
            got = take(tokens, 3)
            with monkeypatch.context() as patch:
                stop = InterruptAt(patch, when, times)
                try:
                    take(tokens, 3, got)
                except KeyboardInterrupt:
                    interrupted += 1
                    del tokens
            assert stop.raised in (0, 1, times)
            check_slots(engine)
            assert got == expected[: len(got)]
            assert result.cache[0].offset == N + len(got) - 1
            if stop.raised:
                # A step that was interrupted gave no token: the one before goes in again.
                again = engine.prefill([got[-1]], result.cache)
                more = take(engine.decode(again, prompt, sampler=greedy), 4)
                assert more == expected[len(got) : len(got) + 4]
            check_slots(engine)
        assert interrupted >= 3
        assert not any(r.arrival for r in engine.decoder.cache._records.values() if not r.guess)
        assert answer(engine, prompt, STEPS) == expected
        engine.close()


@pytest.mark.parametrize(("kind", "path", "predict", "capacity"), CASES)
def test_failing_reads_at_any_point(
    checkpoint, stock, request, monkeypatch, kind, path, predict, capacity
):
    fault = FailingReads()
    install_fault(monkeypatch, fault)
    folder = checkpoint("qwen3_moe")
    prompt, expected = settled_answer(stock, folder, N, STEPS)
    with nothing_left():
        engine = request.getfixturevalue(kind)(folder, decode_path=path, predict=predict)
        hold(engine, monkeypatch, capacity)
        failed = 0
        for skip in (0, 1, 2, 3, 5, 8, 13):
            result = engine.prefill(prompt)
            tokens = engine.decode(result, prompt, sampler=greedy)
            got = take(tokens, 3)
            fault.arm(skip=skip, times=1 if skip % 2 else 10**9)
            try:
                take(tokens, 5, got)
            except ReadError:
                failed += 1
                del tokens
            fault.disarm()
            check_slots(engine)
            assert got == expected[: len(got)]
            assert result.cache[0].offset == N + len(got) - 1
            again = engine.prefill([got[-1]], result.cache)
            assert int(mx.argmax(again.logits).item()) == expected[len(got)]
            check_slots(engine)
        if capacity < 32:
            assert failed >= 3
        assert answer(engine, prompt, STEPS) == expected
        engine.close()


def test_recurrent_state_after_an_interrupted_step(checkpoint, stock, open_metal, monkeypatch):
    """State that is not only appended to, on the path that may take a step twice."""
    path = checkpoint("qwen3_next")
    prompt, expected = settled_answer(stock, path, N, STEPS)
    engine = open_metal(path, decode_path="hot")
    hold(engine, monkeypatch, 9)
    for when in (1, 2, 4, 6, 9, 13):
        result = engine.prefill(prompt)
        tokens = engine.decode(result, prompt, sampler=greedy)
        got = take(tokens, 4)
        with monkeypatch.context() as patch:
            InterruptAt(patch, when)
            with pytest.raises(KeyboardInterrupt):
                take(tokens, 8, got)
        again = engine.prefill([got[-1]], result.cache)
        more = take(engine.decode(again, prompt, sampler=greedy), 6)
        assert more == expected[len(got) : len(got) + 6]
    assert engine.decode_metrics.totals.redone > 0


def test_guesses_that_fail_are_silent(checkpoint, stock, open_engine, monkeypatch):
    """Hints only: the read that is needed is tried again, and it alone may fail."""
    always_guess(monkeypatch)
    path = checkpoint("qwen3_moe")
    prompt, expected = settled_answer(stock, path, N, STEPS)
    engine = open_engine(path, predict="previous")
    hold(engine, monkeypatch, 10)
    cache = engine.decoder.cache
    start, guessing = cache.store.start_read, []
    guess = cache.guess

    class Fails:
        def done(self):
            return True

        def cancel(self):
            return None

        def wait(self):
            raise ReadError("no", expected="a read", actual="none", remedy="none")

    def flagged(*args):
        guessing.append(1)
        try:
            return guess(*args)
        finally:
            guessing.pop()

    def start_read(mlp, expert, slot):
        record = start(mlp, expert, slot)
        if guessing:
            record.arrival.wait()
            record.arrival = Fails()
        return record

    monkeypatch.setattr(cache, "guess", flagged)
    monkeypatch.setattr(cache.store, "start_read", start_read)
    assert answer(engine, prompt, STEPS) == expected
    assert cache.counts.guesses > 0
    assert cache.counts.guesses_used == 0
    check_slots(engine)
