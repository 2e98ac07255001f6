"""Every mlx-lm MoE family, streamed, against stock mlx-lm holding all weights in memory."""

import pytest

from tests.prefill.running import decode, relative, settled_prompt
from tests.support.families import FAMILIES, with_tag

N, CHUNK, STEPS = 83, 16, 8


def test_the_sweep_covers_every_kind_of_cache():
    assert len(FAMILIES) >= 53
    for tag in ("sliding", "chunked", "recurrent", "mla", "sparse_attention", "mlp", "latent"):
        assert with_tag(tag)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_streamed_prefill_equals_stock(checkpoint, stock, open_engine, name):
    path = checkpoint(name)
    prompt, rows = settled_prompt(stock(path), N, STEPS, CHUNK)
    engine = open_engine(path, chunk_tokens=CHUNK)
    result = engine.prefill(prompt)
    assert relative(result.logits, rows[0]) < 1e-4
    assert decode(engine, result, prompt, STEPS) == [int(row.argmax()) for row in rows]
    assert result.receipt.segments == 1
    assert result.receipt.chunk_tokens == CHUNK


@pytest.mark.parametrize(
    "name", ["qwen3_moe", "gpt_oss", "llama4", "qwen3_next", "deepseek_v32", "gemma4_text"]
)
def test_short_prompts_by_union_equal_stock(checkpoint, stock, open_engine, name):
    """The default for prompts of this length: route first, then read the experts used."""
    path = checkpoint(name)
    prompt, rows = settled_prompt(stock(path), N, STEPS, CHUNK)
    engine = open_engine(path, chunk_tokens=CHUNK, union_tokens=512)
    result = engine.prefill(prompt)
    assert result.receipt.mode == "union"
    assert relative(result.logits, rows[0]) < 1e-4
    assert decode(engine, result, prompt, STEPS) == [int(row.argmax()) for row in rows]
