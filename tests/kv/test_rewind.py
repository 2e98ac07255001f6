"""Going back in a cache: only where what follows is then exactly right."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache

from mlx_stream.kv.options import KvOptions
from mlx_stream.kv.rewind import CachePoint, can_rewind, common_prefix, rewind
from tests.prefill.running import relative
from tests.support.checkpoints import random_tokens, stock_prefill

N, BACK = 60, 20
NAMES = ("qwen3_moe", "gpt_oss", "llama4", "qwen3_next", "deepseek_v32", "deepseek_v41")


def test_common_prefix():
    assert common_prefix([1, 2, 3], [1, 2, 4]) == 2
    assert common_prefix([1, 2], [1, 2, 4]) == common_prefix([1, 2, 4], [1, 2]) == 2
    assert common_prefix([], [1]) == 0


@pytest.mark.parametrize("chunk", [1, 16])
@pytest.mark.parametrize("back", [1, 5, BACK])
@pytest.mark.parametrize("name", NAMES)
def test_what_can_be_rewound_goes_on_as_if_nothing_had_been(checkpoint, stock, name, back, chunk):
    model = stock(checkpoint(name))
    prompt, more = random_tokens(model, N, 1), random_tokens(model, 6, 2)
    _, cache = stock_prefill(model, prompt, chunk)
    if not can_rewind(cache, back):
        assert name not in ("qwen3_moe", "deepseek_v32")
        return
    rewind(cache, back)
    expected, _ = stock_prefill(model, prompt[:-back] + more, 16)
    assert relative(model(mx.array([more]), cache=cache)[0, -1], expected) < 1e-4


def test_stock_trimming_of_chunked_caches_would_be_wrong(checkpoint, stock):
    """Why llama4 is not simply trimmed."""
    model = stock(checkpoint("llama4"))
    prompt, more = random_tokens(model, N, 1), random_tokens(model, 6, 2)
    _, cache = stock_prefill(model, prompt, 1)
    assert can_trim_prompt_cache(cache)
    assert not can_rewind(cache, 15)
    trim_prompt_cache(cache, 15)
    expected, _ = stock_prefill(model, prompt[:-15] + more, 16)
    logits = model(mx.array([more]), cache=cache)[0, -1]
    assert relative(logits, expected) > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_points_come_back_twice(checkpoint, open_engine, name):
    engine = open_engine(checkpoint(name))
    prompt, more = random_tokens(160, N, 1), random_tokens(160, 25, 2)
    result = engine.prefill(prompt)
    point = CachePoint(result.cache, N)
    first = np.array(engine.prefill(more, result.cache).logits)
    for _ in range(2):
        point.restore()
        again = np.array(engine.prefill(more, result.cache).logits)
        assert relative(again, first) < 1e-5


def test_a_point_before_the_cache_was_quantized(checkpoint, open_engine):
    engine = open_engine(checkpoint("qwen3_moe"))
    kv = KvOptions(kv_bits=8, kv_group_size=32, quantized_kv_start=30)
    result = engine.prefill(random_tokens(160, 20, 1), kv=kv)
    point = CachePoint(result.cache, 20)
    engine.prefill(random_tokens(160, 25, 2), result.cache, kv=kv)
    point.restore()
    assert all(c.offset == 20 for c in result.cache)
    engine.prefill([1, 2], result.cache, kv=kv)
    assert all(c.offset == 22 for c in result.cache)
