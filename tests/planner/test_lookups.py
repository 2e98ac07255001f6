"""N-gram table lookups: demand, exposed latency, block counts and Zipf coverage."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_stream.config import ConfigError
from mlx_stream.planner.lookups import (
    LookupTables,
    exposed_seconds,
    harmonic,
    lookup_demand,
    rows_for_coverage,
    token_seconds,
    tokens_per_second_by_iops,
    zipf_coverage,
)

TABLES = LookupTables(orders=2, hashes=8, layers=2, rows=10**6, row_nbytes=512)
share = st.floats(0, 1)
exponents = st.floats(0, 2.5)


def test_worked_example():
    assert TABLES.reads_per_token == 32
    assert TABLES.nbytes == 32 * 512 * 10**6
    demand = lookup_demand(TABLES, 50, hit_rate=0.75)
    assert (demand.reads_per_token, demand.iops) == (8, 400)
    assert demand.bytes_per_second == 400 * 4096
    assert tokens_per_second_by_iops(TABLES, 400, hit_rate=0.75) == 50
    assert tokens_per_second_by_iops(TABLES, 400, hit_rate=1) == math.inf


@settings(deadline=None)
@given(st.integers(1, 20_000), st.sampled_from([512, 4096, 16384]))
def test_blocks_of_a_row_equal_a_count_over_rows(row, block):
    rows = block // math.gcd(row, block)  # after so many the pattern repeats
    starts = np.arange(rows, dtype=np.int64) * row
    counted = ((starts + row - 1) // block - starts // block + 1).mean()
    tables = LookupTables(1, 1, 1, rows, row)
    assert tables.blocks_per_read(block) == pytest.approx(counted)


@settings(deadline=None)
@given(st.floats(0, 1), st.floats(0, 1), share)
def test_exposed_latency_is_what_compute_does_not_hide(compute, batch, hidden):
    seconds = token_seconds(compute, batch, hidden)
    assert max(compute, batch) <= seconds + 1e-12
    assert seconds <= compute + batch
    assert token_seconds(compute, batch, 0) == compute + batch
    assert token_seconds(compute, batch, 1) == pytest.approx(max(compute, batch))
    assert exposed_seconds(batch, batch + compute) == 0


@settings(deadline=None)
@given(st.floats(0, 1e4), share, share)
def test_demand_falls_with_hits(speed, hit, more):
    one = lookup_demand(TABLES, speed, hit_rate=hit)
    two = lookup_demand(TABLES, speed, hit_rate=hit + (1 - hit) * more)
    assert two.iops <= one.iops + 1e-9
    assert one.iops == pytest.approx(one.reads_per_token * speed)
    assert lookup_demand(TABLES, speed, hit_rate=1).iops == 0


@pytest.mark.parametrize("exponent", [0, 0.5, 0.99, 1.0, 1.0 + 1e-13, 1.2, 2.0])
@pytest.mark.parametrize("terms", [0, 1, 10_000, 10_001, 300_000])
def test_harmonic_numbers_equal_the_sum(terms, exponent):
    numbers = np.arange(1, terms + 1, dtype=np.float64)
    expected = math.fsum(numbers**-exponent)
    assert harmonic(terms, exponent) == pytest.approx(expected, rel=1e-12)


@settings(deadline=None)
@given(st.integers(1, 10**10), exponents, st.data())
def test_coverage_grows_with_the_cache_and_beats_uniform(rows, exponent, data):
    cached = data.draw(st.integers(0, rows))
    found = zipf_coverage(rows, cached, exponent)
    assert cached / rows - 1e-9 <= found <= 1 + 1e-12
    assert zipf_coverage(rows, 0, exponent) == 0
    assert zipf_coverage(rows, rows, exponent) == 1
    assert zipf_coverage(rows, min(rows, cached + 1), exponent) >= found - 1e-12
    assert zipf_coverage(rows, cached, 0) == pytest.approx(cached / rows)


@pytest.mark.parametrize("exponent", [0, 0.8, 1.0, 1.3])
@pytest.mark.parametrize("wanted", [0, 0.1, 0.5, 0.9, 1])
def test_the_fewest_rows_are_the_fewest(exponent, wanted):
    found = rows_for_coverage(50_000, wanted, exponent)
    assert zipf_coverage(50_000, found, exponent) >= wanted
    if found:
        assert zipf_coverage(50_000, found - 1, exponent) < wanted


def test_values_without_meaning_are_refused():
    for build in (
        lambda: LookupTables(0, 1, 1, 1, 1),
        lambda: lookup_demand(TABLES, 1, hit_rate=1.5),
        lambda: zipf_coverage(10, 11, 1),
        lambda: zipf_coverage(10, 5, -1),
        lambda: exposed_seconds(-1, 0),
        lambda: tokens_per_second_by_iops(TABLES, 0),
    ):
        with pytest.raises(ConfigError, match="cannot be used"):
            build()
