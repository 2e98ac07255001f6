"""Hot lists: learnt from traces, checked on load, tied to a model's shape."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from mlx_stream.decode.hot_list import HotList, HotListError
from mlx_stream.decode.seed_policy import HORIZON
from tests.support.traces import random_trace

SHAPE = [(0, 8), (2, 8), (3, 8)]


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "hot.json"
    HotList.from_traces([random_trace(seed=1), random_trace(seed=2)]).save(path)
    return path


def test_ranks_by_uses_over_all_traces(saved):
    traces = [random_trace(seed=1), random_trace(seed=2)]
    hot = HotList.load(saved)
    assert hot == HotList.from_traces(traces)
    assert hot.model == "random"
    for i, layer in enumerate(hot.layers):
        uses = np.zeros(8)
        for trace in traces:
            for row in trace.decode[i].tolist():
                for expert in row:
                    uses[expert] += HORIZON / 24
        np.testing.assert_allclose(layer.scores_by_id(), uses, atol=1e-4)
        assert list(layer.scores) == sorted(layer.scores, reverse=True)
        assert set(layer.experts) == set(np.flatnonzero(uses).tolist())


def test_belongs_to_its_model(saved):
    hot = HotList.load(saved)
    hot.check_model(SHAPE)
    for other in ([], SHAPE[:2], [(0, 8), (1, 8), (3, 8)], [(0, 8), (2, 8), (3, 16)]):
        with pytest.raises(HotListError, match="another model") as caught:
            hot.check_model(other, saved)
        assert caught.value.file == str(saved)
        assert caught.value.remedy


def test_traces_must_be_of_one_model_and_decode_something():
    trace = random_trace()
    for traces in ([], [trace, random_trace(layers=(0, 1, 2))], [random_trace(steps=0)]):
        with pytest.raises(HotListError, match="one model"):
            HotList.from_traces(traces)


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"version": 2},
        {"layers": []},
        {"layers": [3]},
        {"layers": {}},
    ],
)
def test_a_wrong_file_is_refused(saved, change):
    saved.write_text(json.dumps(json.loads(saved.read_text()) | change))
    with pytest.raises(HotListError) as caught:
        HotList.load(saved)
    assert caught.value.file == str(saved)
    assert caught.value.remedy


@pytest.mark.parametrize(
    "change",
    [
        {"index": -1},
        {"index": "0"},
        {"index": 2},
        {"num_experts": 1},
        {"num_experts": None},
        {"experts": [0, 0], "scores": [2, 1]},
        {"experts": [0], "scores": [2, 1]},
        {"experts": [0.0], "scores": [2]},
        {"experts": [True], "scores": [2]},
        {"experts": [8], "scores": [2]},
        {"experts": [0, 1], "scores": [1, 2]},
        {"experts": [0], "scores": [0]},
        {"experts": [0], "scores": [float("nan")]},
        {"experts": [0], "scores": ["1"]},
        {"experts": 3},
        {"scores": None},
    ],
)
def test_a_wrong_layer_is_refused(saved, change):
    content = json.loads(saved.read_text())
    content["layers"][0] |= change
    saved.write_text(json.dumps(content))
    with pytest.raises(HotListError, match="damaged"):
        HotList.load(saved)


def test_unreadable_files_are_refused(tmp_path, saved, monkeypatch):
    (tmp_path / "text").write_text("hello")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "deep").write_text("[" * 100_000)
    for name in ("missing", "text", "bytes", "deep", "."):
        with pytest.raises(HotListError, match="cannot be read"):
            HotList.load(tmp_path / name)
    monkeypatch.setattr("mlx_stream.decode.hot_list.MAX_NBYTES", 10)
    with pytest.raises(HotListError, match="size"):
        HotList.load(saved)


def test_an_unwritable_place_is_an_error(tmp_path):
    hot = HotList.from_traces([random_trace()])
    with pytest.raises(HotListError, match="cannot be written"):
        hot.save(tmp_path / "no" / "hot.json")


def test_a_layer_may_list_nothing(tmp_path):
    hot = HotList.from_traces([random_trace()])
    empty = replace(hot, layers=(replace(hot.layers[0], experts=(), scores=()), *hot.layers[1:]))
    empty.save(tmp_path / "hot.json")
    assert HotList.load(tmp_path / "hot.json").layers[0].scores_by_id().tolist() == [0.0] * 8
