"""Prefills that were killed go on from their checkpoints: same tokens, no layer read twice."""

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_stream.errors import CapabilityError, MlxStreamError, ResumeError
from mlx_stream.kv.options import KvOptions
from mlx_stream.prefill.boundary import LayerBoundaries
from mlx_stream.prefill.boundary_probe import check_boundaries
from mlx_stream.prefill.cache_views import cache_arrays
from mlx_stream.prefill.schedule import cut_segments
from mlx_stream.resume.options import KeepOptions
from mlx_stream.resume.restore import Checkpoint
from mlx_stream.resume.store import CheckpointFolder
from tests.prefill.running import decode
from tests.support.checkpoints import random_tokens
from tests.support.families import FAMILIES
from tools.fault_parts_system import CHANGES, SystemFaults

N, STEPS = 83, 8
BIG = os.environ.get("MLX_STREAM_BIG") == "1"
ROUNDS = 200 if BIG else 5
DEEP = {"num_hidden_layers": 8, "decoder_sparse_step": 1, "mlp_only_layers": []}
KINDS = ("qwen3_moe", "gpt_oss", "qwen3_next", "deepseek_v3")  # those that are killed


class Stop(Exception):
    """What ends a prefill here, between two layers."""


def stop_at(layer):
    def progress(state):
        if state.layer == layer:
            raise Stop

    return progress


def open_buffered(open_engine, path, **options):
    """Buffered reads have no padding: bytes can be compared exactly."""
    return open_engine(path, io="buffered", **options)


def keep(engine, folder, every=1, resume=False):
    engine.runner.keep = KeepOptions(folder, every, resume)


def stopped(engine, folder, prompt, layer, **options):
    """Checkpoints of a prefill that ended behind an expert layer."""
    keep(engine, folder, **options)
    with pytest.raises(Stop):
        engine.prefill(prompt, progress=stop_at(layer))


def tokens_of(engine, result, prompt):
    return np.array(result.logits), decode(engine, result, prompt, STEPS)


def files(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


@pytest.fixture(scope="module")
def deep(checkpoint):
    """Checkpoint folders of more layers, by family."""
    return {name: checkpoint(name, changes=DEEP if name == "qwen3_moe" else {}) for name in KINDS}


@pytest.fixture
def whole(open_engine):
    """``whole(path, prompt)``: logits and tokens of an undisturbed prefill."""

    def run(path, prompt):
        engine = open_buffered(open_engine, path)
        return tokens_of(engine, engine.prefill(prompt), prompt)

    return run


# --- every family


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FAMILIES) if BIG else list(FAMILIES)[::4])
def test_every_family_resumes_bit_by_bit(checkpoint, open_engine, tmp_path, whole, name):
    path = checkpoint(name)
    engine = open_buffered(open_engine, path)
    prompt = random_tokens(engine._shape.vocab, N)
    logits, tokens = whole(path, prompt)
    layers = len(engine.index.layers)
    for layer in range(2, layers) if layers > 2 else ():
        folder = tmp_path / str(layer)
        stopped(engine, folder, prompt, layer)
        again = open_buffered(open_engine, path)
        keep(again, folder, resume=True)
        result = again.prefill(prompt)
        got = tokens_of(again, result, prompt)
        assert np.array_equal(got[0], logits)
        assert got[1] == tokens
        assert result.receipt.resumed_layers == layer - 1
        left = engine.index.layers[layer - 1 :]
        assert result.receipt.bytes_read == sum(part.nbytes for part in left)
        assert files(folder) == []


def test_a_family_that_carries_more_between_layers_is_refused_by_name(
    checkpoint, open_engine, tmp_path
):
    """The last layers read the keys of earlier ones, which no layer returns at the boundary."""
    types = ["sliding_attention", "full_attention"] * 2
    changes = {"num_kv_shared_layers": 2, "layer_types": types}
    path = checkpoint("gemma4_text", changes=changes)
    engine = open_engine(path)
    keep(engine, tmp_path)
    with pytest.raises(CapabilityError, match="gemma4"):
        engine.prefill(random_tokens(160, N))
    assert files(tmp_path) == []
    assert engine.reader.counters.bytes == 0


def test_the_probe_sees_a_cache_that_is_shown_as_it_is_now(checkpoint, open_engine, monkeypatch):
    """Masks made from a finished cache's offset would be too long: what stand-ins are for."""
    engine = open_engine(checkpoint("deepseek_v3"))
    monkeypatch.setattr("mlx_stream.prefill.boundary_probe.stand_in", lambda view, seen: view)
    layers = LayerBoundaries(engine.model, engine._loaded.streamed)
    with layers, pytest.raises(CapabilityError):
        check_boundaries(
            engine.model,
            "deepseek_v3",
            layers,
            [1],
            engine._loaded.slot,
            engine.backend.compute_scope,
            lambda: make_prompt_cache(engine.model),
        )


def test_the_models_layers_are_put_back(checkpoint, open_engine, tmp_path):
    engine = open_engine(checkpoint("qwen3_moe"))
    before = list(engine.model.layers)
    stopped(engine, tmp_path, random_tokens(160, N), 2)
    assert all(a is b for a, b in zip(engine.model.layers, before, strict=True))


# --- killed


def run_killed(tmp_path, job):
    """Run a worker that kills itself; whether it got through before."""
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job))
    command = [sys.executable, "-m", "tests.prefill.resume_worker", str(path)]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode == 0


def random_end(rng, layers):
    if rng.random() < 0.5:
        return {"layer": rng.randrange(1, layers + 1), "delay": rng.random() * 0.03}
    return {"write": rng.randrange(120)}


def check_rest(engine, layers, receipt):
    """Only the layers behind the checkpoint were read."""
    left = layers[receipt.resumed_layers :]
    assert receipt.bytes_read == sum(layer.nbytes for layer in left)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(ROUNDS))
def test_killed_at_a_random_point_the_prefill_goes_on(deep, open_engine, tmp_path, whole, number):
    rng = random.Random(number)
    path = deep[KINDS[number % len(KINDS)]]
    engine = open_buffered(open_engine, path)
    layers = engine.index.layers
    prompt = random_tokens(engine._shape.vocab, N, seed=number)
    folder, kv_dir = tmp_path / "keep", tmp_path / "kv" if rng.random() < 0.4 else None
    job = {"model": str(path), "folder": str(folder), "prompt": prompt, "every": rng.choice([1, 2])}
    job |= {"kv_dir": None if kv_dir is None else str(kv_dir), "throttle": "30MB/s"}
    for attempt in range(rng.choice([1, 1, 2])):
        run_killed(tmp_path, job | random_end(rng, len(layers)) | {"resume": attempt > 0})
    keep(engine, folder, job["every"], resume=True)
    kv = KvOptions() if kv_dir is None else KvOptions(kv_evict="disk", kv_dir=kv_dir)
    result = engine.prefill(prompt, kv=kv)
    check_rest(engine, layers, result.receipt)
    logits, tokens = whole(path, prompt)
    got = tokens_of(engine, result, prompt)
    assert np.array_equal(got[0], logits)
    assert got[1] == tokens
    assert files(folder) == []
    if kv_dir is not None:
        assert files(kv_dir) == ["prompt-kv.safetensors"]


# --- segments, short prompts, quantized caches


@pytest.mark.parametrize("layer", [1, 2, 3])
@pytest.mark.parametrize("segment", [0, 1, 2])
@pytest.mark.parametrize("evict", [False, True])
def test_a_prompt_in_segments_resumes(checkpoint, open_engine, tmp_path, layer, segment, evict):
    engine = open_buffered(open_engine, checkpoint("gpt_oss"))
    prompt = np.array(random_tokens(160, N))
    plan = replace(engine.plan(N), segments=cut_segments(N, 30, 16))
    expected, _ = engine.run_plan(plan, prompt)
    kv = KvOptions(kv_evict="disk", kv_dir=tmp_path / "kv") if evict else KvOptions()
    if evict:
        plan = replace(plan, kv_evict="disk", kv_dir=str(tmp_path / "kv"), kv_stored=1 << 20)

    def progress(state):
        if (state.segment, state.layer) == (segment, layer):
            raise Stop

    keep(engine, tmp_path / "keep")
    with pytest.raises(Stop):
        engine.run_plan(plan, prompt, engine.kv.prepare(None, kv), progress=progress)
    keep(engine, tmp_path / "keep", resume=True)
    cache = engine.kv.prepare(None, kv)
    logits, receipt = engine.run_plan(plan, prompt, cache)
    assert mx.array_equal(logits, expected)
    assert receipt.resumed_layers == segment * 4 + layer - 1
    left = engine.index.nbytes * 3 // 12 * (12 - receipt.resumed_layers)
    assert receipt.bytes_read == left


def test_short_prompts_resume_by_union(checkpoint, open_engine, tmp_path, whole):
    path = checkpoint("qwen3_moe", changes=DEEP)
    prompt = random_tokens(160, 20)
    engine = open_buffered(open_engine, path, union_tokens=512)
    whole_read = engine.prefill(prompt).receipt.bytes_read
    stopped(engine, tmp_path, prompt, 5)
    keep(engine, tmp_path, resume=True)
    result = engine.prefill(prompt)
    assert result.receipt.mode == "union"
    assert result.receipt.resumed_layers == 4
    assert result.receipt.bytes_read < whole_read
    assert tokens_of(engine, result, prompt)[1] == whole(path, prompt)[1]


@pytest.mark.parametrize("evict", ["keep", "quantize"])
def test_a_quantized_cache_resumes(checkpoint, open_engine, tmp_path, evict):
    kv = KvOptions(kv_bits=8, kv_group_size=32, quantized_kv_start=20, kv_evict=evict)
    engine = open_engine(checkpoint("qwen3_moe", changes=DEEP))
    prompt = random_tokens(160, N)
    first = engine.prefill(prompt, kv=kv)
    keep(engine, tmp_path)
    with pytest.raises(Stop):
        engine.prefill(prompt, kv=kv, progress=stop_at(6))
    keep(engine, tmp_path, resume=True)
    again = engine.prefill(prompt, kv=kv)
    assert again.receipt.resumed_layers == 5
    assert mx.array_equal(first.logits, again.logits)
    pairs = zip(cache_arrays(first.cache), cache_arrays(again.cache), strict=True)
    for a, b in pairs:
        rows = min(a.shape[-2], b.shape[-2], N)
        assert mx.array_equal(a[..., :rows, :], b[..., :rows, :])


# --- disks that fail


def failing(monkeypatch, call, number, code):
    """``os.<call>`` fails from its n-th use on."""
    real, left = getattr(os, call), [number]

    def wrapped(*args, **kwargs):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(code, os.strerror(code))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, call, wrapped)


@pytest.mark.parametrize(
    ("call", "number", "code"),
    [
        ("pwrite", 0, errno.ENOSPC),
        ("pwrite", 1, errno.EIO),
        ("pwrite", 9, errno.EIO),
        ("pwrite", 23, errno.ENOSPC),
        ("fsync", 0, errno.EIO),
        ("fsync", 10, errno.ENOSPC),
        ("replace", 0, errno.ENOSPC),
        ("replace", 2, errno.EIO),
        ("replace", 11, errno.ENOSPC),
    ],
)
def test_a_failing_disk_ends_checkpoints_not_the_prefill(
    deep, open_engine, tmp_path, whole, monkeypatch, call, number, code
):
    """The answer was asked for; the last checkpoint before stays good, and nothing else is left."""
    path = deep["qwen3_moe"]
    prompt = random_tokens(160, N)
    expected = whole(path, prompt)
    engine = open_buffered(open_engine, path)
    with monkeypatch.context() as patch:
        failing(patch, call, number, code)
        stopped(engine, tmp_path, prompt, 8)
    left = files(tmp_path)
    assert not [name for name in left if name.startswith(".")]
    kept = set()
    for manifest in (name for name in left if name.startswith("manifest")):
        signed = json.loads((tmp_path / manifest).read_text())
        kept |= {manifest, *json.loads(signed["content"])["files"]}
    assert set(left) == kept
    keep(engine, tmp_path, resume=True)
    result = engine.prefill(prompt)
    check_rest(engine, engine.index.layers, result.receipt)
    assert tokens_of(engine, result, prompt)[1] == expected[1]


def test_the_receipt_says_that_checkpoints_ended(deep, open_engine, tmp_path, monkeypatch):
    engine = open_engine(deep["qwen3_moe"])
    keep(engine, tmp_path)
    failing(monkeypatch, "pwrite", 3, errno.ENOSPC)
    receipt = engine.prefill(random_tokens(160, N)).receipt
    assert any("No space left" in note for note in receipt.notes)
    assert files(tmp_path) == []


def test_a_disk_that_becomes_read_only_takes_no_answer(deep, open_engine, tmp_path, whole):
    """Checkpoints that cannot be removed at the end were an OSError instead of an answer."""
    path, prompt = deep["qwen3_moe"], random_tokens(160, N)
    expected = whole(path, prompt)
    engine = open_buffered(open_engine, path)
    keep(engine, tmp_path / "keep")
    with SystemFaults(CHANGES, tmp_path / "keep", 30, errno.EROFS, lasting=True) as faults:
        result = engine.prefill(prompt)
    assert faults.injected > 1
    assert any("Read-only" in note for note in result.receipt.notes)
    assert tokens_of(engine, result, prompt)[1] == expected[1]


def test_a_folder_that_cannot_be_listed_is_a_typed_error(interrupted, monkeypatch):
    engine, prompt, _ = interrupted

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "iterdir", fail)
    refused(engine, prompt, "Input/output error")


def test_a_link_is_no_lock(deep, open_engine, tmp_path):
    """Taking it would make the file that the link names."""
    engine = open_engine(deep["qwen3_moe"])
    (tmp_path / "keep").mkdir()
    (tmp_path / "keep" / ".lock").symlink_to(tmp_path / "elsewhere")
    keep(engine, tmp_path / "keep")
    refused(engine, random_tokens(160, N), "cannot be used")
    assert not (tmp_path / "elsewhere").exists()


def test_files_of_the_user_in_the_folder_stay(deep, open_engine, tmp_path):
    """Every manifest-*.json was taken for ours, and removed at the end."""
    engine = open_engine(deep["qwen3_moe"])
    stopped(engine, tmp_path, random_tokens(160, N), 3)
    mine = tmp_path / "manifest-web.json"
    mine.write_bytes((tmp_path / "manifest-000001.json").read_bytes())
    keep(engine, tmp_path, resume=True)
    assert engine.prefill(random_tokens(160, N)).receipt.resumed_layers == 2
    assert files(tmp_path) == [mine.name]


def test_no_room_is_said_before_anything_is_read(deep, open_engine, tmp_path, monkeypatch):
    engine = open_engine(deep["qwen3_moe"])
    keep(engine, tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(ResumeError, match="no room"):
        engine.prefill(random_tokens(160, N))
    assert engine.reader.counters.bytes == 0


def test_disk_use_is_bounded(deep, open_engine, tmp_path):
    """Two generations of activations, every cache once."""
    engine = open_engine(deep["qwen3_moe"])
    stopped(engine, tmp_path, random_tokens(160, N), 8)
    names = files(tmp_path)
    assert sum(name.startswith("held") for name in names) == 2
    assert sum(name.startswith("manifest") for name in names) == 2
    assert sum(name.startswith("kv") for name in names) == 7


# --- what does not fit


@pytest.fixture
def interrupted(deep, open_engine, tmp_path):
    """An engine, its prompt, and the folder of an interrupted prefill."""
    engine = open_engine(deep["qwen3_moe"])
    prompt = random_tokens(160, N)
    stopped(engine, tmp_path / "keep", prompt, 6)
    keep(engine, tmp_path / "keep", resume=True)
    return engine, prompt, tmp_path / "keep"


def refused(engine, prompt, *words, **options):
    before = engine.reader.counters.bytes
    with pytest.raises(ResumeError) as caught:
        engine.prefill(prompt, **options)
    for word in words:
        assert word in str(caught.value)
    assert engine.reader.counters.bytes == before


def test_another_prompt_is_refused(interrupted):
    engine, prompt, _ = interrupted
    refused(engine, [*prompt[:-1], (prompt[-1] + 1) % 160], "another prefill", "tokens")
    refused(engine, prompt[:-1], "tokens")


def test_other_options_are_refused(interrupted):
    engine, prompt, _ = interrupted
    kv = KvOptions(kv_bits=8, kv_group_size=32)
    refused(engine, prompt, "caches", kv=kv)
    refused(engine, prompt, "caches", kv=KvOptions(max_kv_size=64))


def test_other_chunks_are_refused(interrupted, deep, open_engine):
    _, prompt, folder = interrupted
    other = open_engine(deep["qwen3_moe"], chunk_tokens=32)
    keep(other, folder, resume=True)
    refused(other, prompt, "chunks", "memory_budget")


def test_another_model_is_refused(interrupted, checkpoint, open_engine):
    _, prompt, folder = interrupted
    for changes, word in (({"seed": 1}, "weights"), ({"bits": 8}, "weights")):
        other = open_engine(checkpoint("qwen3_moe", changes=DEEP, **changes))
        keep(other, folder, resume=True)
        refused(other, prompt, word)


def test_other_boundaries_are_refused(interrupted):
    engine, prompt, folder = interrupted
    keep(engine, folder, every=3, resume=True)
    refused(engine, prompt, "--checkpoint-every")


def test_a_cache_with_tokens_is_refused(interrupted):
    engine, prompt, _ = interrupted
    engine.runner.keep, options = None, engine.runner.keep
    cache = engine.prefill(prompt).cache
    engine.runner.keep = options
    refused(engine, random_tokens(160, 40), "empty cache", cache=cache)


def test_a_checkpoint_is_not_overwritten_unasked(interrupted):
    engine, prompt, folder = interrupted
    before = files(folder)
    keep(engine, folder)
    refused(engine, prompt, "--resume")
    assert files(folder) == before


def test_a_folder_belongs_to_one_process(interrupted):
    engine, prompt, folder = interrupted
    held = CheckpointFolder(folder)
    refused(engine, prompt, "in use")
    held.close()
    engine.prefill(prompt)


@pytest.mark.parametrize("kind", ["kv", "held", "manifest"])
@pytest.mark.parametrize("damage", ["flip", "shorten", "remove", "empty"])
def test_damage_is_refused(interrupted, kind, damage):
    engine, prompt, folder = interrupted
    rng = random.Random(kind + damage)
    target = folder / [name for name in files(folder) if name.startswith(kind)][-1]
    data = bytearray(target.read_bytes())
    if damage == "flip":
        for _ in range(8):
            broken = bytearray(data)
            broken[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            target.write_bytes(broken)
            refused(engine, prompt, "damaged")
        return
    if damage == "remove" and kind == "manifest":
        target.unlink()
        receipt = engine.prefill(prompt).receipt  # the generation before
        assert receipt.resumed_layers == 4
        return
    if damage == "remove":
        target.unlink()
    else:
        target.write_bytes(data[: len(data) // 2 if damage == "shorten" else 0])
    refused(engine, prompt, "damaged")


SIGNED_LIES = {
    "no format": lambda c: c.pop("format"),
    "a segment without end": lambda c: c.update(segment=float("inf")),
    "another segment": lambda c: c.update(segment=7),
    "too few chunks": lambda c: c["held"]["seen"].pop(),
    "nothing seen": lambda c: c["held"].update(seen=[[]] * len(c["held"]["seen"])),
    "a shape that is none": lambda c: c["held"]["seen"][0][0][0].update(
        keys={"shape": [-1], "dtype": "load"}
    ),
    "an array that is not there": lambda c: c["held"]["chunks"][0].__setitem__(0, {"array": 99}),
    "arrays without end": lambda c: c["held"]["chunks"][0].__setitem__(2, 2**60),
    "no form": lambda c: c["held"]["chunks"][0].__setitem__(0, 7),
    "a file that is not ours": lambda c: c["held"].update(files=["../../etc/passwd"]),
    "no caches": lambda c: c.update(caches=[]),
}


def read_checkpoint(engine, folder, entries):
    """As the keeper does it."""
    store = CheckpointFolder(folder)
    try:
        found = Checkpoint.read(store, store.latest()[1], range(8))
        found.require_chunks(engine.plan(N), 8)
        found.require_entries(entries)
    finally:
        store.close()


def test_a_manifest_that_lies_under_a_right_checksum_is_refused(interrupted):
    engine, _, folder = interrupted
    path = max(folder.glob("manifest-*.json"))
    honest = json.loads(path.read_text())["content"]
    entries = set(dict(json.loads(honest)["caches"]))
    read_checkpoint(engine, folder, entries)
    for lie in SIGNED_LIES.values():
        content = json.loads(honest)
        lie(content)
        text = json.dumps(content)
        digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        path.write_text(json.dumps({"content": text, "digest": digest}))
        with pytest.raises(ResumeError, match="checkpoint"):
            read_checkpoint(engine, folder, entries)


def test_resuming_without_a_checkpoint_begins_anew(deep, open_engine, tmp_path):
    engine = open_engine(deep["qwen3_moe"])
    keep(engine, tmp_path / "new", resume=True)
    receipt = engine.prefill(random_tokens(160, N)).receipt
    assert receipt.resumed_layers == 0
    assert any("from the beginning" in note for note in receipt.notes)


def test_user_errors_are_ours(deep, open_engine, tmp_path):
    engine = open_engine(deep["qwen3_moe"])
    (tmp_path / "file").touch()
    keep(engine, tmp_path / "file")
    with pytest.raises(MlxStreamError):
        engine.prefill(random_tokens(160, N))
