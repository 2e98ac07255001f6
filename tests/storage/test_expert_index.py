"""Recognition of stacked experts, against modules that MLX itself quantized and saved."""

from __future__ import annotations

import json

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from mlx_stream.errors import (
    DenseModelError,
    ExpertCountError,
    MissingTensorError,
    TensorFormatError,
    UnsupportedModelError,
    UnsupportedQuantizationError,
)
from mlx_stream.storage.checkpoint import open_checkpoint
from mlx_stream.storage.expert_index import QuantSpec, build_expert_index

from .builders import affine_glu, bf16_glu, random_tensor, slow_read, write_checkpoint

E, D, F = 4, 128, 256
PREFIX = "model.layers.3.mlp.switch_mlp"
AFFINE = {"group_size": 32, "bits": 4}


def index_of(folder):
    return build_expert_index(open_checkpoint(folder))


def index_for(tmp_path, config, *shards):
    return index_of(write_checkpoint(tmp_path / "model", config, *shards))


class Holder(nn.Module):
    """Gives a switch module the path PREFIX has in a checkpoint."""

    def __init__(self, switch: nn.Module) -> None:
        super().__init__()
        self.switch_mlp = switch


def save_module(folder, switch: nn.Module, config: dict, prefix: str = PREFIX):
    """What mlx-lm saves for one expert layer, plus a resident tensor. Returns the arrays."""
    folder.mkdir()
    arrays = {f"{prefix}.{name}": a for name, a in tree_flatten(switch.parameters())}
    mx.save_safetensors(
        str(folder / "model.safetensors"), {**arrays, "model.norm.weight": mx.ones((D,))}
    )
    (folder / "config.json").write_text(json.dumps(config))
    return arrays


def raw_bytes(a: mx.array) -> bytes:
    return np.array(mx.contiguous(a).view(mx.uint8)).tobytes() if a.ndim else raw_bytes(a[None])


def check_layer(layer, checkpoint, arrays):
    """Every byte range of every expert holds the bytes MLX has for it."""
    assert {t.name for t in layer.tensors} == set(arrays)
    for t in layer.tensors:
        assert t.name == f"{layer.name}.{t.key[0]}.{t.key[1]}"
        assert t.shape == arrays[t.name].shape[1:]
        for e in range(layer.num_experts):
            found = slow_read(checkpoint.files[t.file].path, t.offset + e * t.stride, t.nbytes)
            assert found == raw_bytes(arrays[t.name][e])
    assert layer.nbytes == sum(a.nbytes for a in arrays.values())


MODES = [
    *((bits, group, "affine") for bits in (1, 2, 3, 4, 5, 6, 8) for group in (32, 64, 128)),
    (4, 32, "mxfp4"),
    (8, 32, "mxfp8"),
    (4, 16, "nvfp4"),
]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("bits", "group", "mode"), MODES)
def test_every_quantization_mode(tmp_path, bits, group, mode, bias):
    switch = SwitchGLU(D, F, E, bias=bias)
    nn.quantize(switch, group_size=group, bits=bits, mode=mode)
    quantization = {"group_size": group, "bits": bits, "mode": mode}
    arrays = save_module(tmp_path / "m", switch, {"num_experts": E, "quantization": quantization})
    index = index_of(tmp_path / "m")
    (layer,) = index.layers
    assert (layer.kind, layer.num_experts, layer.index) == ("glu", E, 0)
    assert (layer.input_dims, layer.hidden_dims) == (D, F)
    for proj in ("gate_proj", "up_proj", "down_proj"):
        module = getattr(switch, proj)
        assert layer.spec(proj) == QuantSpec(module.mode, module.bits, module.group_size)
    check_layer(layer, index.checkpoint, arrays)
    assert index.nbytes == layer.nbytes
    assert index.resident_nbytes == D * 4
    assert index.tensor_names == frozenset(arrays)


@pytest.mark.parametrize("kind", [SwitchGLU, SwitchMLP])
@pytest.mark.parametrize(("dtype", "bits"), [(mx.bfloat16, 16), (mx.float16, 16), (mx.float32, 32)])
def test_unquantized(tmp_path, kind, dtype, bits):
    switch = kind(D, F, E, bias=True)
    switch.set_dtype(dtype)
    arrays = save_module(tmp_path / "m", switch, {"n_routed_experts": E})
    index = index_of(tmp_path / "m")
    (layer,) = index.layers
    assert layer.kind == ("glu" if kind is SwitchGLU else "mlp")
    assert {spec for _, spec in layer.quant} == {QuantSpec("none", bits, 0)}
    assert (layer.input_dims, layer.hidden_dims) == (D, F)
    check_layer(layer, index.checkpoint, arrays)


def test_quantized_mlp(tmp_path):
    switch = SwitchMLP(D, F, E)
    nn.quantize(switch, group_size=64, bits=6)
    arrays = save_module(tmp_path / "m", switch, {"quantization": {"group_size": 64, "bits": 6}})
    index = index_of(tmp_path / "m")
    assert dict(index.layers[0].quant) == dict.fromkeys(("fc1", "fc2"), QuantSpec("affine", 6, 64))
    check_layer(index.layers[0], index.checkpoint, arrays)


def test_nvfp4_with_global_scale(tmp_path):
    switch = SwitchGLU(D, F, E)
    nn.quantize(switch, group_size=16, bits=4, mode="nvfp4")
    arrays = {f"{PREFIX}.{k}": v for k, v in tree_flatten(switch.parameters())}
    for proj in ("gate_proj", "up_proj", "down_proj"):
        arrays[f"{PREFIX}.{proj}.global_scale"] = mx.arange(E).astype(mx.float32)
    (tmp_path / "m").mkdir()
    mx.save_safetensors(str(tmp_path / "m/model.safetensors"), arrays)
    config = {"quantization": {"group_size": 16, "bits": 4, "mode": "nvfp4"}}
    (tmp_path / "m/config.json").write_text(json.dumps(config))
    index = index_of(tmp_path / "m")
    assert index.layers[0].tensor(("up_proj", "global_scale")).shape == ()
    check_layer(index.layers[0], index.checkpoint, arrays)


# --- names and order ------------------------------------------------------------------------


def test_layers_in_execution_order_across_shards(tmp_path):
    base = "language_model.model.layers.{}.mlp.switch_mlp"
    shards = [bf16_glu(base.format(n)) for n in (10, 2, 1, 11)]
    # A layer may be split between shards: move one tensor to another file.
    name = base.format(1) + ".down_proj.weight"
    shards[0][name] = shards[2].pop(name)
    index = index_for(tmp_path, {"text_config": {"num_experts": 4}}, *shards)
    assert [layer.name for layer in index.layers] == [base.format(n) for n in (1, 2, 10, 11)]
    assert [layer.index for layer in index.layers] == [0, 1, 2, 3]
    down = index.layers[0].tensor(("down_proj", "weight"))
    up = index.layers[0].tensor(("up_proj", "weight"))
    assert (down.file, up.file) == (0, 2)


def test_other_projections_stay_resident(tmp_path):
    extra = {
        "model.layers.3.mlp.shared_experts.gate_proj.weight": random_tensor("BF16", 8, 8),
        "model.layers.3.attn.o_a_proj.weight": random_tensor("BF16", 4, 8, 8),  # SwitchLinear
        "model.layers.0.mlp.gate_proj.weight": random_tensor("BF16", 8, 8),
    }
    index = index_for(tmp_path, {}, {**bf16_glu(PREFIX), **extra})
    assert len(index.layers) == 1
    assert index.resident_nbytes == sum(len(raw) for _, _, raw in extra.values())


@pytest.mark.parametrize("quantized", [False, True])
def test_fused_gate_up(tmp_path, quantized):
    if quantized:
        tensors, config = affine_glu(PREFIX), {"quantization": AFFINE}
    else:
        tensors, config = bf16_glu(PREFIX), {}
    separate = dict(tensors)
    for part in ("weight", "scales", "biases") if quantized else ("weight",):
        dtype, shape, gate = tensors.pop(f"{PREFIX}.gate_proj.{part}")
        _, _, up = tensors.pop(f"{PREFIX}.up_proj.{part}")
        halves = [np.frombuffer(x, np.uint8).reshape(shape[0], shape[1], -1) for x in (gate, up)]
        fused = np.concatenate(halves, axis=1).tobytes()
        tensors[f"{PREFIX}.gate_up_proj.{part}"] = (
            dtype,
            (shape[0], 2 * shape[1], shape[2]),
            fused,
        )
    index = index_for(tmp_path, config, tensors)
    (layer,) = index.layers
    path = index.checkpoint.files[0].path
    for t in layer.tensors:
        dtype, shape, raw = separate[f"{PREFIX}.{t.key[0]}.{t.key[1]}"]
        assert (t.dtype, t.shape) == (dtype, shape[1:])
        for e in range(layer.num_experts):
            found = slow_read(path, t.offset + e * t.stride, t.nbytes)
            assert found == raw[e * t.nbytes : (e + 1) * t.nbytes]
    assert layer.nbytes == index.nbytes == sum(len(raw) for _, _, raw in separate.values())
    assert index.resident_nbytes == 0


# --- quantization settings ------------------------------------------------------------------


def mixed_precision(down_bits: int):
    tensors = affine_glu(PREFIX)
    other = affine_glu(PREFIX, bits=down_bits)
    return {k: other[k] if "down_proj" in k else v for k, v in tensors.items()}


@pytest.mark.parametrize(
    "override",
    [
        {"group_size": 32, "bits": 8},
        {"group_size": 32, "bits": 8, "mode": "affine"},
        None,  # mlx-lm infers what the map does not name
    ],
)
@pytest.mark.parametrize("outer", ["", "language_model."])
def test_override_of_one_path(tmp_path, override, outer):
    quantization = dict(AFFINE)
    if override:
        quantization[f"{outer}{PREFIX}.down_proj"] = override
    layer = index_for(tmp_path, {"quantization": quantization}, mixed_precision(8)).layers[0]
    assert layer.spec("down_proj") == QuantSpec("affine", 8, 32)
    assert layer.spec("gate_proj") == QuantSpec("affine", 4, 32)


def test_override_false_is_unquantized(tmp_path):
    tensors = {k: v for k, v in affine_glu(PREFIX).items() if "down_proj" not in k}
    tensors[f"{PREFIX}.down_proj.weight"] = random_tensor("BF16", 4, 64, 96)
    config = {"quantization": {**AFFINE, f"{PREFIX}.down_proj": False}}
    layer = index_for(tmp_path, config, tensors).layers[0]
    assert layer.spec("down_proj") == QuantSpec("none", 16, 0)
    assert layer.spec("up_proj") == QuantSpec("affine", 4, 32)


@pytest.mark.parametrize(
    "override", [{"group_size": 64, "bits": 4}, {"group_size": 32, "bits": 8}, {}, False]
)
def test_override_that_contradicts_the_tensors(tmp_path, override):
    config = {"quantization": {**AFFINE, f"{PREFIX}.up_proj": override}}
    with pytest.raises(TensorFormatError) as caught:
        index_for(tmp_path, config, affine_glu(PREFIX))
    assert caught.value.tensor.startswith(f"{PREFIX}.up_proj")


def test_mode_override_must_be_the_tensors_mode(tmp_path):
    override = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    config = {"quantization": {**AFFINE, f"{PREFIX}.up_proj": override}}
    with pytest.raises(TensorFormatError, match="mxfp4"):
        index_for(tmp_path, config, affine_glu(PREFIX))


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": AFFINE},
        {"quantization_config": {"quant_method": "compressed-tensors"}},
        {"text_config": {"quantization": AFFINE}},
    ],
)
def test_other_places_of_the_settings(tmp_path, config):
    layer = index_for(tmp_path, config, affine_glu(PREFIX)).layers[0]
    assert layer.spec("gate_proj") == QuantSpec("affine", 4, 32)


@pytest.mark.parametrize(
    "quantization",
    [{**AFFINE, "mode": "iq4"}, {"quant_method": "bitnet"}, {"bits": 4}],
)
def test_unknown_quantization(tmp_path, quantization):
    with pytest.raises(UnsupportedQuantizationError):
        index_for(tmp_path, {"quantization": quantization}, affine_glu(PREFIX))


def changed(name, value):
    tensors = affine_glu(PREFIX)
    tensors[f"{PREFIX}.{name}"] = value
    return tensors


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("up_proj.weight", random_tensor("F32", 4, 96, 8), TensorFormatError),
        ("up_proj.weight", random_tensor("U32", 4, 95, 8), TensorFormatError),
        ("up_proj.weight", random_tensor("U32", 4, 96, 7), TensorFormatError),
        ("up_proj.weight", random_tensor("U32", 96, 8), TensorFormatError),
        ("up_proj.weight", random_tensor("U32", 4, 0, 8), TensorFormatError),
        ("up_proj.weight", random_tensor("U32", 4, 96, 14), UnsupportedQuantizationError),
        ("up_proj.scales", random_tensor("I64", 4, 96, 2), TensorFormatError),
        ("up_proj.scales", random_tensor("BF16", 4, 96, 3), TensorFormatError),
        ("up_proj.scales", random_tensor("BF16", 4, 2), TensorFormatError),
        ("up_proj.scales", random_tensor("U8", 4, 96, 2), TensorFormatError),  # mxfp4 + biases
        ("up_proj.biases", random_tensor("BF16", 4, 96, 1), TensorFormatError),
        ("up_proj.biases", random_tensor("F16", 4, 96, 2), TensorFormatError),
        ("up_proj.bias", random_tensor("BF16", 4, 95), TensorFormatError),
        ("up_proj.bias", random_tensor("U8", 4, 96), TensorFormatError),
        ("up_proj.global_scale", random_tensor("F32", 4), TensorFormatError),
        ("fc1.weight", random_tensor("BF16", 4, 96, 64), MissingTensorError),
        ("gate_up_proj.bias", random_tensor("BF16", 4, 192), TensorFormatError),
        ("gate_up_proj.weight", random_tensor("U32", 4, 192, 8), TensorFormatError),
        ("gate_up_proj.weight", random_tensor("U32", 4, 191, 8), TensorFormatError),
    ],
)
def test_tensors_of_a_wrong_format(tmp_path, name, value, error):
    folder = write_checkpoint(tmp_path / "m", {"quantization": AFFINE}, changed(name, value))
    with pytest.raises(error) as caught:
        index_of(folder)
    assert PREFIX in caught.value.tensor
    assert caught.value.file.endswith("model.safetensors")
    assert caught.value.remedy


@pytest.mark.parametrize(
    "name", [f"{p}.{k}" for p in ("gate_proj", "down_proj") for k in ("weight", "scales", "biases")]
)
def test_missing_tensor(tmp_path, name):
    tensors = affine_glu(PREFIX)
    del tensors[f"{PREFIX}.{name}"]
    with pytest.raises(MissingTensorError) as caught:
        index_for(tmp_path, {"quantization": AFFINE}, tensors)
    assert caught.value.tensor == f"{PREFIX}.{name}"


def test_scales_that_the_config_does_not_declare(tmp_path):
    with pytest.raises(TensorFormatError, match="unquantized"):
        index_for(tmp_path, {}, affine_glu(PREFIX))


def test_unsupported_weight_dtype(tmp_path):
    tensors = bf16_glu(PREFIX)
    tensors[f"{PREFIX}.up_proj.weight"] = random_tensor("F8_E4M3", 4, 24, 16)
    with pytest.raises(UnsupportedQuantizationError, match="dtype"):
        index_for(tmp_path, {}, tensors)


# --- E --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_experts": 4},
        {"n_routed_experts": 4},
        {"num_local_experts": 4},
        {"moe_num_experts": [4, 4]},
        {"text_config": {"num_experts": 4}},
        {"num_hidden_layers": 5, "num_experts": [1, 1, 1, 4, 1]},
        {"num_experts": None},
        {"num_experts": 0, "num_local_experts": 4},
    ],
)
def test_expert_count_that_agrees(tmp_path, config):
    assert index_for(tmp_path, config, bf16_glu(PREFIX)).layers[0].num_experts == 4


@pytest.mark.parametrize(
    "config",
    [
        {"num_experts": 8},
        {"n_routed_experts": 3},
        {"num_local_experts": 5},
        {"moe_num_experts": [64, 64]},
        {"text_config": {"num_experts": 128}},
        {"num_hidden_layers": 5, "num_experts": [4, 4, 4, 1, 4]},
    ],
)
def test_expert_count_that_disagrees_with_the_config(tmp_path, config):
    with pytest.raises(ExpertCountError) as caught:
        index_for(tmp_path, config, bf16_glu(PREFIX))
    assert caught.value.file.endswith("config.json")
    assert "4 experts" in caught.value.actual


@pytest.mark.parametrize("name", ["up_proj.weight", "gate_proj.biases"])
def test_expert_count_that_differs_between_tensors(tmp_path, name):
    tensors = affine_glu(PREFIX)
    dtype, shape, raw = tensors[f"{PREFIX}.{name}"]
    tensors[f"{PREFIX}.{name}"] = dtype, (3, *shape[1:]), raw[: len(raw) // 4 * 3]
    with pytest.raises(ExpertCountError) as caught:
        index_for(tmp_path, {"quantization": AFFINE}, tensors)
    assert PREFIX in caught.value.tensor


# --- nothing to stream ----------------------------------------------------------------------


def test_dense_model(tmp_path):
    tensors = {"model.layers.0.mlp.gate_proj.weight": random_tensor("BF16", 8, 8)}
    with pytest.raises(DenseModelError, match=r"mlx_lm\.generate"):
        index_for(tmp_path, {"model_type": "llama"}, tensors)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.experts.0.gate_proj.weight",
        "model.layers.0.block_sparse_moe.experts.7.w1.weight",
        "model.layers.0.mlp.experts.gate_up_proj",
        "model.layers.0.mlp.experts.down_proj_blocks",
    ],
)
def test_hugging_face_layout(tmp_path, name):
    with pytest.raises(UnsupportedModelError, match=r"mlx_stream pack") as caught:
        index_for(tmp_path, {}, {name: random_tensor("BF16", 8, 8)})
    assert caught.value.tensor == name


def test_shared_experts_are_not_the_hugging_face_layout(tmp_path):
    name = "model.layers.0.mlp.shared_experts.0.gate_proj.weight"
    with pytest.raises(DenseModelError):
        index_for(tmp_path, {}, {name: random_tensor("BF16", 8, 8)})
