"""Damage of every kind: found by verify, by the runtime before anything wrong is said, repaired."""

from __future__ import annotations

import random
import shutil

import numpy as np
import pytest

from mlx_stream.errors import DamagedRecordError, FileChangedError, MlxStreamError, PackError
from mlx_stream.packed.repair import repair
from mlx_stream.packed.verify import verify
from mlx_stream.storage.packed_manifest import read_manifest
from tests.packed.building import SMALL_SHARD, index_of, random_orders
from tests.prefill.running import decode, greedy
from tests.support.checkpoints import random_tokens
from tools.fault_parts_system import READS, SystemFaults


def flip(path, at, bit=0):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ (1 << bit)]))


def record_start(index, layer, expert):
    t = min(layer.tensors, key=lambda t: t.offset)
    return t.file, t.offset + layer.position(expert) * layer.record.nbytes


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_a_flipped_bit_in_any_tensor_of_a_record_is_found_and_repaired(checkpoint, packed, name):
    plain = checkpoint(name)
    folder = packed(plain, orders=random_orders(index_of(plain)))
    index, whole = index_of(folder), contents(folder)
    rng = random.Random(0)
    for layer in index.layers[:2]:
        for t in layer.record.tensors:
            expert = rng.randrange(layer.num_experts)
            file, start = record_start(index, layer, expert)
            path = index.checkpoint.files[file].path
            flip(path, start + t.offset + rng.randrange(t.nbytes), rng.randrange(8))
            (damage,) = verify(folder).damage
            assert (damage.file, damage.part) == (path.name, f"{layer.name} expert {expert}")
            report = repair(folder, plain)
            assert report.repaired == ((path.name, (damage.part,)),)
            assert report.nbytes == layer.record.nbytes
            assert contents(folder) == whole


def test_padding_headers_resident_tensors_and_side_files_are_covered(checkpoint, packed):
    plain = checkpoint("gpt_oss", shard_bytes=300_000)
    folder = packed(plain, shard_nbytes=SMALL_SHARD)
    index, whole = index_of(folder), contents(folder)
    layer = index.layers[0]
    file, start = record_start(index, layer, 2)
    experts = index.checkpoint.files[file].path
    t = next(t for n, t in index.checkpoint.tensors.items() if n not in index.tensor_names)
    resident = index.checkpoint.files[t.file].path
    cases = [
        (experts, start + layer.record.nbytes - 1, f"{layer.name} expert 2"),  # padding
        (experts, 20, "header"),
        (experts, 9000, "header"),  # its spaces
        (resident, t.offset, t.name),
        (resident, 20, "file"),
        (folder / "config.json", 5, "file"),
    ]
    for path, at, part in cases:
        flip(path, at)
        (damage,) = verify(folder).damage
        assert (damage.file, damage.part) == (path.name, part)
        repair(folder, plain)
        assert contents(folder) == whole


@pytest.mark.parametrize("what", ["gone", "cut", "longer"])
def test_files_that_are_gone_or_of_another_size_are_made_again(checkpoint, packed, what):
    plain = checkpoint("qwen3_moe", shard_bytes=300_000)
    folder = packed(plain)
    whole = contents(folder)
    for name in [n for n in whole if n.endswith(".safetensors")] + ["config.json"]:
        path = folder / name
        if what == "gone":
            path.unlink()
        else:
            path.write_bytes(whole[name][:-9] if what == "cut" else whole[name] + b"x")
        assert [d.file for d in verify(folder).damage] == [name]
        repair(folder, plain)
        assert contents(folder) == whole


def test_repair_takes_only_the_checkpoint_that_was_packed(checkpoint, packed, tmp_path):
    plain = checkpoint("qwen3_moe")
    folder = packed(plain)
    index = index_of(folder)
    file, start = record_start(index, index.layers[1], 4)
    flip(index.checkpoint.files[file].path, start + 7)
    with pytest.raises(PackError, match="not the checkpoint"):
        repair(folder, checkpoint("qwen3_moe", dtype="bfloat16"))
    # A source of the same shape whose bytes changed since: nothing is written.
    changed = tmp_path / "changed"
    shutil.copytree(plain, changed)
    source = index_of(changed)
    t = source.layers[1].tensors[0]
    flip(source.checkpoint.files[t.file].path, t.offset + 4 * t.stride)
    before = contents(folder)
    with pytest.raises(PackError, match="other bytes than were packed"):
        repair(folder, changed)
    before.pop(".pack.lock", None)
    assert contents(folder) == before


def test_verify_against_names_what_differs(checkpoint, packed, tmp_path):
    plain = checkpoint("qwen3_moe")
    folder = packed(plain, orders=random_orders(index_of(plain)))
    assert verify(folder, against=plain).sound
    changed = tmp_path / "changed"
    shutil.copytree(plain, changed)
    source = index_of(changed)
    t = source.layers[0].tensors[2]
    flip(source.checkpoint.files[t.file].path, t.offset + 3)
    assert [d.part for d in verify(folder, against=changed).damage] == [t.name]
    assert [d.part for d in verify(changed, against=folder).damage] == [t.name]


# --- while the model runs ---------------------------------------------------------------------


@pytest.fixture
def damaged(checkpoint, packed):
    """A folder in which one expert of every layer has a flipped bit, by layer name."""
    folder = packed(checkpoint("qwen3_moe"))
    index = index_of(folder)
    for layer in index.layers:
        file, start = record_start(index, layer, 3)
        flip(index.checkpoint.files[file].path, start + 1000)
    return folder


@pytest.mark.parametrize("io", ["direct", "buffered"])
@pytest.mark.parametrize("verify", ["first", "always"])
def test_a_prompt_over_damage_fails_with_the_record_named(damaged, open_engine, verify, io):
    engine = open_engine(damaged, verify=verify, io=io)
    for _ in range(2):  # it is not remembered as sound
        with pytest.raises(DamagedRecordError) as caught:
            engine.prefill(random_tokens(engine.model, 40))
        assert caught.value.tensor == f"{index_of(damaged).layers[0].name} expert 3"
        assert caught.value.file.endswith("experts-00001-of-00001.safetensors")
        assert engine.last_receipt is None


def test_off_does_not_look(damaged, open_engine):
    engine = open_engine(damaged, verify="off")
    result = engine.prefill(random_tokens(engine.model, 40))
    assert np.isfinite(np.array(result.logits)).all()


@pytest.mark.parametrize("io", ["direct", "buffered"])
def test_decode_fails_too_and_emits_no_token_of_it(checkpoint, packed, open_engine, io):
    """Records are damaged between prompt and answer, under a reader that has them open."""
    plain = checkpoint("qwen3_moe")
    engine = open_engine(plain, decode_path="exact", predict="off", union_tokens=512)
    prompt = random_tokens(engine.model, 2)
    expected = decode(engine, engine.prefill(prompt), prompt, 8)
    folder = packed(plain)
    engine = open_engine(
        folder, decode_path="exact", predict="off", union_tokens=512, io=io, verify="always"
    )
    result = engine.prefill(prompt)
    engine.decoder.cache.resize(1)
    tokens, got = engine.decode(result, prompt, sampler=greedy), []
    got.append(next(tokens)[0])
    index = index_of(folder)
    for layer in index.layers:
        for expert in range(layer.num_experts):
            file, start = record_start(index, layer, expert)
            flip(index.checkpoint.files[file].path, start + 100)
    with pytest.raises(MlxStreamError) as caught:
        got.extend(token for token, _ in tokens)
    assert got == expected[: len(got)]
    assert len(got) <= 2
    assert isinstance(caught.value, DamagedRecordError | FileChangedError)


def test_first_checks_each_expert_once_and_always_every_time(checkpoint, packed, open_engine):
    from mlx_stream.storage import record_check

    folder = packed(checkpoint("qwen3_moe"))
    experts = sum(x.num_experts for x in index_of(folder).layers)
    counted = []
    original = record_check.digest_parts

    def count(buffer, parts):
        counted.append(1)
        return original(buffer, parts)

    for mode, after in (("off", [0, 0]), ("first", [experts, 0]), ("always", [experts, experts])):
        engine = open_engine(folder, verify=mode)
        prompt = random_tokens(engine.model, 60)
        record_check.digest_parts = count
        try:
            found = []
            for _ in range(2):
                counted.clear()
                engine.prefill(prompt)
                found.append(len(counted))
        finally:
            record_check.digest_parts = original
        assert found == after


def test_a_plain_checkpoint_is_verified_by_what_the_hub_recorded(checkpoint, tmp_path):
    import hashlib

    plain = checkpoint("qwen3_moe")
    folder = tmp_path / "snapshots" / "abc"
    blobs = tmp_path / "blobs"
    folder.mkdir(parents=True)
    blobs.mkdir()
    for path in plain.iterdir():
        data = path.read_bytes()
        name = (
            hashlib.sha256(data).hexdigest()
            if path.suffix == ".safetensors"
            else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        )
        (blobs / name).write_bytes(data)
        (folder / path.name).symlink_to(f"../../blobs/{name}")
    report = verify(folder)
    assert report.sound
    assert f"hashes of {len(list(plain.iterdir()))} files" in report.checked[1]
    shard = (folder / "model.safetensors").resolve()
    flip(shard, shard.stat().st_size - 5)
    assert [d.file for d in verify(folder).damage] == ["model.safetensors"]


def test_a_folder_download_is_verified_too(checkpoint, tmp_path):
    import hashlib

    folder = tmp_path / "model"
    shutil.copytree(checkpoint("qwen3_moe"), folder)
    data = (folder / "model.safetensors").read_bytes()
    record = folder / ".cache/huggingface/download/model.safetensors.metadata"
    record.parent.mkdir(parents=True)
    record.write_text(f"{'a' * 40}\n{hashlib.sha256(data).hexdigest()}\n1.5\n")
    assert verify(folder).sound
    flip(folder / "model.safetensors", len(data) - 1)
    assert not verify(folder).sound


@pytest.mark.parametrize("act", ["verify", "repair"])
def test_reads_that_fail_are_reported(checkpoint, packed, tmp_path, act):
    """A header that could not be read was a traceback of verify."""
    plain = checkpoint("qwen3_moe")
    folder = packed(plain)
    with SystemFaults(READS, folder) as count:
        verify(folder) if act == "verify" else repair(folder, plain)
    for number in range(count.uses):
        with SystemFaults(READS, folder, number) as faults:
            try:
                noticed = not verify(folder).sound if act == "verify" else repair(folder, plain)
            except MlxStreamError:
                noticed = True
        assert faults.injected == 1
        assert noticed
    assert repair(folder, plain).repaired == ()


def test_a_damaged_manifest_is_never_a_traceback(checkpoint, packed):
    folder = packed(checkpoint("qwen3_moe"))
    path = folder / "packed.json"
    raw = path.read_bytes()
    refused = 0
    for at in range(0, len(raw), 97):
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 0x55]) + raw[at + 1 :])
        try:
            read_manifest(folder)
            index_of(folder)
        except MlxStreamError:
            refused += 1
    assert refused > 30
