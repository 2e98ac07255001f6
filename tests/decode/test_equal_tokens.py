"""Greedy tokens equal stock mlx-lm's on every path, with every option, at every cache size."""

from __future__ import annotations

import os

import pytest

from mlx_stream.decode.options import PATHS, PREDICTORS
from mlx_stream.decode.policy import POLICIES
from mlx_stream.hub import demo_path
from tests.decode.running import (
    answer,
    check_slots,
    covering,
    hold,
    records,
    settled_answer,
    token_set,
)

BIG = os.environ.get("MLX_STREAM_BIG") == "1"
N, OTHER_STEPS = 30, 24
STEPS = 256 if BIG else 64
DEMO_STEPS = 256
# Plain KV, sliding window, recurrent state, MLA.
MODELS = ("demo", "qwen3_moe", "gpt_oss", "qwen3_next", "deepseek_v3")
COLUMNS = {
    "model": MODELS,
    "held": ("all", "half", "12%", "token", "3", "1"),
    "path": PATHS,
    "predict": PREDICTORS,
    "policy": POLICIES,
    "kind": ("open_engine", "open_metal"),
}
# All triples take a quarter of an hour, all pairs a minute.
ROWS = covering(COLUMNS, 3 if BIG else 2)


def capacity(engine, held):
    """Records of a cache size named in COLUMNS."""
    total = records(engine)
    named = {"all": total, "half": total // 2, "12%": total * 12 // 100}
    return named.get(held) or (token_set(engine) if held == "token" else int(held))


def name_of(row):
    return "-".join(str(value) for value in row.values())


def test_the_rows_cover_what_they_say():
    for a in COLUMNS:
        for b in COLUMNS:
            pairs = {(row[a], row[b]) for row in ROWS}
            assert a == b or len(pairs) == len(COLUMNS[a]) * len(COLUMNS[b])


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_tokens_equal_stock(checkpoint, stock, request, monkeypatch, row):
    path = demo_path() if row["model"] == "demo" else checkpoint(row["model"])
    steps = DEMO_STEPS if row["model"] == "demo" else STEPS
    prompt, expected = settled_answer(stock, path, N, steps)
    other, others = settled_answer(stock, path, N + 5, OTHER_STEPS)
    engine = request.getfixturevalue(row["kind"])(
        path,
        decode_path=row["path"],
        cache_policy=row["policy"],
        predict=row["predict"],
        memory_budget=2 << 30,
    )
    held = capacity(engine, row["held"])
    hold(engine, monkeypatch, held)
    assert answer(engine, prompt, steps) == expected
    # Another prompt on the same engine shifts the routing; then the first again, on a warm cache.
    assert answer(engine, other, OTHER_STEPS) == others
    assert answer(engine, prompt, OTHER_STEPS) == expected[:OTHER_STEPS]
    assert len(engine.decoder.cache) <= held
    check_slots(engine)
    assert engine.decode_metrics.totals.tokens == steps + 2 * OTHER_STEPS - 3
