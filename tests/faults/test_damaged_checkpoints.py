"""Checkpoints that are not what they claim: a typed error at load, that names file and tensor."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from mlx_lm.utils import save_config

import mlx_stream
from mlx_stream import errors
from tests.cli.runner import assert_failed, run
from tests.support.faults import (
    edit_config,
    edit_header,
    fails,
    find_tensor,
    last_tensor,
    shards,
)

EXPERT = ".switch_mlp.up_proj.weight"


@dataclass(frozen=True)
class Named:
    """What the error must name."""

    file: Path
    tensor: str | None = None
    text: str = ""


@dataclass(frozen=True)
class Damage:
    """One way to be broken."""

    name: str
    error: type[errors.MlxStreamError]
    do: Callable[[Path], Named]
    index: bool = True


def _truncate(folder: Path) -> Named:
    shard, _ = find_tensor(folder, EXPERT)
    tensor = last_tensor(shard)
    size = shard.stat().st_size
    with open(shard, "r+b") as file:
        file.truncate(size - 301)
    return Named(shard, tensor, f"{size - 301} bytes")


def _header_length(folder: Path) -> Named:
    shard = shards(folder)[-1]
    size = shard.stat().st_size
    with open(shard, "r+b") as file:
        file.write((size + 1).to_bytes(8, "little"))
    return Named(shard, text=f"{size + 1} bytes")


def _header_cut(folder: Path) -> Named:
    shard = shards(folder)[0]
    with open(shard, "r+b") as file:
        file.truncate(100)
    return Named(shard)


def _offset_past_end(folder: Path) -> Named:
    shard, tensor = find_tensor(folder, EXPERT)

    def move(header: dict) -> None:
        offsets = header[tensor]["data_offsets"]
        header[tensor]["data_offsets"] = [o + (1 << 40) for o in offsets]

    edit_header(shard, move)
    return Named(shard, tensor)


def _expert_tensor_gone(folder: Path) -> Named:
    shard, tensor = find_tensor(folder, EXPERT)
    edit_header(shard, lambda header: header.pop(tensor))
    return Named(shard, tensor)


def _expert_tensor_gone_without_index(folder: Path) -> Named:
    _, tensor = find_tensor(folder, EXPERT)
    _expert_tensor_gone(folder)
    # Without an index nothing says which shard it was in: any shard of its layer will do.
    return Named(folder, tensor)


def _shard_gone(folder: Path) -> Named:
    shard, _ = find_tensor(folder, EXPERT)
    shard.unlink()
    return Named(shard)


def _retype(ending: str, dtype: str) -> Callable[[Path], Named]:
    def do(folder: Path) -> Named:
        shard, tensor = find_tensor(folder, ending)
        edit_header(shard, lambda header: header[tensor].update(dtype=dtype))
        return Named(shard, tensor)

    return do


def _unknown_dtype(folder: Path) -> Named:
    return _retype(EXPERT, "Q4")(folder)


def _reshape_experts(folder: Path) -> Named:
    shard, tensor = find_tensor(folder, EXPERT)

    def split(header: dict) -> None:
        e, rows, columns = header[tensor]["shape"]
        header[tensor]["shape"] = [e * 2, rows // 2, columns]

    edit_header(shard, split)
    return Named(folder, text="experts")


def _config_count(folder: Path) -> Named:
    edit_config(folder, num_experts=16)
    return Named(folder / "config.json", text="8 experts")


def _config_width(folder: Path) -> Named:
    edit_config(folder, moe_intermediate_size=128)
    return Named(folder)


def _config_hidden(folder: Path) -> Named:
    edit_config(folder, hidden_size=256)
    return Named(folder)


def _config_missing(folder: Path) -> Named:
    (folder / "config.json").unlink()
    return Named(folder / "config.json")


def _config_garbage(folder: Path) -> Named:
    (folder / "config.json").write_text("<html>404</html>")
    return Named(folder / "config.json")


def _unknown_model(folder: Path) -> Named:
    edit_config(folder, model_type="no_such_family")
    return Named(folder / "config.json", text="no_such_family")


def _config_without_layers(folder: Path) -> Named:
    path = folder / "config.json"
    path.write_text(path.read_text().replace('"num_hidden_layers"', '"num_layers_hidden"'))
    return Named(path)


def _resident_gone(ending: str) -> Callable[[Path], Named]:
    def do(folder: Path) -> Named:
        shard, tensor = find_tensor(folder, ending)
        edit_header(shard, lambda header: header.pop(tensor))
        return Named(folder, text=tensor)

    return do


def _no_weights(folder: Path) -> Named:
    for shard in shards(folder):
        shard.unlink()
    return Named(folder)


DAMAGES = (
    Damage("truncated shard", errors.TruncatedFileError, _truncate),
    Damage("header longer than the file", errors.HeaderError, _header_length),
    Damage("file ends in its header", errors.HeaderError, _header_cut),
    Damage("offset past the end", errors.TruncatedFileError, _offset_past_end),
    Damage("expert tensor missing", errors.MissingTensorError, _expert_tensor_gone),
    Damage(
        "expert tensor missing, no index",
        errors.MissingTensorError,
        _expert_tensor_gone_without_index,
        index=False,
    ),
    Damage("shard missing", errors.MissingTensorError, _shard_gone),
    Damage(
        "quantized resident tensor missing",
        errors.MissingTensorError,
        _resident_gone("layers.1.self_attn.q_proj.weight"),
        index=False,
    ),
    Damage(
        "norm missing",
        errors.MissingTensorError,
        _resident_gone("layers.1.input_layernorm.weight"),
        index=False,
    ),
    Damage("no shards", errors.CheckpointError, _no_weights),
    Damage("expert weight float", errors.CheckpointError, _retype(EXPERT, "F32")),
    Damage("expert weight signed", errors.CheckpointError, _retype(EXPERT, "I32")),
    Damage(
        "expert scales integer",
        errors.CheckpointError,
        _retype(".switch_mlp.up_proj.scales", "U32"),
    ),
    Damage("unknown dtype", errors.HeaderError, _unknown_dtype),
    Damage("experts disagree on E", errors.ExpertCountError, _reshape_experts),
    Damage("config disagrees on E", errors.ExpertCountError, _config_count),
    Damage("config disagrees on F", errors.CheckpointError, _config_width),
    Damage("config disagrees on D", errors.CheckpointError, _config_hidden),
    Damage("no config", errors.CheckpointError, _config_missing),
    Damage("config is not JSON", errors.CheckpointError, _config_garbage),
    Damage("unknown family", errors.UnsupportedModelError, _unknown_model),
    Damage("config incomplete", errors.UnsupportedModelError, _config_without_layers),
)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.name)
def test_load_names_the_damage(copy, damage):
    folder = copy(index=damage.index)
    named = damage.do(folder)
    with fails(damage.error) as caught:
        mlx_stream.load(folder, memory_budget="1GB")
    error = caught.error
    assert str(named.file) in str(error)
    if named.tensor is not None:
        assert error.tensor == named.tensor
    assert named.text in str(error)
    assert error.remedy, "the error must say what to do"


@pytest.mark.parametrize(
    "damage",
    [d for d in DAMAGES if d.name in ("truncated shard", "config disagrees on E")],
    ids=lambda d: d.name,
)
def test_command_line_names_the_damage(copy, damage):
    folder = copy()
    named = damage.do(folder)
    result = run("--model", folder, "--prompt", "1 2 3")
    assert_failed(result, str(named.file), "what to do:", named.tensor or "")


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    """A tiny Llama as mlx-lm saves it."""
    folder = tmp_path_factory.mktemp("dense")
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "rms_norm_eps": 1e-5,
        "vocab_size": 100,
    }
    model = llama.Model(llama.ModelArgs.from_dict(config))
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        dict(tree_flatten(model.parameters())),
        metadata={"format": "mlx"},
    )
    save_config(config, folder / "config.json")
    return folder


def test_dense_model(dense):
    with fails(errors.DenseModelError) as caught:
        mlx_stream.load(dense, memory_budget="1GB")
    assert str(dense) in str(caught.error)
    assert "'llama'" in str(caught.error)
    assert "mlx_lm.generate" in str(caught.error.remedy)


def test_dense_model_from_the_command_line(dense):
    assert_failed(run("--model", dense, "--prompt", "1 2 3"), str(dense), "mlx_lm.generate")


def test_stale_shard(copy):
    """A shard left by another version of the checkpoint holds the same names."""
    folder = copy(index=False)
    shard, _ = find_tensor(folder, EXPERT)
    shutil.copyfile(shard, folder / "model-extra.safetensors")
    with fails(errors.HeaderError) as caught:
        mlx_stream.load(folder, memory_budget="1GB")
    assert "model-extra.safetensors" in str(caught.error)
