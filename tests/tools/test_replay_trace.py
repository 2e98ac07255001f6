"""The replay tool: tables, JSON, hot lists, and mistakes."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from mlx_stream.decode.hot_list import HotList
from mlx_stream.decode.replay import replay
from tests.support.traces import random_trace
from tools.replay_trace import main


@pytest.fixture
def files(tmp_path):
    paths = [tmp_path / "a.npz", tmp_path / "b.npz"]
    for seed, path in enumerate(paths):
        random_trace(seed=seed, steps=40).save(path)
    return paths


def run(*args):
    return CliRunner().invoke(main, [str(a) for a in args])


def rows_of(*args):
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_json_equals_the_replay(files):
    content = rows_of(*files, "--budgets", "50%,600B", "--policies", "lru", "--seeds", "none")
    assert content["spans"] == [32, 40]
    assert content["traces"] == ["a.npz", "b.npz"]
    for budget, nbytes in (("50%", 1200), ("600B", 600)):
        rows = {r["policy"]: r for r in content["rows"] if r["budget"] == budget}
        assert list(rows) == ["streamlx", "streamlx+rest", "lru", "belady", "belady+oracle"]
        traces = [random_trace(seed=seed, steps=40) for seed in range(2)]
        ours = sum(replay(t, "lru", nbytes, seed="none").nbytes.sum() for t in traces)
        peer = sum(replay(t, "streamlx", nbytes).nbytes.sum() for t in traces)
        assert rows["lru"]["bytes_per_token"][1] == pytest.approx(ours / 80)
        assert rows["lru"]["to_streamlx"][1] == pytest.approx(ours / peer)
        assert rows["lru"]["to_belady"][1] >= 1
        assert rows["belady+oracle"]["to_belady"][1] <= 1


def test_tables(files):
    result = run(files[0], "--budgets", "100%,25%")
    assert result.exit_code == 0, result.output
    for word in ("cache of 100%", "cache of 25%", "streamlx", "lfu", "belady+oracle", "hit rate"):
        assert word in result.output


def test_hot_lists(files, tmp_path):
    hot = tmp_path / "hot.json"
    result = run(*files, "--save-hot-list", hot)
    assert result.exit_code == 0, result.output
    assert HotList.load(hot).model == "random"
    content = rows_of(files[0], "--budgets", "25%", "--policies", "lfu", "--hot-list", hot)
    assert ("lfu", "hot-list") in {(r["policy"], r["seed"]) for r in content["rows"]}


def test_mistakes(files, tmp_path):
    for args in (
        [files[0], "--budgets", "many%"],
        [files[0], "--budgets", "x"],
        [files[0], "--policies", "mru"],
        [files[0], "--seeds", "luck"],
        [tmp_path / "none.npz"],
        [files[0], "--hot-list", files[0]],
        [],
    ):
        result = run(*args)
        assert result.exit_code in (1, 2), args
        assert isinstance(result.exception, SystemExit), args
    random_trace(steps=0).save(tmp_path / "empty.npz")
    assert "no decoded tokens" in run(tmp_path / "empty.npz").output
