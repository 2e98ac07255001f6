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
N, OTHER_STEPS, LONG = 30, 16, 256
STEPS = LONG if BIG else 40
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
# All triples of options take half an hour, all pairs a minute.
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
    prompt, expected = settled_answer(stock, path, N, STEPS)
    other, others = settled_answer(stock, path, N + 5, OTHER_STEPS)
    open_one = request.getfixturevalue(row["kind"])
    engine = open_one(
        path,
        decode_path=row["path"],
        cache_policy=row["policy"],
        predict=row["predict"],
        prerouter="off",  # the demo's heads change the answer
    )
    held = capacity(engine, row["held"])
    hold(engine, monkeypatch, held)
    assert answer(engine, prompt, STEPS) == expected
    # Another prompt on the same engine shifts the routing; then the first again, on a warm cache.
    assert answer(engine, other, OTHER_STEPS) == others
    assert answer(engine, prompt, OTHER_STEPS) == expected[:OTHER_STEPS]
    assert len(engine.decoder.cache) <= held
    check_slots(engine)
    assert engine.decode_metrics.totals.tokens == STEPS + 2 * OTHER_STEPS - 3


@pytest.mark.parametrize(
    ("kind", "path", "held"),
    [
        ("open_engine", "auto", "half"),
        ("open_metal", "auto", "all"),
        ("open_metal", "exact", "12%"),
    ],
)
def test_a_long_answer_of_the_demo(stock, request, monkeypatch, kind, path, held):
    prompt, expected = settled_answer(stock, demo_path(), N, LONG)
    engine = request.getfixturevalue(kind)(demo_path(), decode_path=path, prerouter="off")
    hold(engine, monkeypatch, capacity(engine, held))
    assert answer(engine, prompt, LONG) == expected
    paths = engine.decode_metrics.totals.paths
    assert set(paths) == ({"exact", "hot"} if (kind, path) == ("open_metal", "auto") else {"exact"})
