"""mlx_stream.plan: from headers alone, and the same as the runtime's own plan."""

import json
import os
import struct
import subprocess
import sys

import pytest

import mlx_stream
from mlx_stream.errors import BudgetError, DenseModelError, ModelNotFoundError, TruncatedFileError


def headers_only(source, out):
    """Shards with their headers and a hole of the right length where the data was."""
    out.mkdir()
    for path in source.iterdir():
        target = out / path.name
        if path.suffix != ".safetensors":
            target.write_bytes(path.read_bytes())
            continue
        with open(path, "rb") as file:
            length = struct.unpack("<Q", file.read(8))[0]
            file.seek(0)
            target.write_bytes(file.read(8 + length))
        os.truncate(target, path.stat().st_size)
    return out


def test_the_data_of_the_files_does_not_matter(checkpoint, tmp_path):
    path = checkpoint("qwen3_moe", shard_bytes=150_000)
    hollow = headers_only(path, tmp_path / "hollow")
    assert len(list(hollow.glob("*.safetensors"))) > 1
    options = {"memory_budget": "1GB", "chunk_tokens": 256}
    assert mlx_stream.plan(hollow, 1000, **options) == mlx_stream.plan(path, 1000, **options)


def test_it_is_as_the_runtimes_own_plan(checkpoint, open_engine):
    path = checkpoint("qwen3_moe")
    theirs = open_engine(path, chunk_tokens=256, memory_budget=10**9).plan(1000)
    ours = mlx_stream.plan(path, 1000, memory_budget=10**9, chunk_tokens=256)
    for field in ("model", "prompt_tokens", "mode", "chunk_tokens", "segments", "layers"):
        assert getattr(ours, field) == getattr(theirs, field), field
    assert ours.memory.resident == theirs.memory.resident
    assert ours.memory.kv == theirs.memory.kv
    assert ours.memory.held == theirs.memory.held


def test_a_truncated_file_is_refused(checkpoint, tmp_path):
    hollow = headers_only(checkpoint("qwen3_moe"), tmp_path / "hollow")
    shard = hollow / "model.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)
    with pytest.raises(TruncatedFileError):
        mlx_stream.plan(hollow, 10, memory_budget="1GB")


def test_no_mlx_is_imported_to_plan(checkpoint):
    code = (
        "import sys, mlx_stream\n"
        f"plan = mlx_stream.plan({str(checkpoint('qwen3_moe'))!r}, 100, memory_budget='1GB')\n"
        "assert plan.prompt_tokens == 100 and 'prefill of 100 tokens' in str(plan)\n"
        "assert not {'mlx', 'mlx_lm', 'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_refusals_are_typed(checkpoint, tmp_path):
    path = checkpoint("qwen3_moe")
    with pytest.raises(BudgetError, match="what to do"):
        mlx_stream.plan(path, 100, memory_budget="1MB")
    with pytest.raises(ModelNotFoundError):
        mlx_stream.plan(tmp_path / "nowhere", 100)
    dense = tmp_path / "dense"
    dense.mkdir()
    (dense / "config.json").write_text(json.dumps({"model_type": "llama"}))
    text = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    raw = struct.pack("<Q", len(text)) + text + bytes(4)
    (dense / "model.safetensors").write_bytes(raw)
    with pytest.raises(DenseModelError):
        mlx_stream.plan(dense, 100, memory_budget="1GB")


def test_the_default_budget_is_a_share_of_free_memory(checkpoint):
    plan = mlx_stream.plan(checkpoint("qwen3_moe"), 100)
    assert plan.memory.total <= plan.memory.budget
