"""The cost of a streamed prefill: published examples, closed forms against sums, limits."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_stream.config import ConfigError
from mlx_stream.planner.cost_model import (
    PrefillTime,
    Rates,
    TokenWork,
    attention_pair_flops,
    break_even,
    causal_pairs,
    prefill_time,
    read_seconds,
)

# The worked example: 26 GFLOPs a token in all layers, 13 of them in routed experts; linear terms
# only. Experts of 79.6 or 147 GB, an SSD of 14 GB/s.
WORK = TokenWork(linear=26e9, routed=13e9)
SMALL, LARGE, SSD = 79.6e9, 147e9, 14e9

nbytes = st.floats(1e6, 1e12)
tokens = st.integers(1, 1_000_000)
seconds = st.floats(1e-6, 1e6)
rates = st.builds(Rates, st.floats(1e8, 1e11), st.floats(1e9, 1e15))


@st.composite
def works(draw):
    linear = draw(st.floats(1e6, 1e12))
    window = draw(st.none() | st.integers(1, 100_000))
    return TokenWork(linear, linear * draw(st.floats(0.1, 1)), draw(st.floats(0, 1e7)), window)


def rates_of(tflops):
    return Rates(read=SSD, flops=tflops * 1e12)


@pytest.mark.parametrize(("size", "published"), [(SMALL, 5.7), (LARGE, 10.5)])
def test_published_read_times(size, published):
    assert round(read_seconds(size, SSD), 1) == published


@pytest.mark.parametrize(
    ("size", "tflops", "low", "high"),
    [
        (SMALL, 50, 11, 22),
        (SMALL, 100, 22, 44),
        (SMALL, 200, 44, 87),
        (LARGE, 50, 20, 40),
        (LARGE, 100, 40, 81),
        (LARGE, 200, 81, 162),
    ],
)
def test_published_break_even_ranges(size, tflops, low, high):
    """From all compute (26 GFLOPs) to routed experts only (13), in thousands of tokens."""
    found = break_even(size, WORK, rates_of(tflops))
    assert round(found.optimistic / 1e3) == low
    assert round(found.conservative / 1e3) == high


@pytest.mark.parametrize(
    ("thousands", "published"), [(8, 780), (16, 1560), (32, 3120), (64, 3850), (128, 3850)]
)
def test_published_prefill_rates(thousands, published):
    """K is 1,024 tokens; T is the maximum of reads and all compute."""
    time = prefill_time(LARGE, WORK, thousands * 1024, rates_of(100))
    assert round(time.tokens_per_second / 10) * 10 == published
    assert time.bound == ("read" if thousands <= 32 else "compute")


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(0, 60), st.none() | st.integers(1, 80))
def test_causal_pairs_equal_the_sum_over_queries(new, past, window):
    seen = [past + i + 1 for i in range(new)]
    assert causal_pairs(new, past, window) == sum(min(n, window or n) for n in seen)


@settings(deadline=None)
@given(tokens, tokens, st.none() | st.integers(1, 100_000))
def test_two_prompts_after_each_other_are_one(first, second, window):
    both = causal_pairs(first, 0, window) + causal_pairs(second, first, window)
    assert both == causal_pairs(first + second, 0, window)


def test_attention_flops_count_scores_and_values():
    # q [H, d] . k [d] and the weighted sum of v: two multiply-adds per head dimension each
    assert attention_pair_flops(layers=2, heads=3, key_dim=5, value_dim=7) == 2 * 2 * 3 * (5 + 7)
    work = TokenWork(1.0, 1.0, attention_pair=72.0)
    time = prefill_time(1, work, 4, Rates(1, 1, attention_flops=9))
    assert (time.linear_seconds, time.attention_seconds) == (4, 10 * 72 / 9)


@settings(deadline=None)
@given(seconds, seconds, st.integers(1, 10_000))
def test_overlap_lies_between_max_and_sum(read, compute, groups):
    time = PrefillTime(100, read, compute)
    most, total = time.overlapped_seconds, time.serial_seconds
    assert most <= total <= 2 * most
    assert most <= time.pipelined_seconds(groups) <= total * (1 + 1e-12)
    assert time.pipelined_seconds(groups + 1) <= time.pipelined_seconds(groups)
    assert time.pipelined_seconds(1) == pytest.approx(total)
    assert time.pipelined_seconds(10**9) == pytest.approx(most)
    assert time.exposed_read_seconds == pytest.approx(max(0, read - compute), abs=1e-9 * most)


@settings(deadline=None)
@given(nbytes, works(), tokens, rates)
def test_longer_prompts_take_longer_and_are_no_slower_per_token_while_reads_bound(
    size, work, count, machine
):
    one, two = (prefill_time(size, work, n, machine) for n in (count, 2 * count))
    assert two.read_seconds == one.read_seconds
    assert two.compute_seconds >= 2 * one.compute_seconds * (1 - 1e-12) or work.window
    assert two.overlapped_seconds >= one.overlapped_seconds
    if two.bound == "read":
        assert two.tokens_per_second == pytest.approx(2 * one.tokens_per_second)


@settings(deadline=None)
@given(nbytes, works(), tokens, rates, st.floats(1, 10))
def test_a_faster_machine_is_never_slower(size, work, count, machine, factor):
    base = prefill_time(size, work, count, machine).overlapped_seconds
    for faster in (
        Rates(machine.read * factor, machine.flops),
        Rates(machine.read, machine.flops * factor),
    ):
        assert prefill_time(size, work, count, faster).overlapped_seconds <= base


@settings(deadline=None)
@given(nbytes, works(), rates, st.integers(1, 4))
def test_at_break_even_compute_takes_as_long_as_reads(size, work, machine, segments):
    found = break_even(size, work, machine, segments=segments)
    time = prefill_time(size, work, found.optimistic, machine, segments=segments)
    assert time.compute_seconds == pytest.approx(time.read_seconds, rel=1e-6)
    routed = found.conservative * work.routed / machine.flops
    assert routed == pytest.approx(time.read_seconds)
    assert found.optimistic <= found.conservative * (1 + 1e-9)


def test_attention_moves_the_break_even_down():
    plain = break_even(LARGE, WORK, rates_of(100)).optimistic
    pair = attention_pair_flops(layers=60, heads=64, key_dim=192, value_dim=128)
    with_attention = break_even(LARGE, TokenWork(26e9, 13e9, pair), rates_of(100)).optimistic
    windowed = break_even(LARGE, TokenWork(26e9, 13e9, pair, 512), rates_of(100)).optimistic
    assert with_attention < windowed < plain


@pytest.mark.parametrize(
    "build",
    [
        lambda: TokenWork(0, 1),
        lambda: TokenWork(1, 2),
        lambda: TokenWork(1, 1, -1),
        lambda: TokenWork(1, 1, 1, 0),
        lambda: Rates(0, 1),
        lambda: Rates(1, float("nan")),
        lambda: Rates(1, 1, float("inf")),
        lambda: read_seconds(-1, 1),
        lambda: read_seconds(1, 1, segments=0),
        lambda: prefill_time(1, WORK, 0, rates_of(1)),
    ],
)
def test_values_without_meaning_are_refused(build):
    with pytest.raises(ConfigError, match="cannot be used in the cost model"):
        build()
