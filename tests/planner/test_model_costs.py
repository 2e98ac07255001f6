"""FLOPs and bytes of a model, against the modules that mlx-lm builds and against sums by hand."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from mlx_stream.planner.model_costs import elementwise_values, model_costs, pairs
from mlx_stream.storage.checkpoint import open_checkpoint
from mlx_stream.storage.expert_index import build_expert_index

# A sample of layouts: plain, shared experts, dense first layers, latent attention, fused, windows,
# recurrent layers, top-level names that differ.
FAMILIES = (
    "qwen3_moe",
    "qwen2_moe",
    "mixtral",
    "deepseek_v2",
    "glm4_moe",
    "gpt_oss",
    "granitemoe",
    "phimoe",
    "qwen3_next",
)


def costs_of(path):
    checkpoint = open_checkpoint(path)
    return model_costs(build_expert_index(checkpoint), checkpoint.config), checkpoint


def module_flops(model) -> float:
    """Two per weight of every linear module outside experts and vocabulary, from their shapes."""
    experts = [n for n, m in model.named_modules() if isinstance(m, SwitchGLU | SwitchMLP)]
    total = 0.0
    for name, module in model.named_modules():
        inside = any(name.startswith(prefix + ".") for prefix in experts)
        if inside or not isinstance(module, nn.Linear | nn.QuantizedLinear) or "lm_head" in name:
            continue
        outputs, words = module.weight.shape
        packed = isinstance(module, nn.QuantizedLinear)
        total += 2.0 * outputs * (words * 32 // module.bits if packed else words)
    return total


@pytest.mark.parametrize("mode", ["affine", "none"])
@pytest.mark.parametrize("name", FAMILIES)
def test_dense_flops_are_those_of_the_modules(checkpoint, stock, name, mode):
    path = checkpoint(name, mode=mode)
    costs, _ = costs_of(path)
    expected = module_flops(stock(path))
    assert expected > 0
    bare = sum(  # routers of some families are a bare matrix in a module of their own
        2.0 * p.size
        for n, p in tree_flatten(stock(path).parameters())
        if p.ndim == 2 and n.endswith("gate.weight") and not _is_linear(stock(path), n)
    )
    assert costs.dense_flops == pytest.approx(expected + bare, rel=1e-9)


def _is_linear(model, parameter) -> bool:
    module = model
    for part in parameter.split(".")[:-1]:
        module = module[int(part)] if isinstance(module, list) else module[part]
    return isinstance(module, nn.Linear | nn.QuantizedLinear)


def test_routed_flops_by_hand(checkpoint):
    costs, opened = costs_of(checkpoint("qwen3_moe"))
    c = opened.config
    layers, d, f = c["num_hidden_layers"], c["hidden_size"], c["moe_intermediate_size"]
    routed = layers - len(c["mlp_only_layers"])
    assert costs.routed_flops == routed * c["num_experts_per_tok"] * 3 * 2 * d * f
    assert costs.nbytes == build_expert_index(opened).nbytes
    assert costs.nbytes == sum(x.experts.num * x.experts.expert_nbytes for x in costs.layers[:-1])
    assert all(sum(x.experts.tensor_nbytes) == x.experts.expert_nbytes for x in costs.layers[:-1])
    heads, head_dim = c["num_attention_heads"], c["head_dim"]
    assert costs.attention_flops(0, 10) == layers * 4 * heads * head_dim * 55
    assert costs.attention_flops(10, 12) == layers * 4 * heads * head_dim * (11 + 12)
    assert costs.head is not None
    assert (costs.head.in_dims, costs.head.out_dims) == (d, c["vocab_size"])
    work = costs.token_work()
    assert work.linear == costs.routed_flops + costs.dense_flops
    assert work.attention_pair == layers * 4 * heads * head_dim


def test_every_matrix_is_in_its_layer(checkpoint):
    costs, opened = costs_of(checkpoint("qwen3_moe"))
    assert opened.config["mlp_only_layers"] == [1]
    assert opened.config["num_hidden_layers"] == 4
    covered = [{"0"}, {"1", "2"}, {"3"}]
    assert len(costs.layers) == len(covered) + 1
    for numbers, layer in zip(covered, costs.layers, strict=False):
        found = {x.name.split(".layers.")[1].split(".")[0] for x in layer.linears}
        assert found == numbers
        assert len(layer.attention) == layer.depth == len(numbers)
    last = costs.layers[-1]
    assert (last.experts, last.linears, last.attention, last.depth) == (None, (), (), 0)


def test_dense_layers_before_the_experts_are_counted_with_the_first(checkpoint):
    costs, opened = costs_of(checkpoint("glm4_moe"))
    dense = opened.config["first_k_dense_replace"]
    assert dense > 0
    assert costs.layers[0].depth == dense + 1
    assert len(costs.layers[0].attention) == dense + 1


def test_formats_are_the_tensors_own(checkpoint):
    costs, _ = costs_of(checkpoint("qwen3_moe", bits=8))
    assert {x.format for x in costs.layers[0].linears} >= {"affine 8-bit g64"}
    costs, _ = costs_of(checkpoint("qwen3_moe", mode="none"))
    assert {x.format for x in costs.layers[0].linears} == {"32-bit floats"}
    assert costs.layers[0].experts.format == "32-bit floats"


@pytest.mark.parametrize("window", [None, 1, 4, 100])
def test_pairs_are_counted_one_by_one(window):
    def slow(start, stop):
        seen = range(start + 1, stop + 1)
        return sum(n if window is None else min(n, window) for n in seen)

    for start, stop in ((0, 1), (0, 9), (3, 9), (9, 9), (50, 120)):
        assert pairs(start, stop, window) == slow(start, stop)


def test_elementwise_values_grow_with_every_size():
    base = (64, 4, 2, 16, 8)
    for i in range(len(base)):
        larger = [n + (j == i) for j, n in enumerate(base)]
        assert elementwise_values(*larger) > elementwise_values(*base)


def test_windows_are_seen(checkpoint):
    costs, opened = costs_of(checkpoint("gpt_oss"))
    kinds = opened.config["layer_types"]
    windows = [a.window for x in costs.layers for a in x.attention]
    assert [w is not None for w in windows] == ["sliding" in k for k in kinds]
    assert mx.array([costs.attention_flops(0, 500)]).item() > 0
