"""Chunk sizes, conversations on one cache, and caches handed to stock mlx-lm."""

import pytest

from tests.prefill.running import decode, relative, routed_experts, settled_prompt, stock_decode
from tests.support.checkpoints import random_tokens, stock_prefill

# Plain, sliding with sinks, chunked, recurrent (gated delta), sparse attention, shared keys and
# values with sliding, recurrent with latent attention.
REPRESENTATIVE = (
    "qwen3_moe",
    "gpt_oss",
    "llama4",
    "qwen3_next",
    "deepseek_v32",
    "gemma4_text",
    "kimi_linear",
)
N, STEPS = 50, 4


def tokens_of(rows):
    return [int(row.argmax()) for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 16, N])
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_chunk_sizes_do_not_change_the_answer(checkpoint, stock, open_engine, name, chunk):
    path = checkpoint(name)
    prompt, rows = settled_prompt(stock(path), N, STEPS)
    engine = open_engine(path, chunk_tokens=chunk)
    result = engine.prefill(prompt)
    assert relative(result.logits, rows[0]) < 1e-4
    assert decode(engine, result, prompt, STEPS) == tokens_of(rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_a_second_prompt_goes_on_from_the_first(checkpoint, stock, open_engine, name):
    """Prompt, two answer tokens, prompt: as a conversation does. Windows wrap in between."""
    path, model = checkpoint(name), stock(checkpoint(name))
    first, rows = settled_prompt(model, 37, 3)
    second = random_tokens(model, 29, seed=77)

    _, cache = stock_prefill(model, first, 16)
    stock_decode(model, rows[0], cache, 3)
    expected, cache = stock_prefill_on(model, second, cache)
    expected_rows = stock_decode(model, expected, cache, 3)

    engine = open_engine(path)
    result = engine.prefill(first)
    assert decode(engine, result, first, 3) == tokens_of(rows)
    again = engine.prefill(second, result.cache)
    assert again.cache is result.cache
    assert relative(again.logits, expected) < 1e-4
    assert decode(engine, again, second, 3) == tokens_of(expected_rows)
    fresh = engine.prefill(second)
    assert relative(fresh.logits, expected) > 1e-3, "what was said before must matter"


def stock_prefill_on(model, tokens, cache):
    """As stock_prefill, on a cache that already holds something."""
    import mlx.core as mx
    import numpy as np

    for start in range(0, len(tokens) - 1, 16):
        model(mx.array(tokens[start : min(start + 16, len(tokens) - 1)])[None], cache=cache)
        mx.eval([c.state for c in cache])
    logits = model(mx.array(tokens[-1:])[None], cache=cache)[0, -1]
    return np.array(logits.astype(mx.float32)), cache


@pytest.mark.slow
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_stock_mlx_lm_decodes_from_our_cache(checkpoint, stock, open_engine, name):
    path, model = checkpoint(name), stock(checkpoint(name))
    prompt, rows = settled_prompt(model, N, STEPS)
    result = open_engine(path).prefill(prompt)
    ours = stock_decode(model, result.logits, result.cache, STEPS)
    assert tokens_of(ours) == tokens_of(rows)
    assert max(relative(a, b) for a, b in zip(ours, rows, strict=True)) < 1e-4


def test_our_model_decodes_from_a_stock_cache(checkpoint, stock, open_engine):
    path, model = checkpoint("qwen3_moe"), stock(checkpoint("qwen3_moe"))
    prompt, rows = settled_prompt(model, N, STEPS)
    logits, cache = stock_prefill(model, prompt, 16)
    ours = stock_decode(open_engine(path).model, logits, cache, STEPS)
    assert tokens_of(ours) == tokens_of(rows)


def test_the_prompt_without_the_last_token_makes_the_same_cache(checkpoint, stock, open_engine):
    """mlx-lm prefills all but the last token; a cache of ours may be continued either way."""
    path, model = checkpoint("qwen3_moe"), stock(checkpoint("qwen3_moe"))
    prompt, rows = settled_prompt(model, N, STEPS)
    engine = open_engine(path)
    part = engine.prefill(prompt[:-1])
    whole = engine.prefill(prompt[-1:], part.cache)
    assert relative(whole.logits, rows[0]) < 1e-4
    assert decode(engine, whole, prompt, STEPS) == tokens_of(rows)


def test_prompts_route_to_several_experts(checkpoint, stock):
    """A guard of the tests themselves: parity on a collapsed routing would prove little."""
    for name in REPRESENTATIVE:
        model = stock(checkpoint(name))
        used = routed_experts(model, random_tokens(model, N))
        assert min(len(experts) for experts in used) >= 4, name
