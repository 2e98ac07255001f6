"""Several devices: the published example, conservation of experts, and the traffic they add."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_stream.config import ConfigError
from mlx_stream.planner.cost_model import Rates, TokenWork, break_even
from mlx_stream.planner.device_split import (
    expected_devices_used,
    host_traffic,
    scale_cases,
    scaled_rates,
    split_experts,
    split_prefill_seconds,
    split_seconds,
)

WORK = TokenWork(linear=26e9, routed=13e9)
ONE = Rates(read=14e9, flops=30e12)
LARGE = 147e9
SPEEDS = st.lists(st.floats(1e9, 1e15), min_size=1, max_size=6)


def traffic(counts, *, nbytes=LARGE, tokens=1000, top_k=6):
    return host_traffic(
        nbytes, tokens=tokens, layers=60, hidden=4096, itemsize=2, counts=counts, top_k=top_k
    )


@pytest.mark.parametrize(("ssds", "published"), [(1, 24), (2, 12)])
def test_published_break_even_of_two_devices(ssds, published):
    """Two of 30 TFLOPS, 147 GB of experts, all compute (26 GFLOPs a token); thousands of tokens."""
    found = break_even(LARGE, WORK, scaled_rates(ONE, flops_factor=2, read_factor=ssds))
    assert round(found.optimistic / 1e3) == published


@settings(deadline=None)
@given(st.floats(1e9, 1e12), st.integers(1, 10**6))
def test_the_four_cases(nbytes, tokens):
    one, wide, fast, both = scale_cases(nbytes, WORK, tokens, ONE)
    assert [(c.flops_factor, c.read_factor) for c in (one, wide, fast, both)] == [
        (1, 1),
        (1, 2),
        (2, 1),
        (2, 2),
    ]
    assert both.time.overlapped_seconds == pytest.approx(one.time.overlapped_seconds / 2)
    assert both.break_even.optimistic == pytest.approx(one.break_even.optimistic)
    assert fast.break_even.optimistic == pytest.approx(2 * one.break_even.optimistic)
    assert wide.break_even.optimistic == pytest.approx(one.break_even.optimistic / 2)
    # what does not bound is bought for nothing
    idle = fast if one.time.bound == "read" else wide
    assert idle.time.overlapped_seconds == one.time.overlapped_seconds


def test_attention_scales_with_the_devices():
    rates = scaled_rates(Rates(1, 2, 3), flops_factor=4, read_factor=5)
    assert rates == Rates(5, 8, 12)


@settings(deadline=None)
@given(st.integers(0, 512), SPEEDS)
def test_every_expert_has_one_device(experts, speeds):
    counts = split_experts(experts, speeds)
    assert sum(counts) == experts
    for count, speed in zip(counts, speeds, strict=True):
        assert abs(count - experts * speed / sum(speeds)) < 1 + 1e-6
    assert split_seconds(counts, speeds, 1.0) >= experts / sum(speeds) * (1 - 1e-9)


def test_equal_devices_share_equally():
    assert split_experts(256, [30e12, 30e12]) == (128, 128)
    assert split_experts(7, [1, 1]) == (4, 3)
    assert split_seconds((128, 128), [2.0, 2.0], 1.0) == 64


def test_devices_used_equal_a_full_count():
    owners = [0, 0, 0, 1, 1, 2]
    for top_k in range(7):
        picks = list(itertools.combinations(owners, top_k))
        mean = sum(len(set(pick)) for pick in picks) / len(picks)
        assert expected_devices_used((3, 2, 1), top_k) == pytest.approx(mean)


@settings(deadline=None)
@given(st.lists(st.integers(1, 128), min_size=1, max_size=6), st.data())
def test_a_split_adds_activations_only(counts, data):
    top_k = data.draw(st.integers(0, sum(counts)))
    found = traffic(counts, top_k=top_k)
    assert found.weights_in == found.weights_out == LARGE
    assert found.total == found.weights_in + found.weights_out + found.activations
    most = 4 * min(top_k, len(counts) - 1) * 1000 * 60 * 4096 * 2
    assert 0 <= found.activations <= most * (1 + 1e-9)
    assert (found.activations == 0) == (len(counts) == 1 or top_k == 0)
    assert traffic(counts, top_k=top_k, tokens=2000).activations == pytest.approx(
        2 * found.activations
    )


def test_host_memory_can_be_the_bound():
    case = scale_cases(LARGE, WORK, 10_000, ONE)[3]
    found = traffic((128, 128), tokens=10_000)
    fast, slow = (split_prefill_seconds(case.time, found, bw) for bw in (1e12, 10e9))
    assert fast == case.time.overlapped_seconds
    assert slow == found.total / 10e9
    with pytest.raises(ConfigError, match="bytes_per_second"):
        found.seconds(0)


def test_values_without_meaning_are_refused():
    with pytest.raises(ConfigError, match="devices"):
        split_experts(8, [])
    with pytest.raises(ConfigError, match="speed_1"):
        split_experts(8, [1, 0])
    with pytest.raises(ConfigError, match="top_k"):
        expected_devices_used((2, 2), 5)
