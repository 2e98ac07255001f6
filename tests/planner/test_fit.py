"""plan_prefill: whatever it returns fits, and what it refuses says what would."""

import re
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_stream.config import parse_bytes
from mlx_stream.errors import BudgetError
from mlx_stream.planner.fit import Traits, plan_prefill
from mlx_stream.planner.model_shape import model_shape
from mlx_stream.storage.checkpoint import open_checkpoint
from mlx_stream.storage.expert_index import build_expert_index
from mlx_stream.storage.read_plan import plan_group

FAMILIES = ("qwen3_moe", "deepseek_v3", "llama4", "phixtral")
FAST = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(scope="module")
def indexes(checkpoint):
    found = {}
    for name in FAMILIES:
        opened = open_checkpoint(checkpoint(name))
        index = build_expert_index(opened)
        found[name] = (index, model_shape(opened.config, index))
    return found


def traits(**changes):
    base = Traits(itemsize=4, resident=700_000, scratch=300_000, align=1, decode_tokens=256)
    return replace(base, **changes)


def check(plan, index, align, prompt_tokens, budget, chunk_tokens):
    """What must hold for every plan, computed from the plan's parts and the index alone."""
    m = plan.memory
    parts = m.resident + m.kv + m.held + m.transient + m.scratch + m.staging + m.expert_cache
    assert m.total == parts <= budget == m.budget
    assert m.staging == plan.slots * plan.slot_nbytes
    assert plan.slots >= 2
    tokens = [t for s in plan.segments for a, b in s.chunks for t in range(a, b)]
    assert tokens == list(range(prompt_tokens))
    chunks = [b - a for s in plan.segments for a, b in s.chunks]
    assert max(chunks) <= plan.chunk_tokens <= min(chunk_tokens, prompt_tokens)
    assert plan.expert_nbytes == index.nbytes
    sizes = [f.size for f in index.checkpoint.files]
    for layer, reads in zip(index.layers, plan.layers, strict=True):
        assert [e for a, b in reads.groups for e in range(a, b)] == list(range(layer.num_experts))
        for a, b in reads.groups:
            group = plan_group(layer, range(a, b), align=align, file_sizes=sizes)
            assert group.slot_nbytes <= plan.slot_nbytes
        scattered = range(0, layer.num_experts, 2)[: plan.group_size]
        group = plan_group(layer, scattered, align=align, file_sizes=sizes)
        assert group.slot_nbytes <= plan.slot_nbytes, "short prompts read scattered experts"
    assert (len(plan.segments) > 1) == any("times" in note for note in plan.notes)
    assert (plan.chunk_tokens < min(chunk_tokens, prompt_tokens)) == any(
        "chunks of" in note for note in plan.notes
    )


@FAST
@given(
    name=st.sampled_from(FAMILIES),
    prompt_tokens=st.integers(1, 5000),
    chunk_tokens=st.integers(1, 2048),
    budget=st.integers(1_000_000, 60_000_000),
    align=st.sampled_from([1, 512, 4096]),
    combined=st.booleans(),
    past=st.integers(0, 500),
)
def test_a_plan_fits_or_the_error_names_a_budget_that_works(
    indexes, name, prompt_tokens, chunk_tokens, budget, align, combined, past
):
    index, shape = indexes[name]
    options = {
        "prompt_tokens": prompt_tokens,
        "chunk_tokens": chunk_tokens,
        "past_tokens": past,
    }
    what = traits(align=align, combined=combined)
    try:
        plan = plan_prefill(index, shape, what, budget=budget, **options)
    except BudgetError as error:
        named = parse_bytes(re.search(r"memory_budget to ([\d.]+ \w+)", error.remedy)[1])
        assert named > budget
        budget = named
        plan = plan_prefill(index, shape, what, budget=budget, **options)
    check(plan, index, align, prompt_tokens, budget, chunk_tokens)
    again = plan_prefill(index, shape, what, budget=budget, **options)
    assert plan == again, "same inputs, same plan"
    assert str(plan)


def test_a_larger_budget_never_costs_more_reads(indexes):
    index, shape = indexes["qwen3_moe"]
    segments, slots = [], []
    for budget in range(4_000_000, 40_000_000, 1_000_000):
        try:
            plan = plan_prefill(
                index, shape, traits(), prompt_tokens=4000, budget=budget, chunk_tokens=512
            )
        except BudgetError:
            assert not segments, "a larger budget refused what a smaller one could"
            continue
        segments.append(len(plan.segments))
        slots.append(plan.slots * plan.group_size)
    assert segments == sorted(segments, reverse=True)
    assert segments[0] > 1 == segments[-1], "the range of budgets shows both ends"


def test_smaller_chunks_come_before_more_segments(indexes):
    """A second segment reads everything again; a smaller chunk costs next to nothing."""
    index, shape = indexes["qwen3_moe"]
    big = plan_prefill(index, shape, traits(), prompt_tokens=2000, budget=10**9, chunk_tokens=2000)
    floor = big.memory.total - big.memory.staging - big.memory.expert_cache
    tight = plan_prefill(
        index, shape, traits(), prompt_tokens=2000, budget=floor, chunk_tokens=2000
    )
    assert len(tight.segments) == 1
    assert tight.chunk_tokens < big.chunk_tokens == 2000


def test_short_prompts_read_the_routed_union(indexes):
    index, shape = indexes["qwen3_moe"]  # 8 experts, top 2
    modes = {
        n: plan_prefill(
            index, shape, traits(union_tokens=0), prompt_tokens=n, budget=10**9, chunk_tokens=64
        ).mode
        for n in (1, 2, 10, 11, 500)
    }
    # 1 - 0.75 ** n, the expected share of experts in use, passes 0.95 between 10 and 11 tokens.
    assert modes == {1: "union", 2: "union", 10: "union", 11: "stream", 500: "stream"}


def test_a_prompt_up_to_union_tokens_waits_for_its_routing(indexes):
    index, shape = indexes["qwen3_moe"]
    modes = {
        n: plan_prefill(
            index, shape, traits(union_tokens=100), prompt_tokens=n, budget=10**9, chunk_tokens=64
        ).mode
        for n in (100, 101)
    }
    assert modes == {100: "union", 101: "stream"}
