"""Tight budgets: smaller groups and chunks, several segments, the same answers, honest receipts."""

import re

import numpy as np
import pytest

from mlx_stream.backends.cpu.backend import CpuBackend
from mlx_stream.config import parse_bytes
from mlx_stream.errors import BudgetError
from tests.prefill.running import decode, relative, settled_prompt, smallest_budget
from tests.support.checkpoints import random_tokens

N, STEPS = 83, 6


@pytest.fixture
def small(monkeypatch):
    """Budgets of a few megabytes: no fixed working memory, and segments down to 8 tokens."""
    monkeypatch.setattr(CpuBackend, "scratch_nbytes", lambda self, mlps: 0)
    monkeypatch.setattr("mlx_stream.planner.fit.SMALL_CHUNK", 8)
    # The check at load allows for the widest alignment, which is more than these tiny experts.
    monkeypatch.setattr("mlx_stream.loader.DIRECT_ALIGN", 1)


@pytest.mark.parametrize("name", ["qwen3_moe", "llama4", "qwen3_next", "deepseek_v32"])
def test_the_smallest_budget_gives_the_same_answer(checkpoint, stock, open_engine, small, name):
    path = checkpoint(name)
    prompt, rows = settled_prompt(stock(path), N, STEPS)
    roomy = open_engine(path, chunk_tokens=64, io="buffered")
    assert len(roomy.plan(N).segments) == 1
    budget = smallest_budget(roomy, N)

    tight = open_engine(path, chunk_tokens=64, io="buffered", memory_budget=budget)
    plan = tight.plan(N)
    assert len(plan.segments) >= 8
    assert plan.chunk_tokens <= 16
    assert (plan.group_size, plan.slots) == (1, 2)
    result = tight.prefill(prompt)
    receipt = result.receipt
    assert receipt.segments == len(plan.segments)
    assert receipt.bytes_read == receipt.segments * tight.index.nbytes
    assert receipt.bytes_read == plan.planned_read_nbytes
    used = receipt.distinct_expert_bytes / tight.index.nbytes
    assert receipt.read_amplification == pytest.approx(receipt.segments / used)
    assert relative(result.logits, rows[0]) < 1e-4
    assert decode(tight, result, prompt, STEPS) == [int(row.argmax()) for row in rows]
    assert tight.budget.peak <= budget


def test_every_budget_in_between_gives_the_same_answer(checkpoint, stock, open_engine, small):
    path = checkpoint("qwen3_moe")
    prompt, rows = settled_prompt(stock(path), N, STEPS)
    low = smallest_budget(open_engine(path), N)
    seen = set()
    for extra in (40_000, 110_000, 160_000, 220_000, 400_000, 2_000_000):
        engine = open_engine(path, chunk_tokens=64, io="buffered", memory_budget=low + extra)
        result = engine.prefill(prompt)
        seen.add((result.receipt.segments, result.receipt.chunk_tokens))
        assert result.receipt.bytes_read == result.receipt.segments * engine.index.nbytes
        assert relative(result.logits, rows[0]) < 1e-4
        assert decode(engine, result, prompt, STEPS) == [int(row.argmax()) for row in rows]
        assert engine.budget.peak <= engine.budget.total
        engine.close()
    assert len(seen) >= 4, "these budgets should give different plans"


def test_group_size_does_not_change_one_bit(checkpoint, open_engine, monkeypatch):
    """Experts add up in file order, however many come at a time."""
    path = checkpoint("qwen3_moe")
    prompt = random_tokens(160, N)
    logits, groups = [], []
    for group_nbytes in (1, 60_000, 48 << 20):
        monkeypatch.setattr("mlx_stream.planner.fit.TARGET_GROUP_NBYTES", group_nbytes)
        engine = open_engine(path)
        groups.append(engine.plan(N).group_size)
        logits.append(np.array(engine.prefill(prompt).logits))
        engine.close()
    assert len(set(groups)) == 3
    assert (logits[0] == logits[1]).all()
    assert (logits[0] == logits[2]).all()


def test_a_refused_prompt_names_a_budget_that_works(checkpoint, open_engine, small):
    path = checkpoint("qwen3_moe")
    prompt = random_tokens(160, N)
    budget = smallest_budget(open_engine(path), N)
    engine = open_engine(path, memory_budget=budget - 8192)
    with pytest.raises(BudgetError) as caught:
        engine.prefill(prompt)
    assert engine.reader.counters.bytes == 0, "refused before any work"
    named = parse_bytes(re.search(r"memory_budget to ([\d.]+ \w+)", caught.value.remedy)[1])
    engine.close()
    enough = open_engine(path, memory_budget=named)
    assert np.isfinite(np.array(enough.prefill(prompt).logits)).all()


def test_a_short_prompt_still_runs_after_a_refused_one(checkpoint, stock, open_engine, small):
    path = checkpoint("qwen3_moe")
    prompt, rows = settled_prompt(stock(path), 20, 1)
    budget = smallest_budget(open_engine(path), 20)
    engine = open_engine(path, memory_budget=budget)
    with pytest.raises(BudgetError):
        engine.prefill(random_tokens(160, 2000))
    assert relative(engine.prefill(prompt).logits, rows[0]) < 1e-4


def test_resident_weights_alone_over_the_budget(checkpoint, open_engine):
    """Refused while loading, before a weight is read; the advice is for a prompt, not for less."""
    with pytest.raises(BudgetError) as caught:
        open_engine(checkpoint("qwen3_moe"), memory_budget=10_000)
    named = parse_bytes(re.search(r"memory_budget to ([\d.]+ \w+)", caught.value.remedy)[1])
    result = open_engine(checkpoint("qwen3_moe"), memory_budget=named).prefill([1, 2, 3])
    assert result.receipt.budget_bytes == named


@pytest.mark.parametrize("past", [0, 40])
def test_prompts_on_a_filled_cache_are_planned_with_it(checkpoint, open_engine, past):
    engine = open_engine(checkpoint("qwen3_moe"))
    plan = engine.plan(300, past_tokens=past)
    alone = engine.plan(300)
    assert plan.memory.kv >= alone.memory.kv
    assert engine.plan(300, past_tokens=4000).memory.kv > alone.memory.kv
