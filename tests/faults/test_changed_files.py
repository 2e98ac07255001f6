"""Files that change under a loaded runtime: noticed, named, and the caller's cache is unharmed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import mlx_stream
from mlx_stream import errors
from mlx_stream.experts.streamed_experts import install_streamed_experts
from mlx_stream.loader import load_streamed_model
from tests.support.checkpoints import random_tokens
from tests.support.faults import (
    assert_same_contents,
    cache_contents,
    fails,
    find_tensor,
    modify_in_place,
    nothing_left,
    replace_by_rename,
    shards,
    shorten,
)

BUDGET = "1GB"
CHANGES = {
    "replaced by rename": replace_by_rename,
    "modified in place": modify_in_place,
    "shortened": shorten,
    "removed": Path.unlink,
}


@pytest.fixture(params=CHANGES)
def change(request):
    """One way in which a file changes."""
    return CHANGES[request.param]


@pytest.fixture
def folder(copy) -> Path:
    """A checkpoint to change."""
    return copy()


@pytest.fixture
def shard(folder) -> Path:
    """The shard with experts of the last layer."""
    return find_tensor(folder, "layers.3.mlp.switch_mlp.up_proj.weight")[0]


def test_between_headers_and_first_read(folder, shard, monkeypatch, change):
    def load_then_change(*args, **options):
        loaded = load_streamed_model(*args, **options)
        change(shard)
        return loaded

    monkeypatch.setattr("mlx_stream.engine.load_streamed_model", load_then_change)
    with fails(errors.FileChangedError) as caught:
        mlx_stream.load(folder, memory_budget=BUDGET)
    assert caught.error.file == str(shard)


def test_between_load_and_prefill(folder, shard, prompt, change):
    with nothing_left(), mlx_stream.load(folder, memory_budget=BUDGET) as runtime:
        change(shard)
        for _ in range(2):  # it does not heal by trying again
            with pytest.raises(errors.FileChangedError) as caught:
                runtime.prefill(prompt)
            assert caught.value.file == str(shard)
        assert runtime.last_receipt is None


def test_during_prefill(folder, shard, intact, prompt, answer, change):
    """The prompt fails, and a cache that held an earlier prompt can go on elsewhere."""
    tail = random_tokens(100, 40, seed=8)

    def change_once(at):
        if at.layer == 1:
            change(shard)

    with nothing_left(), mlx_stream.load(folder, memory_budget=BUDGET) as runtime:
        cache = runtime.prefill(prompt).cache
        before = cache_contents(cache)
        with pytest.raises((errors.FileChangedError, errors.EndOfFileError)) as caught:
            runtime.prefill(tail, cache, progress=change_once)
        assert caught.value.file == str(shard)
        assert_same_contents(cache, before)

    with mlx_stream.load(intact, memory_budget=BUDGET) as sound:
        fresh = sound.prefill(prompt).cache
        expected = [r.token for r in sound.stream_generate(tail, 4, prompt_cache=fresh)]
        assert [r.token for r in sound.stream_generate(tail, 4, prompt_cache=cache)] == expected


def test_during_decode(folder, shard, prompt, answer, change):
    """No token comes from a changed file: those before are right, then a typed error."""
    with nothing_left(), mlx_stream.load(folder, memory_budget=BUDGET) as runtime:
        tokens = runtime.stream_generate(prompt, len(answer))
        got = [next(tokens).token for _ in range(2)]
        change(shard)
        runtime.engine.decoder.cache.resize(1)  # so that the next token must read
        with pytest.raises((errors.FileChangedError, errors.EndOfFileError)) as caught:
            got.extend(response.token for response in tokens)
        assert caught.value.file == str(shard)
        assert got == answer[:2]


def test_while_resident_weights_are_read(folder, monkeypatch):
    """mlx reads them lazily, after the headers: a file cut by then is a typed error too."""

    def install_then_damage(*args, **options):
        installed = install_streamed_experts(*args, **options)
        for path in shards(folder):
            os.truncate(path, 10_000)
        return installed

    monkeypatch.setattr("mlx_stream.loader.install_streamed_experts", install_then_damage)
    with fails(errors.ReadError) as caught:
        mlx_stream.load(folder, memory_budget=BUDGET)
    assert str(folder) in str(caught.error)
    assert caught.error.tensor
