"""Packed bytes: every expert and every resident tensor is what it was, at any size and order."""

from __future__ import annotations

import json

import mlx.core as mx
import numpy as np
import pytest
import xxhash
from mlx_lm.utils import load_model
from safetensors import safe_open

from mlx_stream.packed.layout import plan_pack
from mlx_stream.storage.packed_manifest import MANIFEST_NAME
from mlx_stream.storage.record_layout import RECORD_ALIGN, TENSOR_ALIGN
from tests.packed.building import SMALL_SHARD, expert_bytes, index_of, random_orders
from tests.prefill.test_quantization import VARIANTS

NAMES = ["qwen3_moe", "gpt_oss", "nemotron_h", "deepseek_v32", "gemma4_text"]
PIECE = RECORD_ALIGN  # many pieces, cut anywhere in records and tensors


def check_bytes(plain, folder):
    """Experts by key, resident tensors by name, one checksum computed here."""
    source, packed = index_of(plain), index_of(folder)
    assert [x.name for x in source.layers] == [x.name for x in packed.layers]
    for a, b in zip(source.layers, packed.layers, strict=True):
        assert (a.kind, a.num_experts, a.quant) == (b.kind, b.num_experts, b.quant)
        assert b.record.nbytes % RECORD_ALIGN == 0
        for expert in range(a.num_experts):
            found = expert_bytes(packed, b, expert)
            assert found == expert_bytes(source, a, expert)
            ordered = dict(sorted((t.offset, found[t.key]) for t in b.tensors))
            digest = xxhash.xxh3_64_intdigest(b"".join(ordered.values()))
            assert b.record.digests[expert] == digest
    kept = source.checkpoint.tensors.keys() - source.tensor_names
    assert kept == packed.checkpoint.tensors.keys() - packed.tensor_names
    for name in kept:
        assert tensor_bytes(source, name) == tensor_bytes(packed, name)
    assert source.resident_nbytes == packed.resident_nbytes
    assert source.nbytes == packed.nbytes


def tensor_bytes(index, name):
    t = index.checkpoint.tensors[name]
    with open(index.checkpoint.files[t.file].path, "rb") as file:
        file.seek(t.offset)
        return t.dtype, t.shape, file.read(t.nbytes)


@pytest.mark.parametrize("io", ["direct", "buffered"])
@pytest.mark.parametrize("name", NAMES)
def test_every_byte_comes_through(checkpoint, packed, name, io):
    plain = checkpoint(name)
    check_bytes(plain, packed(plain, io=io, piece_nbytes=PIECE, shard_nbytes=SMALL_SHARD))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_every_quantization(checkpoint, packed, name, variant):
    plain = checkpoint(name, **VARIANTS[variant])
    check_bytes(plain, packed(plain))


@pytest.mark.parametrize("name", NAMES)
def test_every_order_and_a_packing_of_a_packing(checkpoint, packed, name):
    plain = checkpoint(name)
    first = packed(plain, orders=random_orders(index_of(plain)), piece_nbytes=PIECE)
    check_bytes(plain, first)
    check_bytes(plain, packed(first, orders=random_orders(index_of(plain), seed=1)))
    check_bytes(plain, packed(first))


@pytest.mark.parametrize("pieces", [1, 3, 64])
def test_pieces_of_any_size_give_the_same_files(checkpoint, packed, pieces):
    plain = checkpoint("qwen3_moe", shard_bytes=300_000)
    whole, cut = packed(plain), packed(plain, piece_nbytes=pieces * PIECE)
    names = sorted(p.name for p in whole.iterdir())
    assert sorted(p.name for p in cut.iterdir()) == names
    for name in names:
        assert (whole / name).read_bytes() == (cut / name).read_bytes()


def test_the_files_are_valid_safetensors(checkpoint, packed):
    plain = checkpoint("gpt_oss", shard_bytes=300_000)
    folder = packed(plain, shard_nbytes=SMALL_SHARD)
    files = sorted(folder.glob("*.safetensors"))
    assert {f.name.split("-")[0].split(".")[0] for f in files} == {"model", "experts"}
    for path in files:
        with safe_open(path, "np") as file:
            for name in file.keys():  # noqa: SIM118
                if path.name.startswith("experts"):
                    assert file.get_tensor(name).dtype == np.uint8
        assert mx.load(str(path))


def test_stock_mlx_lm_refuses_what_has_no_experts(checkpoint, packed):
    with pytest.raises(ValueError, match="Missing"):
        load_model(packed(checkpoint("qwen3_moe")))


def test_the_layout_is_what_the_manifest_says(checkpoint, packed):
    folder = packed(checkpoint("qwen3_moe"))
    found = json.loads((folder / MANIFEST_NAME).read_text())
    assert (found["format"], found["version"]) == ("mlx_stream.packed", 1)
    layer = found["layers"][0]
    names = [t["name"].split(".")[-2:] for t in layer["tensors"]]
    projections = ("gate_proj", "up_proj", "down_proj")
    assert names == [[p, part] for p in projections for part in ("weight", "scales", "biases")]
    assert all(t["offset"] % TENSOR_ALIGN == 0 for t in layer["tensors"])
    assert layer["record_nbytes"] % RECORD_ALIGN == 0
    assert all(s["size"] and s["mtime_ns"] and s["header"] for s in found["source"]["files"])


def test_an_order_that_is_none_is_refused(checkpoint):
    index = index_of(checkpoint("qwen3_moe"))
    with pytest.raises(ValueError, match="not an order"):
        plan_pack(index, {index.layers[0].name: [0] * 8})
