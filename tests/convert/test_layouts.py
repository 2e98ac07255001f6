"""Published layouts become what stock mlx-lm makes of them, bit for bit, expert by expert."""

from __future__ import annotations

import os

import mlx.core as mx
import pytest

from mlx_stream.convert import source as converted
from mlx_stream.errors import UnstackedExpertsError, UnsupportedModelError
from mlx_stream.packed.source import open_plain
from tests.convert.building import convert, differing, stock_tensors, tensors_of
from tests.prefill.running import decode
from tests.support.checkpoints import random_tokens, stock_model
from tests.support.hf_layout import STYLES, edit_config, fp8_blocks, mxfp4_blocks, publish

BIG = os.environ.get("MLX_STREAM_BIG") == "1"
# What most families are published in, then those with a layout of their own.
EACH = [
    "qwen3_moe",
    "qwen2_moe",
    "olmoe",
    "deepseek",
    "dots1",
    "glm4_moe",
    "solar_open",
    "ernie4_5_moe",
    "Klear",
    "hunyuan",
    "bailing_moe",
    "mimo_v2_flash",
    "exaone_moe",
    "mellum",
    "afmoe",
    "laguna",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm_moe_dsa",
    "glm4_moe_lite",
    "mistral4",
    "mistral3",
    "kimi_vl",
    "kimi_k25",
    "kimi_k2",
    "longcat_flash",
    "longcat_flash_ngram",
    "qwen3_next",
    "jamba",
    "bailing_moe_linear",
    "bailing_hybrid",
    "bailing_moe_v3",
]
OTHERS = {
    "mixtral": "w123",
    "phimoe": "w123",
    "minimax": "w123",
    "minimax_m3_vl": "w123",
    "lfm2_moe": "w123",
    "nemotron_h": "up_down",
    "granitemoe": "linear",
    "granitemoehybrid": "linear",
    "llama4": "fused_swapped",
    "qwen3_vl_moe": "fused_swapped",
    "qwen3_5_moe": "fused",
    "gemma4_text": "fused_inner",
    "gemma4": "fused_inner",
}
KINDS = [(name, "each") for name in EACH[:: 1 if BIG else 11]]
KINDS += list(OTHERS.items())[:: 1 if BIG else 3]


@pytest.fixture
def published(checkpoint, tmp_path):
    """``published(family, style)``: a checkpoint as its authors publish it."""

    def make(name, style, **options):
        plain = checkpoint(name, **({"mode": "none"} | options))
        return publish(plain, tmp_path / f"{name}-published", style)

    return make


@pytest.mark.parametrize(("name", "style"), KINDS)
def test_names_and_shapes_are_mlx_lms(published, tmp_path, name, style):
    folder = published(name, STYLES[style])
    convert(folder, tmp_path / "packed")
    assert differing(tensors_of(tmp_path / "packed"), stock_tensors(folder)) == []


def test_blocks_of_mxfp4(published, tmp_path):
    folder = published("gpt_oss", mxfp4_blocks, mode="mxfp4")
    edit_config(folder, quantization=None, quantization_config={"quant_method": "mxfp4"})
    convert(folder, tmp_path / "packed")
    assert differing(tensors_of(tmp_path / "packed"), stock_tensors(folder)) == []


def test_blocks_of_fp8(published, tmp_path):
    folder = published("deepseek_v3", fp8_blocks, dtype="bfloat16")
    edit_config(folder, quantization_config={"quant_method": "fp8"})
    convert(folder, tmp_path / "packed")
    assert differing(tensors_of(tmp_path / "packed"), stock_tensors(folder)) == []


def test_tokens_are_those_of_stock_mlx_lm(published, open_engine, tmp_path):
    folder = published("mixtral", STYLES["w123"])
    convert(folder, tmp_path / "packed")
    model = stock_model(folder)
    prompt = random_tokens(model, 29)
    engine = open_engine(tmp_path / "packed")
    tokens = decode(engine, engine.prefill(prompt), prompt, 6)
    expected, ids = [], list(prompt)
    for _ in range(6):
        ids.append(int(mx.argmax(model(mx.array([ids]))[0, -1]).item()))
        expected.append(ids[-1])
    assert tokens == expected


@pytest.mark.parametrize("chunk", [1, 200_000])
def test_any_number_of_experts_at_a_time(published, tmp_path, monkeypatch, chunk):
    folder = published("qwen3_moe", STYLES["each"])
    monkeypatch.setattr(converted, "CHUNK_NBYTES", chunk)
    order = {f"model.layers.{n}.mlp.switch_mlp": [5, 2, 7, 0, 1, 3, 6, 4] for n in (0, 1, 2, 3)}
    convert(folder, tmp_path / "packed", orders=order, shard_nbytes=1)
    assert differing(tensors_of(tmp_path / "packed"), stock_tensors(folder)) == []


def test_the_plain_packer_says_what_to_do(published):
    with pytest.raises(UnstackedExpertsError, match="mlx_stream pack"):
        open_plain(published("qwen3_moe", STYLES["each"]))


def test_experts_that_depend_on_each_other_are_refused(published, tmp_path, monkeypatch):
    """A family whose conversion mixes experts must not be converted one by one."""
    from mlx_lm.models import qwen3_moe

    stock = qwen3_moe.Model.sanitize

    def mixing(self, weights):
        found = stock(self, weights)
        return {
            name: a - a.mean(axis=0, keepdims=True) if ".switch_mlp." in name else a
            for name, a in found.items()
        }

    monkeypatch.setattr(qwen3_moe.Model, "sanitize", mixing)
    with pytest.raises(UnsupportedModelError, match="depends on its neighbours"):
        convert(published("qwen3_moe", STYLES["each"]), tmp_path / "packed")


def test_a_missing_expert_tensor_is_named(checkpoint, tmp_path):
    def style(weights):
        made = STYLES["each"](weights)
        del made["model.layers.2.mlp.experts.3.up_proj.weight"]
        return made

    folder = publish(checkpoint("qwen3_moe", mode="none"), tmp_path / "published", style)
    with pytest.raises(Exception, match=r"layers\.2\.mlp\.experts\.3\.up_proj") as caught:
        convert(folder, tmp_path / "packed")
    assert type(caught.value).__module__ == "mlx_stream.errors"


@pytest.mark.parametrize("method", ["awq", "gptq", "bitnet"])
def test_foreign_quantizations_are_refused(published, tmp_path, method):
    folder = published("qwen3_moe", STYLES["each"])
    edit_config(folder, quantization_config={"quant_method": method})
    with pytest.raises(UnsupportedModelError, match=r"mlx_lm\.convert"):
        convert(folder, tmp_path / "packed")
    assert not (tmp_path / "packed" / "packed.json").exists()
