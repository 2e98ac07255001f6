"""The replay against an exhaustive search, a plain loop, and what must hold for any trace."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_stream.decode.hot_list import HotList, HotListError
from mlx_stream.decode.policy import POLICIES
from mlx_stream.decode.replay import (
    REPLAY_POLICIES,
    REPLAY_SEEDS,
    replay,
    replay_per_layer_lru,
)
from mlx_stream.decode.seed_policy import SEED_POLICIES
from tests.support.traces import random_trace

FAST = settings(max_examples=60, deadline=None)
traces = st.builds(
    random_trace,
    layers=st.sampled_from([(0,), (1, 4), (0, 2, 3)]),
    experts=st.integers(3, 8),
    k=st.integers(1, 3),
    prompt=st.integers(1, 20),
    steps=st.integers(1, 12),
    seed=st.integers(0, 2**32 - 1),
)


@FAST
@given(traces, st.integers(1, 24), st.sampled_from(REPLAY_POLICIES), st.sampled_from(REPLAY_SEEDS))
def test_counts_add_up(trace, slots, policy, seed):
    result = replay(trace, policy, slots * 100, seed=seed)
    lookups = len(trace.layers) * trace.decode[0].shape[1]
    assert (result.hits + result.misses == lookups).all()
    assert (result.nbytes == 100 * result.misses).all()
    assert result.hit_rate() == pytest.approx(result.hits.sum() / (lookups * trace.steps))
    assert result.nbytes_per_token() == pytest.approx(result.nbytes.mean())
    first = replay(trace, policy, slots * 100, seed=seed, tokens=3)
    if policy != "belady" and seed != "oracle":  # they look ahead as far as the replay goes
        assert first.misses.tolist() == result.misses[:3].tolist()


@FAST
@given(traces, st.sampled_from(POLICIES), st.sampled_from(SEED_POLICIES))
def test_a_cache_for_everything_misses_every_expert_at_most_once(trace, policy, seed):
    used = sum(len(np.unique(ids)) for ids in trace.decode)
    result = replay(trace, policy, trace.total_nbytes, seed=seed)
    assert result.misses.sum() <= used
    if seed == "none":
        assert result.misses.sum() == used
    assert replay(trace, policy, 1 << 60, seed=seed).misses.sum() == result.misses.sum()


@FAST
@given(traces, st.integers(1, 24), st.sampled_from(POLICIES))
def test_no_policy_beats_belady(trace, slots, policy):
    slots = max(slots, trace.decode[0].shape[1])
    best = replay(trace, "belady", slots * 100, seed="none").misses.sum()
    assert replay(trace, policy, slots * 100, seed="none").misses.sum() >= best
    started = replay(trace, "belady", slots * 100, seed="oracle").misses.sum()
    assert best - slots <= started <= best
    for seed in SEED_POLICIES:
        assert replay(trace, policy, slots * 100, seed=seed).misses.sum() >= started


def fewest_misses(trace, capacity):
    """All choices of what leaves, by breadth-first search over the cache's contents."""
    states = {frozenset(): 0}
    for step in range(trace.steps):
        for layer, ids in zip(trace.layers, trace.decode, strict=True):
            call = frozenset((layer, e) for e in ids[step].tolist())
            following = {}
            for state, misses in states.items():
                cost = misses + len(call - state)
                others = sorted(state - call)
                stay = min(len(others), capacity - len(call))
                for kept in combinations(others, stay):
                    after = call | frozenset(kept)
                    following[after] = min(cost, following.get(after, cost))
            states = following
    return min(states.values())


@settings(max_examples=40, deadline=None)
@given(
    st.builds(
        random_trace,
        layers=st.sampled_from([(0,), (0, 1)]),
        experts=st.integers(3, 4),
        k=st.integers(1, 2),
        steps=st.integers(1, 8),
        seed=st.integers(0, 2**32 - 1),
    ),
    st.integers(2, 5),
)
def test_belady_is_the_optimum(trace, capacity):
    found = replay(trace, "belady", capacity * 100, seed="none").misses.sum()
    assert found == fewest_misses(trace, capacity)


@FAST
@given(traces, st.integers(1, 30))
def test_the_peer_is_an_lru_a_layer(trace, slots):
    result = replay(trace, "streamlx", slots * 100)
    share = max(1, slots // len(trace.layers))
    misses = np.zeros(trace.steps, int)
    for prompt, ids in zip(trace.prompt, trace.decode, strict=True):
        counts = np.bincount(prompt.reshape(-1), minlength=trace.num_experts[0])
        ranked = sorted(np.flatnonzero(counts).tolist(), key=lambda e: (-counts[e], e))
        order = ranked[:share][::-1]  # oldest first
        for step, row in enumerate(ids.tolist()):
            hits = [e for e in sorted(row) if e in order]
            order = [e for e in order if e not in hits] + hits
            for expert in sorted(set(row) - set(hits)):
                misses[step] += 1
                order = [*order, expert][-share:]
    assert result.misses.tolist() == misses.tolist()


def test_the_peer_seeds_from_its_last_chunk():
    trace = random_trace(layers=(0,), experts=4, k=1, prompt=2050, steps=1)
    prompt = np.zeros((2050, 1), np.int16)
    prompt[2048:] = 3
    trace = replace(trace, prompt=(prompt,), decode=(np.array([[3]], np.int16),))
    assert replay(trace, "streamlx", 100).misses.tolist() == [0]
    trace = replace(trace, decode=(np.array([[0]], np.int16),))
    assert replay(trace, "streamlx", 100).misses.tolist() == [1]


def test_the_rest_of_the_peers_slots():
    trace = random_trace(layers=(0, 1, 2), k=2, steps=40)
    unused = replay_per_layer_lru(trace, 800)
    spread = replay_per_layer_lru(trace, 800, spread_rest=True)
    assert unused.misses.tolist() == replay_per_layer_lru(trace, 600).misses.tolist()
    assert spread.misses.sum() <= unused.misses.sum()
    assert replay_per_layer_lru(trace, 900).misses.tolist() == (
        replay_per_layer_lru(trace, 900, spread_rest=True).misses.tolist()
    )


def test_last_token_seeds_hit_when_the_next_token_routes_alike():
    trace = random_trace(k=2, steps=1)
    trace = replace(trace, decode=tuple(p[-1:] for p in trace.prompt))
    for policy in POLICIES:
        assert replay(trace, policy, 600, seed="last-token").misses.sum() == 0
        assert replay(trace, policy, 600, seed="none").misses.sum() == 6


def test_a_hot_list_seeds():
    trace = random_trace(steps=60)
    hot = HotList.from_traces([trace])
    for policy in POLICIES:
        with_list = replay(trace, policy, 600, seed=hot, tokens=8).misses.sum()
        assert with_list < replay(trace, policy, 600, seed="none", tokens=8).misses.sum()
    with pytest.raises(HotListError):
        replay(random_trace(layers=(0, 1, 2)), "lru", 600, seed=hot)


def test_bytes_are_those_of_the_layer():
    trace = replace(random_trace(layers=(0, 1), steps=5), expert_nbytes=(10, 1000))
    result = replay(trace, "lru", 1, seed="none")
    assert result.misses.tolist() == [4] * 5, "one slot, and two experts a call"
    assert result.nbytes.tolist() == [2 * 10 + 2 * 1000] * 5


def test_default_policy_keeps_what_is_used_often():
    """A hot pair and a parade of strangers: recency loses the pair, frequency keeps it."""
    trace = random_trace(layers=(0,), experts=20, k=1, steps=60)
    ids = np.array([[i % 2] if i % 3 else [2 + i // 3 % 18] for i in range(60)], np.int16)
    trace = replace(trace, decode=(ids,))
    misses = {p: replay(trace, p, 300, seed="none").misses[12:].sum() for p in POLICIES}
    assert misses["lfu"] <= misses["lru"]
    assert misses["lfu"] == 16, "only the strangers"
