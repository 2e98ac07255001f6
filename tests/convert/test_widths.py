"""Quantized on the way: the weights that mlx-lm's own quantization gives, part by part."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map_with_path
from mlx_lm.utils import dequantize_model, load_model, quantize_model

from mlx_stream.convert.options import Conversion, conversion_of, make_spec
from mlx_stream.errors import PackError, UnsupportedModelError
from mlx_stream.storage.quant_spec import QuantSpec
from tests.convert.building import convert, differing, model_tensors, tensors_of
from tests.prefill.running import decode
from tests.support.checkpoints import random_tokens, stock_model
from tests.support.hf_layout import STYLES, edit_config, publish

FOUR, THREE, TWO = (QuantSpec("affine", bits, 64) for bits in (4, 3, 2))


def reference(folder, experts, rest, dtype=None):
    """mlx-lm's quantize_model with a width for each part; also its config."""
    model, config = load_model(folder, lazy=True)
    model = dequantize_model(model) if "quantization" in config else model
    config.pop("quantization", None)
    if dtype is not None:
        keep = getattr(model, "cast_predicate", lambda _: True)
        cast = lambda k, v: v.astype(dtype) if keep(k) else v  # noqa: E731
        model.update(tree_map_with_path(cast, model.parameters()))
    own = getattr(model, "quant_predicate", None)

    def predicate(path, module):
        said = own(path, module) if own is not None else True
        if said is not True:
            return said
        spec = experts if "switch_mlp" in path or ".experts." in path else rest
        return spec is not None and {
            "group_size": spec.group_size,
            "bits": spec.bits,
            "mode": spec.mode,
        }

    base = rest or experts
    model, config = quantize_model(
        model, config, base.group_size, base.bits, base.mode, quant_predicate=predicate
    )
    return model, config


@pytest.fixture
def published(checkpoint, tmp_path):
    def make(name="qwen3_moe", style="each", **options):
        plain = checkpoint(name, **({"mode": "none", "dtype": "bfloat16"} | options))
        return publish(plain, tmp_path / "published", STYLES[style])

    return make


@pytest.mark.parametrize(
    ("experts", "rest"),
    [
        (FOUR, FOUR),
        (THREE, FOUR),
        (TWO, None),
        (None, FOUR),
        (QuantSpec("mxfp4", 4, 32), QuantSpec("affine", 8, 32)),
        (QuantSpec("nvfp4", 4, 16), QuantSpec("mxfp8", 8, 32)),
    ],
)
def test_every_tensor_is_mlx_lms(published, tmp_path, experts, rest):
    folder = published()
    report = convert(folder, tmp_path / "packed", Conversion(experts, rest))
    model, _ = reference(folder, experts, rest)
    found = tensors_of(tmp_path / "packed")
    if rest is None:  # mlx-lm's predicate says 8 bits for the router, whatever is asked
        found = {n: v for n, v in found.items() if ".mlp.gate." not in n}
        expected = {n: v for n, v in model_tensors(model).items() if ".mlp.gate." not in n}
    else:
        expected = model_tensors(model)
    if experts is None:
        assert not any(".switch_mlp." in name for name in report.errors)
    assert differing(found, expected) == []


def test_the_family_says_what_keeps_its_width(published, tmp_path):
    convert(published(), tmp_path / "packed", Conversion(TWO, FOUR))
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert config["quantization"]["bits"] == 4
    gate = config["quantization"]["model.layers.0.mlp.gate"]
    assert gate == {"group_size": 64, "bits": 8, "mode": "affine"}
    assert config["quantization"]["model.layers.0.mlp.switch_mlp.up_proj"]["bits"] == 2
    assert "model.layers.0.self_attn.q_proj" not in config["quantization"]


def test_floats_get_the_configs_dtype(checkpoint, tmp_path):
    plain = checkpoint("qwen3_moe", mode="none", dtype="float32")
    folder = publish(plain, tmp_path / "published", STYLES["each"])
    edit_config(folder, torch_dtype="bfloat16")
    convert(folder, tmp_path / "packed", Conversion(FOUR, FOUR))
    model, _ = reference(folder, FOUR, FOUR, mx.bfloat16)
    assert differing(tensors_of(tmp_path / "packed"), model_tensors(model)) == []


def test_a_stacked_checkpoint_can_be_quantized_too(checkpoint, tmp_path):
    plain = checkpoint("deepseek_v3", mode="none", dtype="bfloat16")
    convert(plain, tmp_path / "packed", Conversion(THREE, FOUR))
    model, _ = reference(plain, THREE, FOUR)
    assert differing(tensors_of(tmp_path / "packed"), model_tensors(model)) == []


def test_a_quantized_checkpoint_gets_fewer_bits(checkpoint, tmp_path):
    """Only what changes is touched: the rest has the bytes of the source."""
    plain = checkpoint("qwen3_moe", bits=8, dtype="bfloat16")
    report = convert(plain, tmp_path / "packed", Conversion(experts=THREE))
    found, before = tensors_of(tmp_path / "packed"), tensors_of(plain)
    model, _ = reference(plain, THREE, QuantSpec("affine", 8, 64))
    expected = model_tensors(model)
    for name, value in found.items():
        assert value == (expected if ".switch_mlp." in name else before)[name], name
    assert set(report.errors) == {n for n in found if ".switch_mlp." in n and "weight" in n}


def test_the_result_runs_as_stock_mlx_lm_runs_it(published, open_engine, tmp_path):
    folder = published()
    convert(folder, tmp_path / "packed", Conversion(THREE, FOUR))
    model, _ = reference(folder, THREE, FOUR)
    model.set_dtype(mx.float32)
    prompt = random_tokens(model, 31)
    engine = open_engine(tmp_path / "packed")
    result = engine.prefill(prompt)
    expected = np.array(model(mx.array([prompt]))[0, -1])
    found = np.array(result.logits).reshape(-1)
    assert np.abs(found - expected).max() <= 1e-4 * np.abs(expected).max()
    tokens = decode(engine, result, prompt, 4)
    ids = list(prompt)
    for token in tokens:
        assert token == int(mx.argmax(model(mx.array([ids]))[0, -1]).item())
        ids.append(token)


def test_errors_are_those_of_numpy(published, tmp_path):
    folder = published()
    report = convert(folder, tmp_path / "packed", Conversion(TWO, FOUR))
    model, _ = load_model(folder)
    name = "model.layers.0.mlp.switch_mlp.up_proj"
    w = np.array(model.model.layers[0].mlp.switch_mlp.up_proj.weight.astype(mx.float32))
    parts = mx.quantize(mx.array(w).astype(mx.bfloat16), 64, 2)
    back = np.array(mx.dequantize(*parts, 64, 2).astype(mx.float32))
    error = np.sqrt(((w - back) ** 2).sum() / (w**2).sum())
    assert report.errors[f"{name}.weight"].relative == pytest.approx(error, rel=1e-3)
    manifest = json.loads((tmp_path / "packed" / "packed.json").read_text())
    kept = manifest["conversion"]["relative_errors"][f"{name}.weight"]
    assert kept == pytest.approx(error, rel=1e-3)


def test_a_tensor_scale_cannot_be_quantized_again(tmp_path, checkpoint):
    from mlx_stream.convert.widths import module_widths

    model = stock_model(checkpoint("qwen3_moe", mode="nvfp4"))
    layer = model.model.layers[0].mlp.switch_mlp.up_proj
    layer.global_scale = mx.ones((8,))
    prefixes = frozenset({"model.layers.0.mlp.switch_mlp"})
    with pytest.raises(UnsupportedModelError, match="global_scale"):
        module_widths(model, Conversion(experts=FOUR), prefixes)


@pytest.mark.parametrize(
    "flags",
    [
        (None, 7, None, None, None, False),
        ("affine", None, None, None, None, False),
        (None, None, None, None, 64, False),
        (None, 4, None, None, 48, False),
        ("mxfp4", 3, None, None, None, False),
        ("nvfp4", None, None, None, 32, False),
        ("mxfp8", None, None, None, None, True),
        (None, None, None, None, None, True),
        (None, 4, None, None, None, True),
    ],
)
def test_impossible_flags_are_refused(flags):
    with pytest.raises(PackError):
        conversion_of(*flags)


def test_flags_say_which_part_gets_what():
    assert conversion_of(None, 4, None, None, None, False) == Conversion(FOUR, FOUR)
    assert conversion_of(None, 4, 3, None, None, False) == Conversion(THREE, FOUR)
    assert conversion_of(None, None, 2, None, None, True) == Conversion(TWO, None, True)
    assert conversion_of(None, None, None, 4, None, False) == Conversion(None, FOUR)
    fp4 = make_spec("mxfp4", None, None)
    assert conversion_of("mxfp4", None, None, None, None, False) == Conversion(fp4, fp4)
    assert conversion_of(None, None, None, None, None, False) == Conversion()
    both = Conversion(TWO, FOUR, True)
    assert Conversion.from_json(json.loads(json.dumps(both.as_json()))) == both


@pytest.mark.parametrize(
    "found", [{}, {"experts": None}, {"experts": 3, "rest": None, "refine": False}]
)
def test_a_manifest_of_no_release_is_refused(found):
    with pytest.raises(PackError):
        Conversion.from_json(found)
