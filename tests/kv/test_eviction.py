"""Keys and values that leave memory behind each layer: same tokens, one valid file, few bytes."""

import errno
import json
import os
import shutil
import sys
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache, load_prompt_cache

from mlx_stream import prompt_caches
from mlx_stream.config import ConfigError
from mlx_stream.errors import BudgetError, KvCacheError, PromptFileError
from mlx_stream.kv.array_file import ArrayFile, file_sum, write_arrays
from mlx_stream.kv.evict import SpillingKVCache
from mlx_stream.kv.options import PLAIN, KvOptions
from mlx_stream.planner.kv_size import kv_size, live_layers
from mlx_stream.prefill.cache_views import cache_arrays, cache_leaves
from tests.prefill.running import decode, settled_prompt, stock_decode
from tests.support.checkpoints import random_tokens, stock_prefill
from tests.support.families import FAMILIES
from tests.support.faults import assert_same_contents, cache_contents, nothing_left
from tests.support.watch import run_watched
from tools.fault_parts_flips import flip
from tools.fault_parts_system import CHANGES, SystemFaults

N, CHUNK, STEPS = 83, 16, 8
BIG = os.environ.get("MLX_STREAM_BIG") == "1"
REFUSED = ("deepseek_v41",)
KINDS = ("qwen3_moe", "gpt_oss", "llama4", "deepseek_v3", "deepseek_v32", "qwen3_next")
DEEP = {"num_hidden_layers": 8, "decoder_sparse_step": 1, "mlp_only_layers": []}
# One wide head: a long prompt's keys and values are large beside everything else.
LONG = DEEP | {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 128}
LONG |= {"max_position_embeddings": 32768}


def to_disk(folder):
    return KvOptions(kv_evict="disk", kv_dir=folder)


def evicted(open_engine, path, folder, prompt, **options):
    """Engine and result of a prefill whose cache went to the disk, and the file."""
    engine = open_engine(path, **options)
    result = engine.prefill(prompt, kv=to_disk(folder))
    return engine, result, folder / "prompt-kv.safetensors"


def least_budget(engine, plan):
    """The least budget, to 4 KiB, under which there is a plan; spends the engine."""
    low, high = 1 << 20, 1 << 30
    while high - low > 4096:
        engine.budget.total = (low + high) // 2
        try:
            plan()
            high = engine.budget.total
        except BudgetError:
            low = engine.budget.total
    return high


# --- families


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in FAMILIES if name not in REFUSED][:: 1 if BIG else 4]
)
def test_every_family_gives_the_same_tokens(checkpoint, open_engine, tmp_path, name):
    path = checkpoint(name)
    plain = open_engine(path)
    prompt = random_tokens(plain._shape.vocab, N)
    expected = plain.prefill(prompt)
    engine, result, file = evicted(open_engine, path, tmp_path, prompt)
    assert mx.array_equal(result.logits, expected.logits)
    assert decode(engine, result, prompt, STEPS) == decode(plain, expected, prompt, STEPS)
    assert not any(isinstance(leaf, SpillingKVCache) for leaf in cache_leaves(result.cache))
    assert os.listdir(tmp_path) == [file.name]


@pytest.mark.parametrize("name", KINDS)
def test_the_file_is_a_prompt_cache_of_mlx_lm(checkpoint, open_engine, stock, tmp_path, name):
    path = checkpoint(name)
    model = stock(path)
    prompt, rows = settled_prompt(model, N, STEPS, CHUNK)
    _, result, file = evicted(open_engine, path, tmp_path, prompt)
    cache, about = load_prompt_cache(str(file), return_metadata=True)
    assert json.loads(about["tokens"]) == prompt
    first = mx.array([[int(rows[0].argmax())]])
    logits = model(first, cache=cache)[0, -1]
    again = stock_decode(model, logits, cache, STEPS - 1)
    assert [int(r.argmax()) for r in again] == [int(r.argmax()) for r in rows[1:]]
    ours = prompt_caches.load(open_engine(path), file)
    assert ours.tokens == prompt
    for a, b in zip(cache_arrays(ours.cache), cache_arrays(result.cache), strict=True):
        rows_held = min(a.shape[-2], b.shape[-2])
        assert mx.array_equal(a[..., :rows_held, :], b[..., :rows_held, :])


def test_the_file_has_no_holes(checkpoint, open_engine, tmp_path):
    """The safetensors library, which is strict about it, reads the file."""
    from safetensors.numpy import load_file

    _, result, file = evicted(open_engine, checkpoint("qwen3_moe"), tmp_path, random_tokens(160, N))
    arrays = load_file(str(file))
    keys, _ = result.cache[2].keys_and_values()
    assert np.array_equal(arrays["2.0"], np.array(keys))


@pytest.mark.parametrize("name", REFUSED)
def test_caches_that_cannot_leave_are_refused(checkpoint, open_engine, tmp_path, name):
    engine = open_engine(checkpoint(name))
    with pytest.raises(KvCacheError, match="kv_evict"):
        engine.prefill(random_tokens(160, N), kv=to_disk(tmp_path))
    assert engine.reader.counters.bytes == 0


# --- quantized behind each layer


@pytest.mark.parametrize("bits", [4, 8])
def test_quantizing_behind_the_layer_is_plain_prefill_then_quantized(
    checkpoint, open_engine, stock, bits
):
    path = checkpoint("qwen3_moe", changes=DEEP)
    model = stock(path)
    kv = KvOptions(kv_evict="quantize", kv_bits=bits, kv_group_size=32, quantized_kv_start=0)
    prompt = random_tokens(160, N)
    logits, cache = stock_prefill(model, prompt, CHUNK)
    engine = open_engine(path)
    plain = engine.prefill(prompt)
    result = engine.prefill(prompt, kv=kv)
    assert mx.array_equal(result.logits, plain.logits), "prefill itself is not quantized"
    assert all(type(layer) is QuantizedKVCache for layer in result.cache)
    quantized = [layer.to_quantized(group_size=32, bits=bits) for layer in cache]
    rows = stock_decode(model, logits, quantized, STEPS)
    assert decode(engine, result, prompt, STEPS) == [int(row.argmax()) for row in rows]
    assert result.receipt.kv_peak_bytes < plain.receipt.kv_peak_bytes / (1.5 if bits == 8 else 2)


def test_quantize_takes_eight_bits_unless_told_otherwise():
    assert KvOptions(kv_evict="quantize").kv_bits == 8
    assert KvOptions(kv_evict="quantize", kv_bits=4).kv_bits == 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"kv_evict": "tape"},
        {"kv_evict": "disk"},
        {"kv_dir": "/tmp"},
        {"kv_evict": "disk", "kv_dir": "/tmp", "kv_bits": 8},
        {"kv_evict": "disk", "kv_dir": "/tmp", "max_kv_size": 64},
        {"kv_evict": "quantize", "max_kv_size": 64},
    ],
)
def test_options_that_contradict_are_refused(wrong):
    with pytest.raises(ConfigError):
        KvOptions(**wrong)


# --- memory


def test_one_layer_is_in_memory_when_chunks_meet(checkpoint, open_engine, tmp_path):
    path = checkpoint("qwen3_moe", changes=DEEP)
    prompt = random_tokens(160, N)
    kept = open_engine(path).prefill(prompt).receipt.kv_peak_bytes
    engine, result, _ = evicted(open_engine, path, tmp_path, prompt)
    assert result.receipt.kv_peak_bytes * len(engine.index.layers) == kept


def test_eviction_avoids_segments(checkpoint, open_engine, tmp_path):
    """With all layers' caches in memory the same budget cuts the prompt."""
    engine = open_engine(checkpoint("qwen3_moe", changes=LONG), chunk_tokens=64)
    for tokens in (8192, 16384):
        budget = least_budget(engine, lambda n=tokens: engine.plan(n))
        engine.budget.total = budget
        assert len(engine.plan(tokens).segments) > 1
        evicting = engine.plan(tokens, kv=to_disk(tmp_path))
        assert len(evicting.segments) == 1
        engine.budget.total = budget // 2 + engine.plan(tokens).memory.scratch // 2
        assert len(engine.plan(tokens, kv=to_disk(tmp_path)).segments) == 1
        with pytest.raises(BudgetError):
            engine.plan(tokens)


def test_what_does_not_fit_afterwards_is_read_layer_by_layer(checkpoint, open_engine, tmp_path):
    path = checkpoint("qwen3_moe", changes=LONG)
    prompt = random_tokens(160, 1500)
    engine = open_engine(path, chunk_tokens=64)
    expected = decode(engine, engine.prefill(prompt), prompt, STEPS)
    budget = least_budget(engine, lambda: engine.plan(1500, kv=to_disk(tmp_path))) + (1 << 20)
    small = open_engine(path, chunk_tokens=64, memory_budget=budget)
    result = small.prefill(prompt, kv=to_disk(tmp_path))
    assert any("layer by layer" in note for note in result.receipt.notes)
    assert all(leaf.layered for leaf in cache_leaves(result.cache))
    assert sum(leaf.nbytes for leaf in cache_leaves(result.cache)) == 0
    assert decode(small, result, prompt, STEPS) == expected
    tail = sum(leaf.nbytes for leaf in cache_leaves(result.cache))
    assert 0 < tail <= 8 * 2 * 128 * 4 * STEPS
    assert small.budget.used <= budget


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.slow
def test_outside_peak_of_a_long_prefill(checkpoint, tmp_path):
    """All layers' keys and values against one layer's: the difference is seen from outside."""
    path, tokens = checkpoint("qwen3_moe", changes=LONG), 16384 if BIG else 4096
    reports = []
    small = 200_000_000 if BIG else 1 << 30  # without eviction the long one needs 232 MB
    for folder, budget in ((None, 1 << 30), (str(tmp_path / "kv"), small)):
        job = {"model": str(path), "budget": budget, "chunk": 256, "tokens": tokens}
        job |= {"decode": 1, "kv_dir": folder}
        (tmp_path / "job.json").write_text(json.dumps(job))
        command = [sys.executable, "-m", "tests.kv.eviction_worker", str(tmp_path / "job.json")]
        report = run_watched(command)
        assert report.exit_code == 0, report.err
        reports.append(report)
    kept, evicting = (report.result for report in reports)
    assert kept["tokens"] == evicting["tokens"]
    layer = tokens * 2 * 128 * 4
    assert kept["receipt"]["kv_peak_bytes"] >= 8 * layer
    assert evicting["receipt"]["kv_peak_bytes"] <= layer + 256 * 2 * 128 * 4
    if BIG:
        assert evicting["receipt"]["segments"] == 1
        assert reports[0].peak_rss - reports[1].peak_rss > 6 * layer


# --- later turns


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v32"])
@pytest.mark.parametrize("load", [True, False])
def test_a_further_prompt_onto_an_evicted_cache(checkpoint, open_engine, tmp_path, name, load):
    path = checkpoint(name)
    prompt, more = random_tokens(160, N), random_tokens(160, 50, seed=1)
    plain = open_engine(path)
    first = plain.prefill(prompt)
    expected = plain.prefill(more, first.cache)
    engine = open_engine(path)
    cache = engine.kv.prepare(None, to_disk(tmp_path))
    plan = engine.plan(N, kv=to_disk(tmp_path))
    engine.run_plan(replace(plan, kv_layered=not load), np.array(prompt), cache)
    again = engine.prefill(more, cache, kv=to_disk(tmp_path / "second"))
    assert mx.array_equal(again.logits, expected.logits)
    assert decode(engine, again, more, STEPS) == decode(plain, expected, more, STEPS)


def test_a_spilling_cache_is_a_kv_cache(tmp_path):
    """Layered or loaded, trimmed or saved: as mlx-lm's own."""
    parts = [mx.random.normal((1, 2, n, 8)) for n in (7, 3, 1, 2)]
    plain, ours = KVCache(), SpillingKVCache()
    for cache in (plain, ours):
        cache.update_and_fetch(parts[0], parts[0] * 2)
    file = ArrayFile(tmp_path / "x.safetensors", 1000)
    ours.spill(file)
    assert (ours.keys, ours.nbytes, ours.empty(), ours.offset) == (None, 0, False, 7)
    ours.layered = True
    for part, trim in ((parts[1], 1), (parts[2], 0), (parts[3], 2), (parts[1], 9), (parts[0], 0)):
        for a, b in zip(
            plain.update_and_fetch(part, part), ours.update_and_fetch(part, part), strict=True
        ):
            assert mx.array_equal(a, b)
        assert plain.trim(trim) == ours.trim(trim)
        assert plain.offset == ours.offset
        for a, b in zip(plain.keys_and_values(), ours.keys_and_values(), strict=True):
            assert mx.array_equal(a[..., : plain.offset, :], b)
    file.close()
    assert not list(tmp_path.iterdir())


# --- files and disks


def test_array_files_are_safetensors(tmp_path, monkeypatch):
    monkeypatch.setattr("mlx_stream.kv.array_file.SLAB_NBYTES", 1000)
    arrays = {
        "strided": mx.random.normal((2, 3, 50, 7)).astype(mx.bfloat16)[..., :33, :],
        "scalar": mx.array(3),
        "empty": mx.zeros((1, 2, 0, 4)),
        "none": mx.array([]),
        "flags": mx.array([True, False]),
        "turned": mx.random.normal((700, 10)).T,
        "rows": mx.random.normal((3000, 1)),
    }
    target = tmp_path / "a.safetensors"
    total = write_arrays(target, arrays, {"key": "value"})
    found, about = mx.load(str(target), return_metadata=True)
    assert about.pop("0.checksums")
    assert about == {"key": "value"}
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert found[name].shape == array.shape
        assert mx.array_equal(found[name], array)
    assert file_sum(target) == total
    assert os.listdir(tmp_path) == ["a.safetensors"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize(("call", "number"), [("pwrite", 0), ("pwrite", 9), ("fsync", 0)])
def test_a_failing_disk_ends_the_prefill(
    checkpoint, open_engine, tmp_path, monkeypatch, call, number, code
):
    """There is no memory to keep the layers in: typed error, cache and folder as before."""
    engine = open_engine(checkpoint("qwen3_moe"))
    start = engine.prefill(random_tokens(160, 20))
    before = cache_contents(start.cache)
    real, left = getattr(os, call), [number]

    def fail(*args):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(code, os.strerror(code))
        return real(*args)

    with nothing_left():
        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            with pytest.raises(PromptFileError, match="cannot be written"):
                engine.prefill(random_tokens(160, N), start.cache, kv=to_disk(tmp_path))
        assert list(tmp_path.iterdir()) == []
        assert_same_contents(start.cache, before)
    assert engine.prefill(random_tokens(160, N)).receipt.segments == 1


def test_a_disk_that_becomes_read_only_ends_the_prefill(checkpoint, open_engine, tmp_path):
    """Its temporary file cannot be removed; the next prompt does that, and the error is ours."""
    engine, folder = open_engine(checkpoint("qwen3_moe")), tmp_path / "kv"
    faults = SystemFaults(CHANGES, folder, 4, errno.EROFS, lasting=True)
    with faults, pytest.raises(PromptFileError, match="cannot be written"):
        engine.prefill(random_tokens(160, N), kv=to_disk(folder))
    assert faults.injected
    engine.prefill(random_tokens(160, N), kv=to_disk(folder))
    assert os.listdir(folder) == ["prompt-kv.safetensors"]


@pytest.mark.parametrize("layered", [False, True])
def test_a_flipped_bit_of_evicted_rows_is_no_answer(checkpoint, open_engine, tmp_path, layered):
    """mlx-lm's format has no checksums: these are ours, checked whenever rows come back."""
    engine = open_engine(checkpoint("qwen3_moe"))
    prompt = random_tokens(160, N)
    cache = engine.kv.prepare(None, to_disk(tmp_path))
    plan = replace(engine.plan(N, kv=to_disk(tmp_path)), kv_layered=layered)

    def damage():
        (path,) = tmp_path.glob("*.safetensors" if layered else ".*.safetensors")
        start = 8 + int.from_bytes(path.read_bytes()[:8], "little") if layered else -5
        flip(path, start % path.stat().st_size, 2)

    if layered:
        logits, _ = engine.run_plan(plan, np.array(prompt), cache)
        damage()
        with pytest.raises(KvCacheError, match="other bytes"):
            engine.model(mx.array([[int(logits.argmax())]]), cache=cache)
        return
    layers = len(engine.index.layers)

    def progress(state):
        if state.layer == layers:
            damage()

    with pytest.raises(KvCacheError, match="other bytes"):
        engine.run_plan(plan, np.array(prompt), cache, progress=progress)


def test_a_prompt_cache_file_with_a_flipped_bit_is_refused(checkpoint, open_engine, tmp_path):
    engine = open_engine(checkpoint("qwen3_moe"))
    _, result, evicted_file = evicted(open_engine, engine.path, tmp_path, random_tokens(160, N))
    saved = prompt_caches.save(engine, tmp_path / "s", result.cache, random_tokens(160, N))
    for path in (saved, evicted_file):
        raw = bytearray(path.read_bytes())
        start = 8 + int.from_bytes(raw[:8], "little")
        for at in np.random.default_rng(0).integers(start, len(raw), 20):
            raw[at] ^= 16
            path.write_bytes(raw)
            with pytest.raises(PromptFileError, match="bytes that were written"):
                prompt_caches.load(engine, path)
            raw[at] ^= 16
        path.write_bytes(raw)
        assert prompt_caches.load(engine, path).tokens == random_tokens(160, N)


def test_no_room_is_said_before_anything_is_read(checkpoint, open_engine, tmp_path, monkeypatch):
    engine = open_engine(checkpoint("qwen3_moe"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(PromptFileError, match="no room"):
        engine.prefill(random_tokens(160, N), kv=to_disk(tmp_path))
    assert engine.reader.counters.bytes == 0


# --- the plan


def test_live_layers_counts_what_lies_between_meetings():
    def names(*numbers):
        return [f"model.layers.{n}.mlp.switch_mlp" for n in numbers]

    assert live_layers(names(0, 1, 2), 3) == 1
    assert live_layers(names(3, 4), 5) == 4
    assert live_layers(names(1, 3, 5), 6) == 2
    assert live_layers(names(0), 5) == 4
    assert live_layers(["experts"], 7) == 7


def test_the_plan_counts_live_layers_only(checkpoint, open_engine):
    shape = open_engine(checkpoint("qwen3_moe", changes=LONG))._shape
    about = {"total_tokens": 10_000, "decode_tokens": 256, "chunk_tokens": 64, "segments": 1}
    kept = kv_size(shape, PLAIN, 4, **about)
    disk = kv_size(shape, to_disk("/kv"), 4, **about)
    assert disk.held == kept.layer == kept.held // 8
    assert disk.stored == kept.stored == kept.held
    small = kv_size(shape, KvOptions(kv_evict="quantize"), 4, **about)
    assert kept.layer < small.held < kept.held / 2
    windowed = kv_size(shape, to_disk("/kv"), 4, window=512, **about)
    assert disk.held < windowed.held < kept.held / 2
