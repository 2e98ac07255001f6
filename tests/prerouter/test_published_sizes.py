"""Whole models of the published widths: true shapes of heads, router, K; fewer layers."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from mlx_stream.prerouter.spec import EDGE0_8B, EDGE0_35B
from tests.decode.running import answer
from tests.prerouter.making import NESTED, PLAIN, random_heads, save_heads
from tests.prerouter.reference import Reference
from tests.support.checkpoints import build_family, random_tokens, stock_model

pytestmark = pytest.mark.skipif(
    os.environ.get("MLX_STREAM_BIG") != "1", reason="writes 300 MB; MLX_STREAM_BIG=1 runs it"
)
# family, spec, owners, consumers, native K, the config's published numbers, names in the file
FORMS = {
    "35b": (
        "qwen3_next",
        EDGE0_35B,
        (0, 1, 2),
        (1, 2),  # as head 38 of the published one, the last routes nothing
        4,
        {"hidden_size": 2048, "num_experts": 256, "num_experts_per_tok": 8},
        PLAIN,
    ),
    "8b": (
        "bailing_hybrid",
        EDGE0_8B,
        (1, 2),
        (2, 3),
        8,
        {
            "hidden_size": 1536,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        },
        NESTED,
    ),
}


@pytest.mark.parametrize("which", FORMS)
def test_a_published_folder_runs_as_the_reference(tmp_path, open_engine, monkeypatch, which):
    family, published, owners, consumers, top_k, config, names = FORMS[which]
    folder = build_family(family, tmp_path / "model", changes=config)
    spec = replace(published, owners=owners, consumers=consumers, lora=None)
    arrays = random_heads(
        spec, config["hidden_size"], config["num_experts"], width=512, linear=which == "35b"
    )
    save_heads(folder / spec.heads_file, arrays, names)  # no prerouter.json: known by its name
    monkeypatch.setattr("mlx_stream.prerouter.opening.PUBLISHED", (spec,))
    model = stock_model(folder)
    for layer in model.model.layers:
        if which == "35b" and "switch_mlp" in layer.mlp:
            layer.mlp.top_k = top_k
    prompt = random_tokens(model, 33, seed=1)
    reference = Reference(model, spec, arrays)
    expected = reference.answer(prompt, 10)
    engine = open_engine(folder, memory_budget=8 << 30)
    assert engine._shape.top_k == top_k
    assert answer(engine, prompt, 10) == expected
    totals = engine.decode_metrics.totals
    assert totals.predicted_layer_steps == sum(reference.predicted) > 0
    assert totals.dropped_experts == 0
