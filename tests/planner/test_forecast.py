"""The forecast: between the larger part and the sum, and it moves the way the world does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_stream.planner.fit import Traits, plan_prefill
from mlx_stream.planner.forecast import forecast, forecast_for, plan_phases
from mlx_stream.planner.machine_profile import ProfileError
from mlx_stream.planner.model_costs import model_costs
from mlx_stream.planner.model_shape import model_shape
from mlx_stream.planner.ring_times import (
    Group,
    Phase,
    compute_seconds,
    read_seconds,
    ring_seconds,
)
from mlx_stream.storage.checkpoint import open_checkpoint
from mlx_stream.storage.expert_index import build_expert_index

from .profiles import machine

# --- the ring


def phases_of(layers):
    return [Phase(before, tuple(Group(1, r, c) for r, c in groups)) for before, groups in layers]


seconds = st.floats(0, 10)
layers = st.lists(
    st.tuples(seconds, st.lists(st.tuples(seconds, seconds), min_size=1, max_size=5)),
    min_size=1,
    max_size=5,
)


@given(layers=layers, slots=st.integers(1, 12), ahead=st.booleans())
def test_the_ring_lies_between_the_larger_part_and_the_sum(layers, slots, ahead):
    phases = phases_of(layers)
    total = ring_seconds(phases, slots, ahead=ahead)
    read, compute = read_seconds(phases), compute_seconds(phases)
    assert max(read, compute) * (1 - 1e-9) <= total <= (read + compute) * (1 + 1e-9)


@given(layers=layers, slots=st.integers(1, 12))
def test_more_slots_and_reading_ahead_never_hurt(layers, slots):
    phases = phases_of(layers)
    ahead, waiting = (ring_seconds(phases, slots, ahead=a) for a in (True, False))
    assert ahead <= waiting * (1 + 1e-9)
    assert ring_seconds(phases, slots + 1, ahead=True) <= ahead * (1 + 1e-9)


def test_the_ring_by_hand():
    one = [Phase(2, (Group(1, 3, 1), Group(1, 3, 1)))]
    # Reads end at 3 and 6; the second group computes from 6 to 7.
    assert ring_seconds(one, 2, ahead=True) == 7
    # The first read begins after attention, at 2.
    assert ring_seconds(one, 2, ahead=False) == 9 - 0
    # One slot: the second read begins when the first group has computed, at 4.
    assert ring_seconds(one, 1, ahead=True) == 8
    two = [Phase(5, (Group(1, 1, 1),)), Phase(5, (Group(1, 1, 1),))]
    assert ring_seconds(two, 2, ahead=True) == 12
    assert ring_seconds(two, 2, ahead=False) == 14


@given(layers=layers, slots=st.integers(1, 12), cost=st.floats(0, 1))
def test_what_overlapping_costs_stays_below_the_sum(layers, slots, cost):
    phases = phases_of(layers)
    free = ring_seconds(phases, slots, ahead=True)
    paid = ring_seconds(phases, slots, ahead=True, overlap_cost=cost)
    total = read_seconds(phases) + compute_seconds(phases)
    assert free * (1 - 1e-9) <= paid <= total * (1 + 1e-9)
    assert ring_seconds(phases, slots, ahead=True, overlap_cost=1.0) == pytest.approx(total)


# --- whole forecasts


@pytest.fixture(scope="module")
def model(checkpoint):
    opened = open_checkpoint(checkpoint("qwen3_moe"))
    index = build_expert_index(opened)
    return index, opened.config


@pytest.fixture(scope="module")
def costs(model):
    return model_costs(*model)


def plan_of(model, tokens, *, budget=1 << 30, chunk=256, union_tokens=0, align=4096):
    index, config = model
    traits = Traits(4, index.resident_nbytes, 0, align, union_tokens=union_tokens)
    shape = model_shape(config, index)
    return plan_prefill(
        index, shape, traits, prompt_tokens=tokens, budget=budget, chunk_tokens=chunk
    )


MACHINES = {
    "read-bound": machine(read=1e6, overlap_cost=0.3),
    "even": machine(read=1e8, flops=3e9),
    "compute-bound": machine(read=1e10, flops=1e8),
}


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("union_tokens", [0, 10_000])
@pytest.mark.parametrize("tokens", [1, 2, 100, 1000])
def test_between_the_larger_part_and_the_sum(model, costs, name, union_tokens, tokens):
    found = forecast(plan_of(model, tokens, union_tokens=union_tokens), costs, MACHINES[name])
    read, compute = found.read_seconds, found.compute_seconds
    assert max(read, compute) * 0.999999 <= found.ttft_seconds <= (read + compute) * 1.000001
    assert 0 < found.low < found.ttft_seconds < found.high
    assert found.bound == ("read" if read > compute else "compute")
    assert found.tokens_per_second == pytest.approx(tokens / found.ttft_seconds)
    assert "loading not included" in str(found)


def test_one_function_does_it_all(model, costs):
    plan = plan_of(model, 300)
    assert forecast_for(*model, plan, machine()) == forecast(plan, costs, machine())
    assert forecast_for(*model, plan, machine()) == forecast_for(*model, plan, machine())


def test_it_grows_with_the_prompt(model, costs):
    for profile in MACHINES.values():
        times = [
            forecast(plan_of(model, n), costs, profile).ttft_seconds
            for n in (1, 16, 64, 256, 257, 1000, 4000)
        ]
        assert times == sorted(times)


def test_it_falls_with_the_disk_and_with_computing(model, costs):
    plan = plan_of(model, 500)
    disks = [forecast(plan, costs, machine(read=r)).ttft_seconds for r in (1e6, 1e7, 1e9)]
    chips = [forecast(plan, costs, machine(flops=f)).ttft_seconds for f in (1e8, 1e9, 1e12)]
    assert disks == sorted(disks, reverse=True)
    assert chips == sorted(chips, reverse=True)


def test_it_grows_with_the_bytes(model, costs):
    plan = plan_of(model, 100)
    fat = tuple(
        x
        if x.experts is None
        else replace(
            x,
            experts=replace(x.experts, tensor_nbytes=tuple(2 * n for n in x.experts.tensor_nbytes)),
        )
        for x in costs.layers
    )
    profile = MACHINES["read-bound"]
    thin, thick = (forecast(plan, c, profile) for c in (costs, replace(costs, layers=fat)))
    assert thick.read_seconds > 1.5 * thin.read_seconds  # the padding stays
    assert thick.ttft_seconds > thin.ttft_seconds


def test_read_bytes_are_the_plans(model, costs):
    plan = plan_of(model, 1000)
    found = forecast(plan, costs, machine())
    assert plan.planned_read_nbytes <= found.read_nbytes
    padding = sum(len(p.groups) for p in plan_phases(plan, costs, machine())) * 9 * 4096
    assert found.read_nbytes <= plan.planned_read_nbytes + padding
    constant = found.read_nbytes / 2e9
    assert found.read_seconds == pytest.approx(constant)


def test_compute_seconds_are_flops_over_the_rate(model, costs):
    plan = plan_of(model, 1000)
    found = forecast(plan, costs, machine(flops=1e9, elementwise=1e30))
    flops = 1000 * (costs.routed_flops + costs.dense_flops) + costs.attention_flops(0, 1000)
    flops += costs.head.flops_per_token
    copies = 1e-2  # of a tiny model's experts, at 10 GB/s
    assert found.compute_seconds == pytest.approx(flops / 1e9, rel=1e-3, abs=copies)


def test_a_short_prompt_reads_only_what_it_is_expected_to_use(model, costs):
    one = forecast(plan_of(model, 1, union_tokens=100), costs, machine())
    many = forecast(plan_of(model, 90, union_tokens=100), costs, machine())
    whole = sum(x.experts.num * x.experts.expert_nbytes for x in costs.layers[:-1])
    first = costs.layers[0].experts
    share = costs.top_k / first.num
    assert share * whole <= one.read_nbytes < (share + 0.35) * whole + (1 << 20)
    assert one.read_nbytes < many.read_nbytes


def test_segments_read_again_and_the_advice_says_so(model, costs):
    plan = plan_of(model, 2000)
    smallest = plan.memory.total - plan.memory.held // 2 - plan.memory.expert_cache
    small = plan_of(model, 2000, budget=smallest - plan.memory.staging)
    assert len(small.segments) > 1
    found, once = (forecast(p, costs, MACHINES["read-bound"]) for p in (small, plan))
    assert found.read_seconds > 1.9 * once.read_seconds
    assert "memory_budget" in " ".join(found.advice)


def test_break_even_is_where_computing_takes_as_long_as_the_reads(model, costs):
    profile = MACHINES["even"]
    found = forecast(plan_of(model, 10), costs, profile)
    star = round(found.break_even_tokens)
    assert 2 < star < 10_000
    before, after = (
        forecast(plan_of(model, n, union_tokens=0), costs, profile) for n in (star // 2, star * 2)
    )
    assert before.bound == "read"
    assert after.bound == "compute"
    assert forecast(plan_of(model, 10), costs, machine(read=1.0)).break_even_tokens == float("inf")


def test_break_even_moves_with_the_disk(model, costs):
    plan = plan_of(model, 10)
    stars = [
        forecast(plan, costs, machine(read=r, flops=1e9)).break_even_tokens for r in (1e7, 1e8, 1e9)
    ]
    assert stars == sorted(stars, reverse=True)


def test_a_profile_without_computing_is_refused(model, costs):
    with pytest.raises(ProfileError):
        forecast(plan_of(model, 10), costs, replace(machine(), computes=()))


def test_phases_compute_what_they_are_made_of(model, costs):
    plan = plan_of(model, 600)
    phases = list(plan_phases(plan, costs, machine()))
    assert len(phases) == len(costs.layers) + 1
    assert [len(p.groups) for p in phases[: len(plan.layers)]] == [
        len(reads.groups) for reads in plan.layers
    ]
    found = forecast(plan, costs, machine())
    assert found.compute_seconds == pytest.approx(compute_seconds(phases))
    assert found.read_seconds == pytest.approx(read_seconds(phases))
