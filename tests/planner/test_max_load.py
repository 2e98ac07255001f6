"""Balls into bins: published figures, full enumeration, simulation, and limits."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_stream.config import ConfigError
from mlx_stream.planner.max_load import (
    batch_time,
    channel_sizes,
    expected_max_load,
    max_load_distribution,
    max_load_quantile,
)

UNITS = (8, 16, 48, 96)


@pytest.mark.parametrize(
    ("units", "few", "many"), [(8, 2.6, 7.1), (16, 2.1, 4.8), (48, 1.5, 3.0), (96, 1.3, 2.4)]
)
def test_published_maximum_loads(units, few, many):
    """Of 8 and 32 requests. 7.1 is published where 7.048 is exact; all others are as rounded."""
    assert round(expected_max_load(8, units), 1) == few
    assert expected_max_load(32, units) == pytest.approx(many, abs=0.0525)


@pytest.mark.parametrize(
    ("units", "few", "many"), [(8, 120, 310), (16, 100, 220), (48, 75, 150), (96, 65, 120)]
)
def test_published_batch_times(units, few, many):
    """10 us + 40 us per read of the fullest unit + 2 us per transfer of the fullest of 8 channels.

    Published as "about", in steps of 5 or 10 us.
    """
    for requests, published in ((8, few), (32, many)):
        found = batch_time(
            requests,
            units,
            channels=8,
            fixed_seconds=10e-6,
            unit_seconds=40e-6,
            transfer_seconds=2e-6,
        )
        assert found.seconds * 1e6 == pytest.approx(published, rel=0.035)


def exact(requests, units):
    """The generating function in rational numbers."""

    def at_most(most):
        factor = [Fraction(1, math.factorial(j)) for j in range(min(most, requests) + 1)]
        product = [Fraction(1)] + [Fraction(0)] * requests
        for _ in range(units):
            product = [
                sum(product[n - j] * c for j, c in enumerate(factor) if j <= n)
                for n in range(requests + 1)
            ]
        return product[requests] * math.factorial(requests) / Fraction(units) ** requests

    return float(sum(1 - at_most(m) for m in range(requests)))


@pytest.mark.parametrize(("requests", "units"), [(1, 5), (8, 8), (32, 8), (12, 30)])
def test_expectation_equals_rational_arithmetic(requests, units):
    assert expected_max_load(requests, units) == pytest.approx(exact(requests, units), rel=1e-12)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (1, 1, 2), (3, 0, 1)])
@pytest.mark.parametrize("requests", [1, 2, 5])
def test_unequal_bins_equal_a_full_count(sizes, requests):
    mean = 0.0
    for throw in itertools.product(range(len(sizes)), repeat=requests):
        chance = math.prod(sizes[b] / sum(sizes) for b in throw)
        mean += chance * max(throw.count(b) for b in range(len(sizes)))
    assert expected_max_load(requests, sizes) == pytest.approx(mean)


def test_large_batches_agree_with_simulation():
    rng = np.random.default_rng(2)
    loads = rng.multinomial(2000, [1 / 96] * 96, size=4000).max(1)
    assert expected_max_load(2000, 96) == pytest.approx(loads.mean(), rel=0.005)
    assert max_load_quantile(2000, 96, 0.9) == pytest.approx(np.quantile(loads, 0.9), abs=1)


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(1, 60))
def test_limits_and_monotonicity(requests, units):
    load = expected_max_load(requests, units)
    assert max(math.ceil(requests / units), min(requests, 1)) <= load + 1e-9
    assert load <= requests + 1e-9
    assert expected_max_load(requests + 1, units) >= load - 1e-12
    assert expected_max_load(requests, units + 1) <= load + 1e-12
    assert expected_max_load(requests, 1) == pytest.approx(requests)
    chances = max_load_distribution(requests, units)
    assert all(0 <= a <= b <= 1 for a, b in itertools.pairwise(chances))
    assert chances[-1] == 1


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 200))
def test_every_unit_has_one_channel(units, channels):
    sizes = channel_sizes(units, channels)
    assert sum(sizes) == units
    assert len(sizes) == min(units, channels)
    assert max(sizes) - min(sizes) <= 1


@settings(deadline=None)
@given(st.integers(1, 40), st.sampled_from(UNITS), st.integers(1, 16))
def test_a_batch_takes_between_one_read_and_all_in_a_row(requests, units, channels):
    def seconds(count):
        return batch_time(
            count,
            units,
            channels=channels,
            fixed_seconds=1,
            unit_seconds=40,
            transfer_seconds=2,
        ).seconds

    assert seconds(1) == pytest.approx(43)
    assert 43 - 1e-9 <= seconds(requests) <= 1 + 42 * requests + 1e-9
    assert seconds(requests + 1) >= seconds(requests) - 1e-9
    assert seconds(0) == 1


def test_quantiles_and_bad_values():
    assert max_load_quantile(1, 8, 0.5) == 1
    assert max_load_quantile(0, 8, 0.5) == 0
    assert max_load_quantile(32, 8, 0.99) > max_load_quantile(32, 8, 0.5)
    for build in (
        lambda: expected_max_load(-1, 8),
        lambda: expected_max_load(1, 0),
        lambda: max_load_quantile(1, 8, 1.5),
        lambda: channel_sizes(0, 1),
    ):
        with pytest.raises(ConfigError, match="cannot be used"):
            build()
