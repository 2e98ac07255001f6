"""Decode bounds: their inverse, their limits, and what a cache of the hottest experts hits."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_stream.config import ConfigError
from mlx_stream.planner.decode_bounds import (
    cached_tokens_per_second,
    decode_bound,
    hit_rate_needed,
    hottest_hit_rate,
    routed_bytes_per_token,
    uncached_tokens_per_second,
    uniform_hit_rate,
)
from mlx_stream.planner.read_volume import inclusion_probabilities, zipf_weights

rate = st.floats(1e6, 1e12)
share = st.floats(0, 1)


def test_worked_example():
    # 60 layers x 6 experts of 10 MB: 3.6 GB a token, 14 GB/s
    routed = routed_bytes_per_token(60, 6, 10e6)
    assert routed == 3.6e9
    assert uncached_tokens_per_second(14e9, routed) == pytest.approx(3.89, abs=0.005)
    assert cached_tokens_per_second(14e9, routed, 0.9) == pytest.approx(38.9, abs=0.05)
    assert hit_rate_needed(10, 14e9, routed) == pytest.approx(1 - 14 / 36)


@settings(deadline=None)
@given(rate, rate, st.floats(0, 0.999), share)
def test_speed_grows_with_the_hit_rate_from_no_cache_to_infinity(bandwidth, routed, hit, more):
    base = cached_tokens_per_second(bandwidth, routed, hit)
    assert base >= uncached_tokens_per_second(bandwidth, routed)
    assert cached_tokens_per_second(bandwidth, routed, hit + (1 - hit) * more) >= base
    assert cached_tokens_per_second(bandwidth, routed, 1) == math.inf
    assert cached_tokens_per_second(
        bandwidth, routed, hit_rate_needed(base, bandwidth, routed)
    ) == (pytest.approx(base, rel=1e-6))


@settings(deadline=None)
@given(rate, rate, rate, st.floats(0, 1e12), share)
def test_overlap_lies_between_serial_and_twice_serial(ssd, memory, routed, dense, hit):
    found = decode_bound(
        read_bytes_per_second=ssd,
        memory_bytes_per_second=memory,
        routed_nbytes=routed,
        dense_nbytes=dense,
        hit_rate=hit,
    )
    assert found.serial <= found.overlapped * (1 + 1e-12)
    assert found.overlapped <= 2 * found.serial * (1 + 1e-12)
    assert found.overlapped <= found.memory
    assert found.bound == ("storage" if found.storage < found.memory else "memory")


@settings(deadline=None)
@given(st.integers(2, 256), st.floats(0, 2), st.data())
def test_skew_helps_a_cache_of_the_hottest(experts, exponent, data):
    top_k = data.draw(st.integers(1, experts))
    cached = data.draw(st.integers(0, experts))
    chances = inclusion_probabilities(zipf_weights(experts, exponent), top_k)
    shuffled = np.random.default_rng(0).permutation(chances)
    found = hottest_hit_rate(shuffled, cached)
    assert found >= uniform_hit_rate(cached, experts) - 1e-9
    assert hottest_hit_rate(shuffled, 0) == 0
    assert hottest_hit_rate(shuffled, experts) == pytest.approx(1)


def test_values_without_meaning_are_refused():
    assert uniform_hit_rate(10, 5) == 1
    for bad in (-0.1, 1.1, float("nan")):
        with pytest.raises(ConfigError, match="hit_rate"):
            cached_tokens_per_second(1, 1, bad)
    with pytest.raises(ConfigError, match="bytes_per_second"):
        uncached_tokens_per_second(0, 1)
