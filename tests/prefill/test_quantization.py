"""Every quantization a checkpoint may have, in experts and in resident layers."""

import json

import pytest

from tests.prefill.running import decode, relative, settled_prompt

MIXED = (
    (r"down_proj", {"bits": 8}),
    (r"layers\.1\..*(gate|up)_proj", {"bits": 8, "group_size": 32}),
    (r"layers\.2\..*switch_mlp", False),
    (r"layers\.2\..*experts\.", False),
    (r"(q|k)_proj", {"bits": 6}),
)
VARIANTS = {
    "affine-4-g32": {"bits": 4, "group_size": 32},
    "affine-4-g64": {"bits": 4, "group_size": 64},
    "affine-8": {"bits": 8},
    "affine-3": {"bits": 3},
    "mxfp4": {"mode": "mxfp4"},
    "mxfp8": {"mode": "mxfp8"},
    "nvfp4": {"mode": "nvfp4"},
    "mixed": {"overrides": MIXED},
    "float32": {"mode": "none"},
    "bfloat16": {"mode": "none", "dtype": "bfloat16"},
    "affine-4-bfloat16": {"bits": 4, "dtype": "bfloat16"},
    "mxfp4-float16": {"mode": "mxfp4", "dtype": "float16"},
}
N, STEPS = 40, 4


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_quantized_experts_equal_stock(checkpoint, stock, open_engine, name, variant):
    path = checkpoint(name, **VARIANTS[variant])
    prompt, rows = settled_prompt(stock(path), N, STEPS)
    engine = open_engine(path)
    result = engine.prefill(prompt)
    assert relative(result.logits, rows[0]) < 1e-4
    assert decode(engine, result, prompt, STEPS) == [int(row.argmax()) for row in rows]


def test_the_mixed_variant_is_mixed(checkpoint):
    """A guard of the test above: the overrides reach the experts."""
    from mlx_stream.storage.checkpoint import open_checkpoint
    from mlx_stream.storage.expert_index import build_expert_index

    for name in ("qwen3_moe", "gpt_oss"):
        path = checkpoint(name, overrides=MIXED)
        index = build_expert_index(open_checkpoint(path))
        specs = {(s.mode, s.bits, s.group_size) for layer in index.layers for _, s in layer.quant}
        assert len(specs) >= 3, specs
        quantization = json.loads((path / "config.json").read_text())["quantization"]
        assert sum(isinstance(v, dict | bool) for v in quantization.values()) > 4
