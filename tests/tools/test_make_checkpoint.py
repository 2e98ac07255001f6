"""The random checkpoint writer: stock mlx-lm loads what it writes, and it needs little memory."""

import json
import math
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner
from mlx_lm.utils import load_model

from tests.support.checkpoints import build_family, random_tokens, stock_model, stock_prefill
from tests.support.families import FAMILIES
from tools import make_checkpoint as tool
from tools.make_checkpoint import Quant, make_checkpoint

QWEN = FAMILIES["qwen3_moe"].config
MODES = {
    "affine1": Quant(bits=1),
    "affine2": Quant(bits=2),
    "affine3": Quant(bits=3, group_size=32),
    "affine4": Quant(),
    "affine5": Quant(bits=5),
    "affine6": Quant(bits=6, group_size=32),
    "affine8": Quant(bits=8, group_size=32),
    "mxfp4": Quant("mxfp4"),
    "mxfp8": Quant("mxfp8"),
    "nvfp4": Quant("nvfp4"),
    "none": Quant("none"),
}


def read_all(folder):
    weights = {}
    for file in sorted(folder.glob("model*.safetensors")):
        weights.update(mx.load(str(file)))
    return weights


def expert_weights(projection):
    """[E, out, in] as float32."""
    if "scales" not in projection:
        return np.array(projection.weight.astype(mx.float32))
    dense = mx.dequantize(
        projection.weight,
        projection.scales,
        projection.get("biases"),
        group_size=projection.group_size,
        bits=projection.bits,
        mode=projection.mode,
    )
    return np.array(dense.astype(mx.float32))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quant", MODES.values(), ids=MODES)
def test_every_mode_loads_and_is_sane(tmp_path, quant, dtype):
    out = tmp_path / "model"
    make_checkpoint(out, QWEN, quant=quant, dtype=dtype)
    model, config = load_model(out, strict=True)
    projection = model.model.layers[3].mlp.switch_mlp.down_proj
    if quant.mode == "none":
        assert "quantization" not in config
    else:
        assert config["quantization"]["mode"] == projection.mode == quant.mode
        assert projection.bits == quant.params()["bits"]
    weights = expert_weights(projection)
    assert weights.std() * math.sqrt(weights.shape[-1]) == pytest.approx(1, abs=0.25)
    assert abs(weights.mean()) < 0.1 * weights.std()
    assert len({expert.tobytes() for expert in weights}) == len(weights)
    logits, _ = stock_prefill(stock_model(out), random_tokens(160, 24), 16)
    assert np.isfinite(logits).all()
    assert 0.3 < logits.std() < 3


def test_routing_is_spread(tmp_path):
    model = stock_model(build_family("qwen3_moe", tmp_path / "model"))
    layer = model.model.layers[3].mlp
    x = mx.random.normal((256, 128))
    chosen = np.array(mx.argmax(layer.gate(x), axis=-1))
    assert len(np.unique(chosen)) == 8


def test_dtype_of_scales_and_norms(tmp_path):
    for dtype, expected in (("bfloat16", mx.bfloat16), ("float16", mx.float16)):
        weights = read_all(build_family("gpt_oss", tmp_path / dtype, dtype=dtype))
        assert weights["model.norm.weight"].dtype == expected
        assert weights["model.layers.0.mlp.experts.up_proj.scales"].dtype == expected
    kept = read_all(build_family("deepseek_v3", tmp_path / "cast", dtype="bfloat16"))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert kept[name].dtype == mx.float32  # mlx-lm never casts it


def test_single_file_layout(tmp_path):
    out = tmp_path / "model"
    summary = make_checkpoint(out, QWEN)
    assert sorted(p.name for p in out.iterdir()) == [
        "config.json",
        "model.safetensors",
        "model.safetensors.index.json",
    ]
    weights = read_all(out)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert (
        summary.nbytes == index["metadata"]["total_size"] == sum(w.nbytes for w in weights.values())
    )
    assert set(index["weight_map"]) == set(weights)
    assert (summary.shards, summary.tensors) == (1, len(weights))
    with open(out / "model.safetensors", "rb") as file:
        header = int.from_bytes(file.read(8), "little")
    assert (out / "model.safetensors").stat().st_size == 8 + header + summary.nbytes


def test_shards_hold_the_same_tensors(tmp_path):
    whole = read_all(build_family("qwen3_moe", tmp_path / "whole"))
    limit = 100_000
    out = build_family("qwen3_moe", tmp_path / "cut", shard_bytes=limit)
    files = sorted(out.glob("model*.safetensors"))
    assert len(files) > 2
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    weight_map = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    for file in files:
        tensors = mx.load(str(file))
        assert {weight_map[name] for name in tensors} == {file.name}
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= limit
    cut = read_all(out)
    assert set(cut) == set(whole)
    assert all(mx.array_equal(cut[name], whole[name]) for name in whole)
    load_model(out, strict=True)


def test_overrides_reach_the_config_and_the_weights(tmp_path):
    overrides = (
        (r"switch_mlp\.down_proj", {"bits": 8, "group_size": 32}),
        (r"switch_mlp\.up_proj", {"mode": "mxfp4"}),
        (r"o_proj", False),
    )
    out = build_family("qwen3_moe", tmp_path / "model", overrides=overrides)
    model, config = load_model(out, strict=True)
    layer = model.model.layers[0]
    down, up, gate = (getattr(layer.mlp.switch_mlp, f"{p}_proj") for p in ("down", "up", "gate"))
    assert (down.mode, down.bits, down.group_size) == ("affine", 8, 32)
    assert (up.mode, up.bits, up.group_size) == ("mxfp4", 4, 32)
    assert (gate.mode, gate.bits, gate.group_size) == ("affine", 4, 64)
    assert "scales" not in layer.self_attn.o_proj
    quantization = config["quantization"]
    assert quantization["model.layers.0.self_attn.o_proj"] is False
    assert quantization["model.layers.0.mlp.switch_mlp.up_proj"]["mode"] == "mxfp4"
    with pytest.raises(ValueError, match="overrides need a quantization mode"):
        Quant("none", overrides=overrides)


def test_the_same_arguments_give_the_same_bytes(tmp_path):
    a, b, c = (
        (build_family("nemotron_h", tmp_path / n, seed=s) / "model.safetensors").read_bytes()
        for n, s in (("a", 1), ("b", 1), ("c", 2))
    )
    assert a == b
    assert a != c


def test_refuses_a_folder_with_files(tmp_path):
    (tmp_path / "notes.txt").write_text("keep me")
    with pytest.raises(FileExistsError, match="not an empty folder"):
        make_checkpoint(tmp_path, QWEN)
    assert (tmp_path / "notes.txt").read_text() == "keep me"
    empty = tmp_path / "empty"
    empty.mkdir()
    make_checkpoint(empty, QWEN)
    load_model(empty, strict=True)


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError("disk on fire")

    monkeypatch.setattr(tool, "chunks", fail)
    with pytest.raises(OSError, match="disk on fire"):
        make_checkpoint(tmp_path / "model", QWEN)
    assert list(tmp_path.iterdir()) == []


def test_checks_free_space_first(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")(10, 5, 5)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OSError, match="GB free, needs"):
        make_checkpoint(tmp_path / "model", QWEN)
    assert list(tmp_path.iterdir()) == []


def test_command_line(tmp_path):
    out = tmp_path / "model"
    args = ["--out", str(out), "--family", "gpt_oss", "--layers", "2", "--vocab", "96"]
    args += [
        "--set",
        "sliding_window=8",
        "--mode",
        "mxfp4",
        "--override",
        "q_proj=mode:affine,bits:8",
    ]
    result = CliRunner().invoke(tool.main, args)
    assert result.exit_code == 0, result.output
    model, config = load_model(out, strict=True)
    assert (len(model.layers), config["vocab_size"], config["sliding_window"]) == (2, 96, 8)
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    assert model.layers[0].self_attn.q_proj.mode == "affine"
    again = CliRunner().invoke(tool.main, args)
    assert again.exit_code == 1
    assert "choose another --out" in again.output
    for bad in (["--family", "nope"], [], ["--family", "olmoe", "--override", "x=depth:3"]):
        assert CliRunner().invoke(tool.main, ["--out", str(tmp_path / "x"), *bad]).exit_code == 2


def test_memory_stays_small(tmp_path):
    out = tmp_path / "model"
    script = """
import resource, sys
from tools.make_checkpoint import main
main(sys.argv[1:], standalone_mode=False)
if sys.platform == "linux":
    # ru_maxrss survives exec: it would show the peak of the process that started this one.
    lines = open("/proc/self/status").read().splitlines()
    print("peak MB", next(int(x.split()[1]) / 1e3 for x in lines if x.startswith("VmHWM")))
else:
    print("peak MB", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)
"""
    arguments = ["--out", str(out), "--preset", "qwen3-30b-a3b", "--layers", "1", "--vocab", "1024"]
    root = Path(tool.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (out / "model.safetensors").stat().st_size > 300e6
    assert float(done.stdout.rsplit(maxsplit=1)[1]) < 300
