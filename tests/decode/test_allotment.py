"""The expert cache follows the budget and the machine's free memory; tokens stay the same."""

from __future__ import annotations

from itertools import islice

import mlx.core as mx
import pytest

from mlx_stream.backends.cpu.backend import CpuBackend
from mlx_stream.backends.metal import MetalBackend
from mlx_stream.errors import BudgetError
from tests.decode.running import check_slots, records, settled_answer
from tests.prefill.running import greedy, smallest_budget

N, STEPS = 30, 48
MANY = {"changes": {"num_experts": 64}}


@pytest.fixture(autouse=True)
def small_scale(monkeypatch):
    """Budgets of a few MB: no room set aside for work that tiny models do not do."""
    monkeypatch.setattr(CpuBackend, "scratch_nbytes", lambda self, mlps: 0)
    monkeypatch.setattr(MetalBackend, "scratch_nbytes", lambda self, mlps: 0)
    monkeypatch.setattr("mlx_stream.loader.DIRECT_ALIGN", 1)


@pytest.fixture
def low(checkpoint, small_scale):
    """``low(open_one, **options)``: about the least budget for N tokens."""

    def find(open_one, **options):
        engine = open_one(checkpoint("qwen3_moe", **MANY), **options)
        found = smallest_budget(engine, N)
        engine.close()
        return found

    return find


def within_budget(engine):
    cache, budget = engine.decoder.cache, engine.budget
    assert budget.used <= budget.total
    assert cache.nbytes <= budget.owner("expert cache")
    assert cache.capacity >= 1
    check_slots(engine)


def free_is(engine, free):
    """The machine has `free[0]` bytes free and wants to keep 100 KB."""
    engine._allotment._free_bytes = lambda: free[0]
    engine._allotment._reserve = 100_000


KINDS = [
    ("open_engine", {"io": "buffered"}),
    ("open_metal", {"decode_path": "exact"}),
    ("open_metal", {"decode_path": "hot"}),
    ("open_metal", {"decode_path": "staged"}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_the_budget_changes_between_tokens(checkpoint, stock, request, low, kind, options):
    path = checkpoint("qwen3_moe", **MANY)
    prompt, expected = settled_answer(stock, path, N, STEPS)
    open_one = request.getfixturevalue(kind)
    low = low(open_one, **options)
    engine = open_one(path, memory_budget=low + 4_000_000, **options)
    tokens = engine.decode(engine.prefill(prompt), prompt, sampler=greedy)
    got, sizes = [], []
    for extra in (300_000, 3_000_000, 200_000, 1_000_000, 5_000_000, 250_000):
        got += [token for token, _ in islice(tokens, 6)]
        engine.change_budget(low + extra)
        engine.budget.peak = engine.budget.used
        within_budget(engine)
        sizes.append(engine.decoder.cache.capacity)
        got += [next(tokens)[0]]
        within_budget(engine)
        assert engine.budget.peak <= engine.budget.total
    assert got == expected[: len(got)]
    assert sizes[2] < sizes[0] or sizes[2] < records(engine) // 4
    assert sizes[1] > sizes[2]
    assert sizes[4] > sizes[5]
    if engine.decoder.plan.stacked:  # they are moved only where that doubles them
        assert sizes[1] >= 2 * sizes[0]
        assert sizes[3] == sizes[2]
        assert sizes[4] >= 2 * sizes[3]
    else:
        assert sizes[1] > sizes[0] > sizes[2]
        assert sizes[4] > sizes[3]
    assert engine.prefill(prompt).receipt.budget_bytes == low + 250_000


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_a_budget_below_what_must_stay_changes_nothing(checkpoint, request, low, kind, options):
    open_one = request.getfixturevalue(kind)
    room = low(open_one, **options) + 2_000_000
    engine = open_one(checkpoint("qwen3_moe", **MANY), memory_budget=room, **options)
    prompt = list(range(N))
    tokens = engine.decode(engine.prefill(prompt), prompt, sampler=greedy)
    next(tokens)
    before = (engine.budget.total, engine.budget.used, engine.decoder.cache.keys())
    least = engine.budget.used - engine.decoder.nbytes + engine.decoder.nbytes_least
    with pytest.raises(BudgetError, match="smaller than what must stay"):
        engine.change_budget(least - 1)
    assert before == (engine.budget.total, engine.budget.used, engine.decoder.cache.keys())
    engine.change_budget(least)
    assert engine.decoder.cache.capacity == 1
    within_budget(engine)
    next(tokens)
    within_budget(engine)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_free_memory_collapses_and_recovers(checkpoint, stock, request, low, kind, options):
    path = checkpoint("qwen3_moe", **MANY)
    steps = 120
    prompt, expected = settled_answer(stock, path, N, steps)
    open_one = request.getfixturevalue(kind)
    engine = open_one(path, memory_budget=low(open_one, **options) + 3_000_000, **options)
    free = [10**9]
    free_is(engine, free)
    cache = engine.decoder.cache
    tokens = engine.decode(engine.prefill(prompt), prompt, sampler=greedy)
    got = [token for token, _ in islice(tokens, 10)]
    full, active, after_step = cache.capacity, [], engine._allotment.after_step

    def measured(step):
        active.append(engine.backend.memory().active)
        after_step(step)
        active.append(engine.backend.memory().active)

    engine._allotment.after_step = measured
    free[0] = 100_000 - 5 * cache.slot_nbytes  # five slots are missing
    got.append(next(tokens)[0])
    held = engine.decode_metrics.last.cache_bytes
    assert cache.nbytes <= held - 5 * cache.slot_nbytes, "at once"
    assert cache.capacity < full
    assert active[0] - active[1] >= 4 * cache.slot_nbytes, "given back"
    within_budget(engine)

    free[0] = 0
    for _ in range(10):
        got.append(next(tokens)[0])
        within_budget(engine)
    smallest = cache.capacity
    assert 1 <= smallest < full

    free[0] = 10**9
    for _ in range(70):
        got.append(next(tokens)[0])
        within_budget(engine)
    if not engine.decoder.plan.stacked:  # those wait until half as much again is free
        assert cache.capacity > smallest, "it grows back"

    free[0] = -(10**12)
    while len(got) < steps:
        got.append(next(tokens)[0])
        assert cache.capacity == 1, "never less than a record"
        within_budget(engine)
    assert got == expected
    assert engine.budget.peak <= engine.budget.total


def test_slots_go_back_to_the_system(checkpoint, low, open_metal):
    """MLX's buffer cache and the backend's pool keep nothing of a cache that shrank."""
    room = low(open_metal, decode_path="exact") + 3_000_000
    engine = open_metal(checkpoint("qwen3_moe", **MANY), memory_budget=room, decode_path="exact")
    free_is(engine, free := [10**9])
    prompt = list(range(N))
    tokens = engine.decode(engine.prefill(prompt), prompt, sampler=greedy)
    list(islice(tokens, 20))
    held = engine.decoder.cache.nbytes
    before = mx.get_active_memory() + mx.get_cache_memory()
    free[0] = -(10**12)
    next(tokens)
    after = mx.get_active_memory() + mx.get_cache_memory()
    assert before - after >= 0.9 * (held - engine.decoder.cache.nbytes) > 1_000_000


def test_a_short_prompt_after_a_long_one(checkpoint, open_engine):
    """Its plan gives the room of the long prompt's keys and values to the expert cache."""
    path = checkpoint("qwen3_moe", changes={"num_experts": 256, "num_hidden_layers": 8})
    engine = open_engine(path, io="buffered", memory_budget=20_000_000)
    long, short = engine.plan(3000), engine.plan(5)
    assert short.memory.expert_cache + long.memory.kv > engine.budget.total
    for plan in (long, short, long):
        engine._allotment.grant(plan)
        assert engine.budget.used <= engine.budget.total
        engine._allotment.settle()
        within_budget(engine)


def test_an_unasked_budget_starts_small(checkpoint, stock, open_engine, low, monkeypatch):
    """The default budget is a limit, not a wish: a quarter at first."""
    path = checkpoint("qwen3_moe", **MANY)
    room = low(open_engine, io="buffered") + 3_000_000
    monkeypatch.setattr("mlx_stream.engine.default_budget", lambda limit: (room, "free memory"))
    engine = open_engine(path, io="buffered", memory_budget=None)
    free_is(engine, [10**9])
    prompt, expected = settled_answer(stock, path, N, 12)
    result = engine.prefill(prompt)
    assert engine.budget.owner("expert cache") <= room // 3
    tokens = engine.decode(result, prompt, sampler=greedy)
    assert [token for token, _ in islice(tokens, 12)] == expected
    within_budget(engine)


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_the_smallest_budget_is_enough(checkpoint, stock, request, low, kind, options):
    """What the plan says fits can be granted, with all that the path takes besides records."""
    path = checkpoint("qwen3_moe", **MANY)
    prompt, expected = settled_answer(stock, path, N, 8)
    open_one = request.getfixturevalue(kind)
    least = low(open_one, **options)
    for extra in (0, 50_000, 400_000):
        engine = open_one(path, memory_budget=least + extra, **options)
        tokens = engine.decode(engine.prefill(prompt), prompt, sampler=greedy)
        assert [token for token, _ in islice(tokens, 8)] == expected
        within_budget(engine)
        assert engine.budget.peak <= engine.budget.total
        engine.close()


def test_a_draft_model_is_in_the_budget(checkpoint, stock, open_engine, low):
    """The plan leaves it its room, whatever the budget."""
    path = checkpoint("qwen3_moe", **MANY)
    least = low(open_engine, io="buffered")
    prompt, expected = settled_answer(stock, path, N, 8)
    size = sum(p.stat().st_size for p in checkpoint("qwen3_moe").glob("*.safetensors"))
    for extra in (300_000, 1_000_000):
        engine = open_engine(path, io="buffered", memory_budget=least + size + extra)
        engine.load_draft(checkpoint("qwen3_moe"), 2)
        assert engine.budget.owner("draft model") > size // 2
        result = engine.prefill(prompt)
        drawn = engine.decode_speculative(result, prompt, sampler=greedy)
        assert [d.token for d in islice(drawn, 8)] == expected
        within_budget(engine)
        assert engine.budget.peak <= engine.budget.total
        engine.close()
