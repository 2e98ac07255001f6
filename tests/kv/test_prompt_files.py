"""Prompt cache files: every family, both ways with mlx-lm, and everything that can be wrong."""

import json
import os
import pickle
import shutil
import struct
from collections import namedtuple

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import load_prompt_cache, save_prompt_cache

from mlx_stream import prompt_caches
from mlx_stream.errors import PromptFileError
from mlx_stream.kv.options import KvOptions
from tests.kv.running import our_run
from tests.prefill.running import relative, settled_prompt, stock_decode
from tests.support.checkpoints import random_tokens, stock_prefill
from tests.support.families import FAMILIES

N, STEPS = 37, 3
# mlx-lm looks cache classes up by name among its own; this one lives in a model's file.
NOT_FOR_MLX_LM = {"deepseek_v41": KeyError}
BIG = os.environ.get("MLX_STREAM_BIG") == "1"
KINDS = (
    "qwen3_moe",
    "gpt_oss",
    "llama4",
    "qwen3_next",
    "deepseek_v3",
    "deepseek_v32",
    "longcat_flash_ngram",
    "deepseek_v41",
    "nemotron_h",
)


@pytest.fixture
def saved(checkpoint, open_engine, tmp_path):
    """A file of a qwen3_moe prompt, its engine and its tokens."""
    engine = open_engine(checkpoint("qwen3_moe"))
    tokens = random_tokens(160, N, 5)
    path = prompt_caches.save(
        engine, tmp_path / "p.safetensors", engine.prefill(tokens).cache, tokens
    )
    return path, engine, tokens


def continued(engine, file, more):
    return np.array(engine.prefill(more, file.cache).logits)


def round_trip(checkpoint, open_engine, tmp_path, name):
    """Into a new engine, and through stock mlx-lm where it can."""
    path = checkpoint(name)
    first = open_engine(path)
    vocab = prompt_caches.model_identity(first).vocab
    tokens, more = random_tokens(vocab, N, 5), random_tokens(vocab, 7, 6)
    result = first.prefill(tokens)
    file = prompt_caches.save(first, tmp_path / "p", result.cache, tokens)
    expected = np.array(first.prefill(more, result.cache).logits)

    second = open_engine(path)
    loaded = prompt_caches.load(second, file)
    assert loaded.tokens == tokens
    assert relative(continued(second, loaded, more), expected) < 1e-5

    if name in NOT_FOR_MLX_LM:
        with pytest.raises(NOT_FOR_MLX_LM[name]):
            load_prompt_cache(str(file))
    else:
        by_stock = load_prompt_cache(str(file))
        logits = np.array(second.prefill(more, by_stock).logits)
        assert relative(logits, expected) < 1e-5


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_cache_comes_back(checkpoint, open_engine, tmp_path, name):
    round_trip(checkpoint, open_engine, tmp_path, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in FAMILIES if name not in KINDS][:: 1 if BIG else 5]
)
def test_every_other_family_comes_back(checkpoint, open_engine, tmp_path, name):
    round_trip(checkpoint, open_engine, tmp_path, name)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "qwen3_next"])
def test_stock_mlx_lm_goes_on_from_our_file(checkpoint, stock, open_engine, tmp_path, name):
    path, model = checkpoint(name), stock(checkpoint(name))
    prompt, rows = settled_prompt(model, N, STEPS)
    engine = open_engine(path)
    result = engine.prefill(prompt)
    file = prompt_caches.save(engine, tmp_path / "p.safetensors", result.cache, prompt)
    cache, metadata = load_prompt_cache(str(file), return_metadata=True)
    ours = stock_decode(model, result.logits, cache, STEPS)
    assert [row.argmax() for row in ours] == [row.argmax() for row in rows]
    assert json.loads(metadata["tokens"]) == prompt
    assert json.loads(metadata["tokenizer_config"]) == {}  # mlx_lm.generate asks for both
    assert metadata["model"] == str(path)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v32"])
def test_we_go_on_from_a_file_of_mlx_lm(checkpoint, stock, open_engine, tmp_path, name):
    path, model = checkpoint(name), stock(checkpoint(name))
    prompt, more = random_tokens(model, N, 1), random_tokens(model, 5, 2)
    _, cache = stock_prefill(model, prompt, 16)
    save_prompt_cache(str(tmp_path / "s.safetensors"), cache, {"model": "m"})
    engine = open_engine(path)
    loaded = prompt_caches.load(engine, tmp_path / "s.safetensors")
    assert loaded.tokens is None
    expected = np.array(model(mx.array([more]), cache=cache)[0, -1])
    assert relative(continued(engine, loaded, more), expected) < 1e-4


@pytest.mark.parametrize(
    "kv",
    [
        KvOptions(kv_bits=4, kv_group_size=32, quantized_kv_start=20),
        KvOptions(kv_bits=8, kv_group_size=32, quantized_kv_start=100),  # not yet quantized
        KvOptions(max_kv_size=20),
    ],
)
def test_options_survive(checkpoint, open_engine, tmp_path, kv):
    engine = open_engine(checkpoint("qwen3_moe"))
    tokens, more = random_tokens(160, N, 5), random_tokens(160, 7, 6)
    cache = engine.prefill(tokens, kv=kv).cache
    file = prompt_caches.save(engine, tmp_path / "p", cache, tokens)
    load_prompt_cache(str(file))
    loaded = prompt_caches.load(engine, file)
    expected, _ = our_run(engine, more, 2, kv, cache)
    got, _ = our_run(engine, more, 2, kv, loaded.cache)
    np.testing.assert_allclose(np.array(got), np.array(expected), atol=1e-4)


def test_unused_room_is_not_saved(saved):
    path, engine, _ = saved
    cache = engine.prefill([1] * N).cache
    assert cache[0].keys.shape[2] == 256
    assert path.stat().st_size < sum(c.nbytes for c in cache) / 2


# --- refused: foreign and damaged files


def refuse(engine, path, *words):
    with pytest.raises(PromptFileError) as error:
        prompt_caches.load(engine, path)
    assert error.value.file == str(path)
    assert error.value.expected is not None
    assert error.value.actual is not None
    assert error.value.remedy
    for word in words:
        assert word in str(error.value)


def rewrite(path, change):
    """Apply `change` to the header, a dict, and write the file again."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def test_another_model(saved, checkpoint, open_engine):
    path, _, _ = saved
    refuse(open_engine(checkpoint("gpt_oss")), path, "model_type", "gpt_oss", "qwen3_moe")


def test_the_same_architecture_with_other_weights(saved, checkpoint, open_engine):
    path, _, _ = saved
    refuse(open_engine(checkpoint("qwen3_moe", seed=9)), path, "weights")


def test_a_file_of_mlx_lm_of_another_model(saved, checkpoint, stock, open_engine, tmp_path):
    _, engine, _ = saved
    other = stock(checkpoint("qwen3_moe", changes={"head_dim": 64}))
    _, cache = stock_prefill(other, random_tokens(other, N), 16)
    save_prompt_cache(str(tmp_path / "s.safetensors"), cache)
    refuse(engine, tmp_path / "s.safetensors", "shape of layer 0")


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("0.layers", "7", ["layers"]),
        ("0.vocab", "3", ["vocab"]),
        ("0.mlx_stream", "99", ["format"]),
        ("0.tokens", "[1, 2]", ["tokens"]),
        ("0.tokens", "[-1]", ["tokens"]),
        ("0.tokens", "{", ["tokens", "JSON"]),
        ("0.tokens", "[" * 100_000, ["tokens"]),
        ("0.messages", '[{"role": 1}]', ["messages"]),
        ("1.0", "BatchKVCache", ["class of layer 0", "BatchKVCache"]),
        ("1.0", "ArraysCache", ["class of layer 0"]),
        ("1.0", "__import__", ["class of layer 0"]),
        ("1.0", "QuantizedKVCache", []),
        ("1.0", "RotatingKVCache", []),
        ("1.99", "KVCache", ["metadata"]),
        ("2.1.1", "pickle", ["metadata"]),
        ("2.1.1", "string", []),
        ("2.1.1", "none", ["offset"]),
    ],
)
def test_changed_metadata(saved, name, value, words):
    path, engine, _ = saved
    rewrite(path, lambda header: header["__metadata__"].update({name: value}))
    refuse(engine, path, *words)


def test_changed_entries(saved):
    path, engine, _ = saved
    rewrite(path, lambda header: header.update({"9.0": header.pop("0.0")}))
    refuse(engine, path, "0.0")


def test_an_entry_too_many(saved):
    path, engine, _ = saved
    empty = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    rewrite(path, lambda header: header.update({"77": empty}))
    refuse(engine, path, "77")


def test_an_offset_beyond_the_keys(saved):
    path, engine, _ = saved
    arrays, metadata = mx.load(str(path), return_metadata=True)
    arrays["2.2"] = mx.array(10_000)
    mx.save_safetensors(str(path), arrays, metadata)
    refuse(engine, path, "tokens of layer 2")


@pytest.mark.parametrize("keep", [0, 4, 8, 100, -1])
def test_truncated(saved, keep):
    path, engine, _ = saved
    path.write_bytes(path.read_bytes()[:keep])
    refuse(engine, path)


def test_not_a_safetensors_file(saved):
    path, engine, _ = saved
    path.write_bytes(pickle.dumps({"a": 1}) * 10)
    refuse(engine, path)
    path.write_bytes(struct.pack("<Q", 2**62) + b"{}" * 20)
    refuse(engine, path, "header length")


def test_missing_and_too_large(saved, tmp_path):
    path, engine, _ = saved
    refuse(engine, tmp_path / "no.safetensors")
    with path.open("r+b") as file:
        os.truncate(file.fileno(), 2 << 30)
    refuse(engine, path, "size")


def test_a_checkpoint_is_not_a_prompt_cache(saved, checkpoint):
    _, engine, _ = saved
    refuse(engine, checkpoint("qwen3_moe") / "model.safetensors", "metadata")


# --- writing


def test_tokens_that_are_not_in_the_cache(saved, tmp_path):
    _, engine, tokens = saved
    with pytest.raises(PromptFileError, match="does not hold these tokens"):
        prompt_caches.save(engine, tmp_path / "x", engine.prefill(tokens).cache, tokens[:-1])


def test_no_room_leaves_the_old_file(saved, monkeypatch):
    path, engine, tokens = saved
    before = path.read_bytes()
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(9, 8, 1))
    with pytest.raises(PromptFileError, match="no room"):
        prompt_caches.save(engine, path, engine.prefill(tokens).cache, tokens)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_failed_write_leaves_the_old_file(saved, monkeypatch):
    path, engine, tokens = saved
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(PromptFileError, match="No space left"):
        prompt_caches.save(engine, path, engine.prefill(tokens).cache, tokens)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_folder_that_is_not_there(saved, tmp_path):
    _, engine, tokens = saved
    with pytest.raises(PromptFileError, match="cannot be written"):
        prompt_caches.save(engine, tmp_path / "no" / "x", engine.prefill(tokens).cache, tokens)


def test_layers_that_hold_different_numbers_of_tokens(saved):
    path, engine, _ = saved
    arrays, metadata = mx.load(str(path), return_metadata=True)
    arrays["2.2"] = mx.array(N - 5)
    mx.save_safetensors(str(path), arrays, metadata)
    refuse(engine, path, "in every layer")


@pytest.mark.parametrize(
    "name", ["qwen3_moe", "gpt_oss", "qwen3_next", "deepseek_v41"] if BIG else ["qwen3_moe"]
)
def test_flipped_header_bytes_never_end_in_anything_else(checkpoint, open_engine, tmp_path, name):
    """A damaged file loads (a digit of a token id changed) or is refused; nothing else happens."""
    engine = open_engine(checkpoint(name))
    path = prompt_caches.save(engine, tmp_path / "p", engine.prefill([1, 2, 3]).cache, [1, 2, 3])
    raw = path.read_bytes()
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    random = np.random.default_rng(0)
    refused = 0
    rounds = 300 if BIG else 120
    for _ in range(rounds):
        damaged = bytearray(raw)
        for at in random.integers(0, end, random.integers(1, 4)):
            damaged[at] = random.integers(0, 256) if random.random() < 0.3 else ord("0") + at % 10
        path.write_bytes(damaged)
        try:
            prompt_caches.load(engine, path)
        except PromptFileError:
            refused += 1
    assert refused > rounds // 3
