"""The tile map: which rows of the sorted routing one threadgroup computes. Pure.

A tile belongs to one expert, so no threadgroup repeats its work for a second one; an expert's last
tile may be partly empty.
"""

from __future__ import annotations

import numpy as np

# Time of one tile relative to a tile of 16 rows. From a public comparison on an M3 Max: against
# 16-row tiles, 32-row tiles gain 13% at 32 rows an expert and lose below 24; 64 is estimated the
# same way. What a chip really does is for a measurement on it to say.
TILE_COST = {16: 1.0, 32: 1.75, 64: 3.3}


def choose_tile_rows(counts: np.ndarray) -> int:
    """The tile height with the least total cost for these rows per expert; ties to the larger."""
    costs = {rows: float(np.ceil(counts / rows).sum()) * cost for rows, cost in TILE_COST.items()}
    return min(sorted(costs, reverse=True), key=costs.__getitem__)


def build_tiles(counts: np.ndarray, tile_rows: int) -> np.ndarray:
    """``[n, 3]`` int32 (expert, first row, rows), in row order; experts without rows have none.

    counts: ``[G]`` rows of each expert; expert e's rows follow those of the experts before it.
    """
    counts = np.asarray(counts, dtype=np.int64)
    tiles = -(-counts // tile_rows)  # [G]
    expert = np.repeat(np.arange(len(counts)), tiles)
    first_tile = np.cumsum(tiles) - tiles
    within = (np.arange(len(expert)) - first_tile[expert]) * tile_rows
    starts = np.cumsum(counts) - counts
    rows = np.minimum(tile_rows, counts[expert] - within)
    return np.stack([expert, starts[expert] + within, rows], axis=1).astype(np.int32)


def place_table(flat_rows: np.ndarray, tokens: int, top_k: int) -> np.ndarray:
    """``[T, K]`` int32: the sorted row of each choice, -1 where it is not among `flat_rows`.

    flat_rows: ``[R]`` for each sorted row its ``token * K + k``.
    """
    table = np.full(tokens * top_k, -1, dtype=np.int32)
    table[flat_rows] = np.arange(len(flat_rows), dtype=np.int32)
    return table.reshape(tokens, top_k)
