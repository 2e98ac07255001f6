"""Seed scores against plain loops."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_stream.decode.lfu_policy import HALF_LIFE
from mlx_stream.decode.seed_policy import (
    DEFAULT_SEED_POLICY,
    HORIZON,
    RECENT_TOKENS,
    SEED_POLICIES,
    best_experts,
    layer_share,
    seed_scores,
)

FAST = settings(max_examples=100, deadline=None)
EXPERTS = 12


def plain_scores(policy, rows):
    scores = dict.fromkeys(range(EXPERTS), 0.0)
    for age, row in enumerate(reversed(rows)):
        for expert in row:
            if policy == "last-token" and age == 0:
                scores[expert] += 1
            if policy == "weighted" and age < RECENT_TOKENS:
                scores[expert] += 0.5 ** (age / HALF_LIFE)
            if policy == "frequency":
                scores[expert] += min(1.0, HORIZON / len(rows))
    return [scores[e] for e in range(EXPERTS)]


@FAST
@given(
    st.sampled_from(SEED_POLICIES),
    st.integers(0, 700),
    st.integers(1, 4),
    st.integers(0, 2**32 - 1),
)
def test_scores_equal_a_plain_loop(policy, tokens, k, seed):
    rng = np.random.default_rng(seed)
    routed = np.array([rng.permutation(EXPERTS)[:k] for _ in range(tokens)], dtype=np.int16)
    routed = routed.reshape(tokens, k)
    scores = seed_scores(policy, routed, EXPERTS)
    assert scores.shape == (EXPERTS,)
    assert scores.dtype == np.float64
    np.testing.assert_allclose(scores, plain_scores(policy, routed.tolist()))
    assert scores.max(initial=0) <= HORIZON * 1.001, "scores are in uses of the horizon"


def test_names():
    assert DEFAULT_SEED_POLICY in SEED_POLICIES
    with pytest.raises(AssertionError, match="unknown seed policy"):
        seed_scores("hottest", np.zeros((1, 1), int), EXPERTS)


@FAST
@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.integers(0, 25))
def test_best_experts_are_the_best(scores, count):
    best = best_experts(np.array(scores, dtype=float), count)
    ranked = sorted((e for e in range(len(scores)) if scores[e]), key=lambda e: (-scores[e], e))
    assert best == ranked[:count]
    assert all(type(e) is int for e in best)


@FAST
@given(st.integers(0, 100), st.integers(1, 20))
def test_shares_are_even_and_use_everything(capacity, layers):
    shares = [layer_share(capacity, i, layers) for i in range(layers)]
    assert sum(shares) == capacity
    assert max(shares) - min(shares) <= 1
