"""Placement tables: conservation of bytes, the budget, and Apple's limit on top."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_stream.config import ConfigError
from mlx_stream.planner.apple_memory import GIB
from mlx_stream.planner.placement import (
    ModelParts,
    Place,
    fit_budget,
    largest_expert_cache,
    place_model,
)

sizes = st.integers(0, 10**12)
models = st.builds(ModelParts, *[sizes] * 7)
EXAMPLE = ModelParts(
    dense=9 * 10**9,
    experts=147 * 10**9,
    tables=50 * 10**9,
    kv=4 * 10**9,
    held=10**9,
    staging=5 * 10**8,
    transient=2 * 10**8,
)


@settings(deadline=None)
@given(models, st.data())
def test_nothing_is_lost_or_counted_twice(parts, data):
    cache = data.draw(st.integers(0, parts.experts))
    tables = data.draw(st.integers(0, parts.tables))
    kv = data.draw(st.integers(0, parts.kv))
    table = place_model(parts, expert_cache=cache, table_cache=tables, kv_in_memory=kv)
    assert table.memory + table.ssd == sum(vars(parts).values())
    assert table.ssd == parts.experts - cache + parts.tables - tables + parts.kv - kv
    assert sum(sum(row[1:]) for row in table.rows()) == table.memory + table.ssd
    assert table.total(Place.RESIDENT) == parts.dense


@settings(deadline=None)
@given(models, sizes)
def test_the_expert_cache_takes_what_is_left(parts, budget):
    cache = largest_expert_cache(parts, budget)
    fit = fit_budget(place_model(parts, expert_cache=cache), budget)
    assert fit.fits == fit_budget(place_model(parts), budget).fits
    assert fit.fits == (not fit.advice())
    assert fit.spare == budget - fit.needed
    if fit.fits and cache < parts.experts:
        assert fit.spare == 0


def test_the_table_prints_every_component_once_with_totals():
    lines = place_model(EXAMPLE, expert_cache=20 * 10**9, kv_in_memory=10**8).lines()
    assert len(lines) == 1 + 7 + 1
    experts = next(line.split() for line in lines if line.strip().startswith("experts"))
    assert experts == ["experts", "-", "20.00", "GB", "127.00", "GB"]
    assert lines[-1].split() == ["total", "9.00", "GB", "21.80", "GB", "180.90", "GB"]


def test_the_largest_part_is_named_when_it_does_not_fit():
    fit = fit_budget(place_model(EXAMPLE), 10**10)
    assert not fit.fits
    assert fit.largest == "dense weights"
    assert "4.70 GB more" in fit.advice()[0]


def test_a_mac_has_a_limit_of_its_own():
    table = place_model(EXAMPLE, expert_cache=10 * 10**9)
    assert fit_budget(table, 30 * 10**9).fits
    fit = fit_budget(table, 30 * 10**9, apple_memory=32 * GIB)
    assert not fit.fits
    assert "sudo sysctl iogpu.wired_limit_mb=" in fit.advice()[0]
    assert fit.wired is not None
    raised = fit.wired.megabytes
    assert fit_budget(table, 30 * 10**9, apple_memory=32 * GIB, wired_limit_mb=raised).fits
    small = fit_budget(table, 30 * 10**9, apple_memory=16 * GIB)
    assert "too little memory" in small.advice()[0]


@pytest.mark.parametrize(
    "options",
    [
        {"expert_cache": EXAMPLE.experts + 1},
        {"table_cache": -1},
        {"kv_in_memory": EXAMPLE.kv + 1},
    ],
)
def test_a_part_larger_than_the_whole_is_refused(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        place_model(EXAMPLE, **options)
