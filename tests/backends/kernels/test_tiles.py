"""Tile maps: every row once, no tile in two experts, heights chosen by rows per expert."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_stream.backends.kernels.tiles import build_tiles, choose_tile_rows, place_table


@given(st.lists(st.integers(0, 200), min_size=1, max_size=40), st.sampled_from([16, 32, 64]))
def test_tiles_cover_every_row_once(counts, tile_rows):
    tiles = build_tiles(np.array(counts), tile_rows)
    owner = np.repeat(np.arange(len(counts)), counts)
    seen = np.zeros(len(owner), dtype=int)
    for expert, first, rows in tiles:
        assert 1 <= rows <= tile_rows
        assert (owner[first : first + rows] == expert).all()
        seen[first : first + rows] += 1
    assert (seen == 1).all()
    assert len(tiles) == sum(-(-c // tile_rows) for c in counts)


@pytest.mark.parametrize(
    ("rows", "expected"), [(1, 16), (8, 16), (16, 16), (32, 32), (48, 16), (64, 64), (500, 64)]
)
def test_height_follows_rows_per_expert(rows, expected):
    assert choose_tile_rows(np.full(64, rows)) == expected


def test_empty_experts_do_not_count():
    counts = np.zeros(512, dtype=int)
    counts[[3, 99]] = 64
    assert choose_tile_rows(counts) == 64
    assert build_tiles(counts, 64).tolist() == [[3, 0, 64], [99, 64, 64]]


def test_place_table_marks_absent_choices():
    table = place_table(np.array([4, 0, 5]), tokens=3, top_k=2)
    assert table.tolist() == [[1, -1], [-1, -1], [0, 2]]
