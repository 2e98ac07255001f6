"""Slots when the cache changes its size: none is lost, none is given out twice."""

import itertools

import pytest
from mlx_lm.sample_utils import greedy_sampler

from mlx_stream.decode.slots import RecordPlans
from mlx_stream.storage.read_plan import plan_group

PROMPT = list(range(40, 60))


def fill(cache, mlps):
    for mlp in mlps:
        for expert in range(mlp.layer.num_experts):
            if cache.record((mlp.layer.index, expert)) is None:
                cache.finish_read(cache.start_read(mlp, expert, ()))


@pytest.mark.parametrize("path", ["hot", "exact"])
@pytest.mark.parametrize("spare", [0, 1, 1 << 30])
def test_every_record_has_a_slot_of_its_own_after_any_resize(checkpoint, open_engine, path, spare):
    engine = open_engine(checkpoint("qwen3_moe"), decode_path=path)
    cache = engine.decoder.cache
    records = sum(m.layer.num_experts for m in engine._mlps)
    for capacity in (records, 3, 5, 5, 1, records - 1, 2, records):
        cache.resize(capacity, spare)
        assert len(cache) * cache.slot_nbytes == cache.nbytes
        fill(cache, engine._mlps)
        assert len(cache) == capacity
        assert cache.nbytes == capacity * cache.slot_nbytes
        slots = [id(s) if path == "exact" else s for s in slots_of(cache)]
        assert len(set(slots)) == capacity


def slots_of(cache):
    return [cache.record(key).slot for key in sorted(cache.keys())]


@pytest.mark.parametrize("path", ["hot", "staged", "exact"])
def test_answers_stay_right_while_the_budget_changes(checkpoint, open_engine, path):
    engine = open_engine(checkpoint("qwen3_moe"), decode_path=path)

    def answer(*budgets):
        tokens = []
        steps = engine.decode(engine.prefill(PROMPT), PROMPT, sampler=greedy_sampler)
        for (token, _), share in zip(itertools.islice(steps, 12), budgets, strict=False):
            tokens.append(token)
            if share is not None:
                scratch = engine._plans.scratch
                least = engine.budget.used - engine.decoder.nbytes + engine.decoder.nbytes_least
                engine.change_budget(least + scratch + int(share * engine.index.nbytes))
        steps.close()
        engine.change_budget(10**9)
        return tokens

    expected = answer(*[None] * 12)
    assert answer(None, 0.3, 0.1, None, 1.2, 0.2, 0.2, None, 0.0, 2.0, None, None) == expected
    assert answer(*[0.05, 1.0] * 6) == expected


def test_plans_are_kept_up_to_a_number(checkpoint, open_engine):
    engine = open_engine(checkpoint("qwen3_moe"))
    reader, mlp = engine.reader, engine._mlps[0]
    plans = RecordPlans(reader, kept=2)
    first = plans.plan(mlp, 0)
    assert first == plan_group(mlp.layer, (0,), align=reader.align, file_sizes=reader.file_sizes)
    assert plans.plan(mlp, 1) != first
    assert plans.plan(mlp, 0) is first
    plans.plan(mlp, 2)
    assert plans.plan(mlp, 0) is first
    assert len(plans._plans) == 2
