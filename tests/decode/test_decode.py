"""Decoding from any cache, of any size, gives the same tokens; a failed read leaves no trace."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_stream.backends.cpu.backend import CpuBackend
from mlx_stream.errors import ReadError
from tests.prefill.running import (
    decode,
    generate,
    greedy,
    relative,
    settled_prompt,
    smallest_budget,
)
from tests.support.faults import FailingReads, install_fault

N, STEPS = 30, 8


def answer(rows):
    return [int(row.argmax()) for row in rows]


def hold(engine, capacity, monkeypatch):
    """Keep the expert cache at `capacity` records from now on."""
    engine.decoder.cache.resize(capacity)
    monkeypatch.setattr(engine.decoder.cache, "resize", lambda *_: None)


@pytest.mark.parametrize("capacity", [1, 2, 3, 5, 1000])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_cache_smaller_than_one_tokens_experts(
    checkpoint, stock, open_engine, monkeypatch, name, capacity
):
    path = checkpoint(name)
    prompt, rows = settled_prompt(stock(path), N, STEPS)
    engine = open_engine(path)
    hold(engine, capacity, monkeypatch)
    assert generate(engine, prompt, STEPS) == answer(rows)
    assert len(engine.decoder.cache) <= capacity


@pytest.mark.parametrize("capacity", [1, 2, 3])
def test_hits_that_fill_the_whole_cache(checkpoint, stock, open_engine, monkeypatch, capacity):
    """One expert layer: nothing else evicts, so hits may hold every slot when a miss comes."""
    path = checkpoint(
        "qwen3_moe",
        changes={"num_hidden_layers": 1, "mlp_only_layers": [], "num_experts_per_tok": 3},
    )
    prompt, rows = settled_prompt(stock(path), N, STEPS)
    engine = open_engine(path)
    hold(engine, capacity, monkeypatch)
    assert generate(engine, prompt, STEPS) == answer(rows)
    assert engine.decoder.cache.counts.hits > 0


@pytest.mark.parametrize("capacity", [1, 3, 1000])
def test_the_metal_path_with_small_caches(checkpoint, stock, open_metal, monkeypatch, capacity):
    path = checkpoint("qwen3_moe")
    prompt, rows = settled_prompt(stock(path), N, STEPS)
    engine = open_metal(path)
    hold(engine, capacity, monkeypatch)
    assert generate(engine, prompt, STEPS) == answer(rows)


def test_any_budget_gives_the_same_tokens(checkpoint, stock, open_engine, monkeypatch):
    monkeypatch.setattr(CpuBackend, "scratch_nbytes", lambda self, mlps: 0)
    monkeypatch.setattr("mlx_stream.loader.DIRECT_ALIGN", 1)  # its load check is for large experts
    path = checkpoint("qwen3_moe", changes={"num_experts": 64})
    prompt, rows = settled_prompt(stock(path), N, STEPS)
    low = smallest_budget(open_engine(path), N)
    capacities = set()
    for budget in (low, low + 100_000, low + 400_000, low + 1_000_000, low + 9_000_000):
        engine = open_engine(path, memory_budget=budget)
        assert generate(engine, prompt, STEPS) == answer(rows)
        capacities.add(engine.decoder.cache.capacity)
        assert engine.decoder.cache.nbytes <= engine.budget.owner("expert cache")
        assert engine.budget.peak <= budget
        engine.close()
    assert len(capacities) >= 3, "these budgets should give caches of different sizes"


@pytest.mark.parametrize("kind", ["open_engine", "open_metal"])
def test_logits_do_not_depend_on_what_was_cached(checkpoint, request, monkeypatch, kind):
    """Bit for bit: cold, seeded, warm and with a single slot."""
    path = checkpoint("qwen3_moe")
    prompt = list(range(3, 3 + N))
    runs = []
    for capacity in (1, 2, 1000):
        engine = request.getfixturevalue(kind)(path)
        hold(engine, capacity, monkeypatch)
        for _ in range(2):  # the second time the cache holds what the first left
            result = engine.prefill(prompt)
            steps = engine.decode(result, prompt, sampler=greedy)
            rows = [np.array(next(steps)[1]) for _ in range(STEPS)]
            runs.append(np.stack(rows))
        engine.close()
        monkeypatch.undo()
    assert all((run == runs[0]).all() for run in runs[1:])


def test_the_model_is_callable_with_several_tokens(checkpoint, stock, open_engine):
    """Outside prefill, a batch of tokens goes through the exact path."""
    path = checkpoint("qwen3_moe")
    tokens = mx.array([list(range(20)), list(range(40, 60))])
    expected = stock(path)(tokens)
    assert relative(open_engine(path).model(tokens), expected) < 1e-4


@pytest.mark.parametrize("skip", [0, 1, 3])
def test_a_failing_read_leaves_the_caches_consistent(
    checkpoint, stock, open_engine, monkeypatch, skip
):
    fault = FailingReads()
    install_fault(monkeypatch, fault)
    path = checkpoint("qwen3_moe")
    prompt, rows = settled_prompt(stock(path), N, STEPS)
    engine = open_engine(path)
    hold(engine, 2, monkeypatch)
    result = engine.prefill(prompt)
    steps = engine.decode(result, prompt, sampler=greedy)
    assert [next(steps)[0] for _ in range(3)] == answer(rows)[:3]
    fault.arm(skip=skip)
    with pytest.raises(ReadError):
        next(steps)
    assert fault.failed
    assert all(record.arrival is None for record in engine.decoder.cache._records.values())
    fault.disarm()
    assert generate(engine, prompt, STEPS) == answer(rows)
    assert engine.decoder.cache.nbytes <= 2 * engine.decoder.cache.slot_nbytes


def test_a_failed_step_can_be_taken_again(checkpoint, stock, open_engine, monkeypatch):
    """The prompt cache is as before the step, so the same token gives the same answer."""
    fault = FailingReads()
    install_fault(monkeypatch, fault)
    path = checkpoint("qwen3_moe")
    prompt, rows = settled_prompt(stock(path), N, STEPS)
    engine = open_engine(path)
    hold(engine, 1, monkeypatch)
    result = engine.prefill(prompt)
    steps = engine.decode(result, prompt, sampler=greedy)
    token = next(steps)[0]
    fault.arm(skip=3)
    with pytest.raises(ReadError):
        next(steps)
    fault.disarm()
    again = engine.prefill([token], result.cache)
    assert relative(again.logits, rows[1]) < 1e-4


def test_no_step_is_taken_for_a_token_nobody_asked_for(checkpoint, open_engine, monkeypatch):
    engine = open_engine(checkpoint("qwen3_moe"))
    hold(engine, 1, monkeypatch)
    result = engine.prefill(list(range(N)))
    before = engine.reader.counters.bytes
    steps = engine.decode(result, list(range(N)), sampler=greedy)
    next(steps)
    assert engine.reader.counters.bytes == before, "the first token needs no step"
    next(steps)
    assert engine.reader.counters.bytes > before


def test_prompts_between_steps_do_not_disturb(checkpoint, stock, open_engine):
    """Two conversations on one engine, interleaved."""
    path = checkpoint("qwen3_next")
    prompt, rows = settled_prompt(stock(path), N, STEPS)
    engine = open_engine(path)
    one = engine.decode(engine.prefill(prompt), prompt, sampler=greedy)
    got = [next(one)[0] for _ in range(3)]
    other = engine.prefill(list(range(20)))
    assert decode(engine, other, list(range(20)), 2)
    got += [next(one)[0] for _ in range(STEPS - 3)]
    assert got == answer(rows)
