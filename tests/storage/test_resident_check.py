"""Resident tensors of a packed folder: every byte counts before the model says anything."""

import json
import random

import pytest

from mlx_stream.errors import CheckpointError, DamagedRecordError, ReadError
from mlx_stream.storage.checkpoint import open_checkpoint
from mlx_stream.storage.packed_manifest import MANIFEST_NAME
from mlx_stream.storage.resident_check import check_resident
from tests.packed.building import pack_checkpoint
from tools.fault_parts_flips import flip, resident_byte
from tools.fault_parts_system import READS, SystemFaults


@pytest.fixture
def folder(checkpoint, tmp_path):
    pack_checkpoint(checkpoint("qwen3_moe", shard_bytes=300_000), tmp_path / "packed")
    return tmp_path / "packed"


def test_a_sound_folder_is_read_once(folder):
    files = sorted(folder.glob("model*.safetensors"))
    assert len(files) > 1
    assert check_resident(open_checkpoint(folder)) == sum(f.stat().st_size for f in files)


def test_a_plain_checkpoint_has_no_checksums(checkpoint):
    assert check_resident(open_checkpoint(checkpoint("qwen3_moe"))) == 0


def test_any_flipped_bit_names_its_tensor(folder):
    found = open_checkpoint(folder)
    rng = random.Random(0)
    for _ in range(20):
        path, at = resident_byte(folder, rng)
        whole = path.read_bytes()
        flip(path, at, rng.randrange(8))
        with pytest.raises(DamagedRecordError) as caught:
            check_resident(found)
        t = found.tensors[caught.value.tensor]
        assert found.files[t.file].path == path
        assert t.offset <= at < t.offset + t.nbytes
        path.write_bytes(whole)
    check_resident(found)


def test_a_damaged_header_a_cut_file_and_a_checksum_that_is_missing(folder):
    found = open_checkpoint(folder)
    path = min(folder.glob("model*.safetensors"))
    whole = path.read_bytes()
    flip(path, 30, 1)
    with pytest.raises(DamagedRecordError, match="header"):
        check_resident(found)
    path.write_bytes(whole[:-1])
    with pytest.raises(DamagedRecordError, match="bytes"):
        check_resident(found)
    path.write_bytes(whole)
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    entry = next(f for f in manifest["files"] if f["name"] == path.name)
    name = next(iter(entry["tensors"]))
    del entry["tensors"][name]
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))
    with pytest.raises(DamagedRecordError) as caught:
        check_resident(open_checkpoint(folder))
    assert caught.value.tensor == name


def test_every_read_that_fails_is_a_typed_error(folder):
    found = open_checkpoint(folder)
    with SystemFaults(READS, folder) as count:
        check_resident(found)
    assert count.uses > 20
    for number in range(count.uses):
        for short in (None, 0.0):
            with SystemFaults(READS, folder, number, short=short):  # noqa: SIM117
                with pytest.raises((ReadError, CheckpointError)):
                    check_resident(found)


def test_the_engine_refuses_damage_unless_told_otherwise(folder, open_engine):
    path, at = resident_byte(folder, random.Random(1))
    flip(path, at, 3)
    with pytest.raises(DamagedRecordError, match="Resident"):
        open_engine(folder)
    open_engine(folder, verify="off")
