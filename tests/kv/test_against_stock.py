"""Quantized and limited caches give what stock mlx-lm gives under the same options."""

import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from mlx_stream.errors import KvCacheError
from mlx_stream.kv.options import PLAIN, KvOptions
from tests.kv.running import clear_prompt, our_run, stock_run, tokens_of
from tests.support.checkpoints import random_tokens

N, STEPS = 50, 4
PLAIN_KV = ("qwen3_moe", "mixtral", "olmoe", "phimoe", "qwen3_next", "granitemoehybrid")


def same(got, expected, tolerance=5e-3):
    assert tokens_of(got) == tokens_of(expected)
    scale = max(np.abs(row).max() for row in expected)
    assert max(np.abs(a - b).max() for a, b in zip(got, expected, strict=True)) < tolerance * scale


@pytest.mark.parametrize("chunk", [16, N])
@pytest.mark.parametrize(("bits", "start"), [(8, 0), (8, 20), (4, 20), (8, 52)])
def test_quantized_chunk_by_chunk(checkpoint, stock, open_engine, bits, start, chunk):
    kv = KvOptions(kv_bits=bits, kv_group_size=32, quantized_kv_start=start)
    path = checkpoint("qwen3_moe")
    prompt, rows = clear_prompt(stock(path), N, STEPS, kv, chunk)
    ours, cache = our_run(open_engine(path, chunk_tokens=chunk), prompt, STEPS, kv)
    same(ours, rows)
    kinds = {type(c) for c in cache}
    assert kinds == {QuantizedKVCache} if start < N else QuantizedKVCache not in kinds


@pytest.mark.slow
@pytest.mark.parametrize("name", PLAIN_KV)
def test_quantized_families(checkpoint, stock, open_engine, name):
    kv = KvOptions(kv_bits=8, kv_group_size=32, quantized_kv_start=17)
    path = checkpoint(name)
    prompt, rows = clear_prompt(stock(path), N, STEPS, kv, 16)
    ours, cache = our_run(open_engine(path), prompt, STEPS, kv)
    same(ours, rows)
    assert any(type(c) is QuantizedKVCache for c in cache)
    assert not any(type(c) is KVCache for c in cache)


def differences(ours, theirs):
    """Share of other codes, and the largest relative difference of a scale, over all layers."""
    codes, scales = [], []
    for a, b in zip(ours, theirs, strict=True):
        assert (a.offset, a.bits, a.group_size) == (b.offset, b.bits, b.group_size)
        for got, expected in zip((a.keys, a.values), (b.keys, b.values), strict=True):
            one, two = (np.array(x[0])[..., :N, :] for x in (got, expected))
            codes.append((one != two).mean())
            one, two = (np.array(x[1])[..., :N, :] for x in (got, expected))
            scales.append(np.abs(one / two - 1).max())
    return max(codes), max(scales)


def test_the_quantized_layers_are_those_of_stock_mlx_lm(checkpoint, stock, open_engine):
    """Value by value: keys and values went through the same roundings, in the same order.

    A value on the edge may round either way; another order changes a quarter of them.
    """
    kv = KvOptions(kv_bits=4, kv_group_size=32, quantized_kv_start=20)
    path = checkpoint("qwen3_moe")
    model = stock(path)
    prompt = random_tokens(model, N, 3)
    same_chunks, one_chunk = ([KVCache() for _ in model.layers] for _ in range(2))
    stock_run(model, prompt, 0, kv, 16, same_chunks)
    stock_run(model, prompt, 0, kv, N, one_chunk)
    _, ours = our_run(open_engine(path), prompt, 1, kv)
    codes, scales = differences(ours, same_chunks)
    assert codes < 0.01
    assert scales < 0.01
    assert differences(ours, one_chunk)[0] > 0.1


def test_quantizing_changes_the_answer(checkpoint, open_engine):
    """A guard of the tests: options that did nothing would pass them all."""
    engine = open_engine(checkpoint("qwen3_moe"))
    prompt = random_tokens(160, N, 1)
    plain, _ = our_run(engine, prompt, 1, PLAIN)
    coarse, _ = our_run(
        engine, prompt, 1, KvOptions(kv_bits=2, kv_group_size=32, quantized_kv_start=0)
    )
    assert np.abs(plain[0] - coarse[0]).max() > 1e-2


@pytest.mark.parametrize("size", [12, 40, 200])
@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_limited(checkpoint, stock, open_engine, name, size):
    kv = KvOptions(max_kv_size=size)
    path = checkpoint(name)
    prompt, rows = clear_prompt(stock(path), N, STEPS, kv, 16)
    ours, cache = our_run(open_engine(path), prompt, STEPS, kv)
    same(ours, rows, 1e-3)
    assert all(type(c) is RotatingKVCache and c.max_size == size for c in cache)
    assert all(c.keys.shape[2] <= max(size, 256) for c in cache)


def test_a_second_prompt_on_a_quantized_cache(checkpoint, stock, open_engine):
    kv = KvOptions(kv_bits=8, kv_group_size=32, quantized_kv_start=30)
    path = checkpoint("qwen3_moe")
    model, engine = stock(path), open_engine(path)
    first, second = random_tokens(model, 24, 1), random_tokens(model, 29, 2)
    theirs = [KVCache() for _ in model.layers]
    stock_run(model, first, 0, kv, 16, theirs)
    expected = stock_run(model, second, 1, kv, 16, theirs)
    cache = engine.prefill(first, kv=kv).cache
    ours, cache = our_run(engine, second, 1, kv, cache)
    np.testing.assert_allclose(ours[0], expected[0], atol=2e-2)
    assert all(type(c) is QuantizedKVCache for c in cache)


def test_a_failed_prefill_leaves_the_cache_as_it_was(checkpoint, open_engine, monkeypatch):
    kv = KvOptions(kv_bits=8, kv_group_size=32, quantized_kv_start=10)
    engine = open_engine(checkpoint("qwen3_moe"))
    first, second = random_tokens(160, 8, 1), random_tokens(160, 40, 2)
    result = engine.prefill(first, kv=kv)
    before = [np.array(c.keys_and_values()[0]) for c in result.cache]

    def broken(at):
        if at.layer == 2:
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        engine.prefill(second, result.cache, kv=kv, progress=broken)
    for layer, keys in zip(result.cache, before, strict=True):
        assert layer.offset == 8
        np.testing.assert_array_equal(np.array(layer.keys_and_values()[0]), keys)
    again = engine.prefill(second, result.cache, kv=kv).logits
    fresh = engine.prefill(second, engine.prefill(first, kv=kv).cache, kv=kv).logits
    np.testing.assert_allclose(np.array(again), np.array(fresh), atol=1e-4)


# --- what a model cannot do is said before anything is read


@pytest.mark.parametrize(
    ("name", "kv"),
    [
        ("gpt_oss", KvOptions(kv_bits=8, kv_group_size=32)),  # windows: NotImplementedError there
        ("deepseek_v3", KvOptions(kv_bits=8, kv_group_size=32)),  # latent attention: TypeError
        ("deepseek_v32", KvOptions(kv_bits=8, kv_group_size=32)),  # CacheList: ignored there
        ("deepseek_v41", KvOptions(kv_bits=8, kv_group_size=32)),
        ("qwen3_moe", KvOptions(kv_bits=8, kv_group_size=64)),  # heads of 32 values
        ("qwen3_next", KvOptions(max_kv_size=64)),  # ignored there
    ],
)
def test_unsupported(checkpoint, open_engine, name, kv):
    engine = open_engine(checkpoint(name))
    calls = engine.reader.counters.calls
    with pytest.raises(KvCacheError) as error:
        engine.prefill([1, 2, 3], kv=kv)
    assert error.value.expected
    assert error.value.actual
    assert "leave it out" in error.value.remedy
    assert engine.reader.counters.calls == calls


def test_other_options_than_the_cache_was_made_with(checkpoint, open_engine):
    engine = open_engine(checkpoint("qwen3_moe"))
    kv = KvOptions(kv_bits=8, kv_group_size=32, quantized_kv_start=0)
    cache = engine.prefill([1, 2, 3], kv=kv).cache
    with pytest.raises(KvCacheError, match="quantized otherwise"):
        engine.prefill([4], cache, kv=KvOptions(kv_bits=4, kv_group_size=32))
    with pytest.raises(KvCacheError, match="size limit"):
        engine.prefill([4], cache, kv=KvOptions(max_kv_size=64))
    engine.prefill([4], cache)


# --- the plan


@pytest.mark.parametrize("tokens", [50, 700])
@pytest.mark.parametrize(
    "kv",
    [
        PLAIN,
        KvOptions(max_kv_size=100),
        KvOptions(kv_bits=4, kv_group_size=32, quantized_kv_start=0),
        KvOptions(kv_bits=8, kv_group_size=32, quantized_kv_start=600),
    ],
)
def test_the_plan_is_an_upper_bound_of_the_cache(checkpoint, open_engine, kv, tokens):
    engine = open_engine(checkpoint("qwen3_moe"), chunk_tokens=256)
    plan = engine.plan(tokens, kv=kv)
    held = []
    cache = engine.kv.prepare(None, kv)
    engine.prefill(
        random_tokens(160, tokens),
        cache,
        kv=kv,
        progress=lambda at: held.append(sum(c.nbytes for c in cache if not c.empty())),
    )
    # The layer that is being filled counts as transient, before it is quantized.
    layer = engine.plan(tokens).memory.kv // len(cache)
    assert max(held) <= plan.memory.kv + layer
    assert sum(c.nbytes for c in cache) <= plan.memory.kv


def test_the_plan_counts_on_quantized_layers_only_where_all_are(checkpoint, open_engine):
    kv = KvOptions(kv_bits=8, kv_group_size=32, quantized_kv_start=0)
    assert open_engine(checkpoint("qwen3_moe")).kv.planned(kv) is kv
    assert open_engine(checkpoint("qwen3_next")).kv.planned(kv) is PLAIN
