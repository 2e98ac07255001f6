"""Manifests that lie: an error that names what is wrong, never a traceback, a hang or a read."""

from __future__ import annotations

import copy
import json
import os
import struct
from contextlib import suppress

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_stream.errors import CheckpointError, MlxStreamError, PackedLayoutError, PackError
from mlx_stream.packed.repair import repair
from mlx_stream.packed.verify import verify
from mlx_stream.storage.packed_manifest import (
    JOURNAL_NAME,
    MANIFEST_NAME,
    MAX_MANIFEST_NBYTES,
    parse_manifest,
)
from mlx_stream.storage.read_plan import plan_group
from tests.packed.building import index_of, pack_checkpoint

CASES = int(os.environ.get("MLX_STREAM_FUZZ", "300"))
FUZZ = settings(
    max_examples=CASES, deadline=None, suppress_health_check=list(HealthCheck), database=None
)
JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.sampled_from([0, 1, 63, 64, 16383, 16384, 16385, 2**31, 2**62, 2**63]),
    st.text(max_size=20),
    st.sampled_from(["..", "../x", "/etc/passwd", "experts-00001-of-00001.safetensors\0", "U32"]),
    st.lists(st.integers(0, 9), max_size=9),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@pytest.fixture(scope="module")
def honest(checkpoint, tmp_path_factory):
    """A packed folder, rewritten at will by the tests of this module; and its true manifest."""
    folder = tmp_path_factory.mktemp("hostile") / "packed"
    pack_checkpoint(checkpoint("gpt_oss"), folder)
    return folder, json.loads((folder / MANIFEST_NAME).read_text())


def places(value, path=()):
    """Every place in a nested value."""
    yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, key))


def put(value, path, new):
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = new


def open_whole(folder):
    """What a user's command does with a folder before it reads weights."""
    index = index_of(folder)
    sizes = [f.size for f in index.checkpoint.files]
    for layer in index.layers:
        for align in (1, 512):
            read = plan_group(layer, range(layer.num_experts), align=align, file_sizes=sizes)
            for op in read.ops:
                assert 0 <= op.offset < sizes[op.file]
                if align == 1:
                    assert op.offset + op.nbytes <= sizes[op.file]


@FUZZ
@given(data=st.data())
def test_any_change_is_harmless_or_refused(honest, data):
    folder, manifest = honest
    changed = copy.deepcopy(manifest)
    for _ in range(data.draw(st.integers(1, 3))):
        every = [p for p in places(changed) if p]
        # Few places are about layout, most are checksums: take both alike.
        few = [p for p in every if "checksums" not in p and "tensors" not in p[-2:-1]]
        path = data.draw(st.sampled_from(data.draw(st.sampled_from([every, few]))))
        put(changed, path, data.draw(JUNK))
    (folder / MANIFEST_NAME).write_text(json.dumps(changed))
    with suppress(MlxStreamError):
        open_whole(folder)


@FUZZ
@given(raw=st.one_of(st.binary(max_size=400), st.text(max_size=200).map(str.encode)))
def test_any_bytes_are_refused(honest, raw):
    folder, _ = honest
    (folder / MANIFEST_NAME).write_bytes(raw)
    with pytest.raises(CheckpointError):
        open_whole(folder)


@FUZZ
@given(
    value=st.recursive(
        JUNK,
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(["layers", "files", "others", "source", "name", "size"]), inner
            )
        ),
    )
)
def test_any_object_is_refused(tmp_path_factory, value):
    found = {"format": "mlx_stream.packed", "version": 1, "checksum": "xxh3-64"}
    if isinstance(value, dict):
        found |= value
    with pytest.raises(PackedLayoutError):
        parse_manifest(found | {"files": value}, tmp_path_factory.getbasetemp())


LIES = {
    "another version": (("version",), 2),
    "a path in an expert file": (("layers", 0, "file"), "../experts-00001-of-00001.safetensors"),
    "a path in a file": (("files", 0, "name"), "../../model.safetensors"),
    "an absolute path": (("files", 0, "name"), "/etc/passwd"),
    "a path in another file": (("others", 0, "name"), "../config.json"),
    "a nul": (("others", 0, "name"), "config\0.json"),
    "too many experts": (("layers", 0, "num_experts"), 2**40),
    "a huge record": (("layers", 0, "record_nbytes"), 2**61),
    "an odd record": (("layers", 0, "record_nbytes"), 16385),
    "a tensor past the record": (("layers", 0, "tensors", -1, "offset"), 2**40),
    "tensors over each other": (("layers", 0, "tensors", 1, "offset"), 0),
    "a tensor of another layer": (("layers", 0, "tensors", 0, "name"), "lm_head.weight"),
    "a shape that is none": (("layers", 0, "tensors", 0, "shape"), [2**40, 2**40]),
    "a dtype that is none": (("layers", 0, "tensors", 0, "dtype"), "F7"),
    "an order with holes": (("layers", 0, "order"), [0, 1, 2, 3, 4, 5, 6, 6]),
    "too few checksums": (("layers", 0, "checksums"), ["0" * 16] * 7),
    "a checksum that is none": (("layers", 0, "checksums", 0), "xyz"),
    "a record tensor that is not there": (("layers", 0, "tensor"), "nothing"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lies_are_named(honest, lie):
    folder, manifest = honest
    changed = copy.deepcopy(manifest)
    put(changed, *LIES[lie])
    (folder / MANIFEST_NAME).write_text(json.dumps(changed))
    with pytest.raises(CheckpointError) as caught:
        open_whole(folder)
    assert caught.value.file is not None
    assert caught.value.expected is not None
    assert caught.value.remedy


def test_a_layer_is_missing_or_there_twice(honest):
    folder, manifest = honest
    for layers in (manifest["layers"][1:], manifest["layers"] + manifest["layers"][:1]):
        (folder / MANIFEST_NAME).write_text(json.dumps(manifest | {"layers": layers}))
        with pytest.raises(CheckpointError):
            open_whole(folder)


def test_links_out_of_the_folder_are_refused(checkpoint, packed, tmp_path):
    folder = packed(checkpoint("qwen3_moe"))
    name = "experts-00001-of-00001.safetensors"
    outside = tmp_path / "elsewhere.safetensors"
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    with pytest.raises(PackedLayoutError, match="leads out"):
        index_of(folder)
    assert not verify(folder).sound
    (folder / name).unlink()
    outside.rename(folder / "inside.safetensors")
    (folder / name).symlink_to("inside.safetensors")
    assert index_of(folder)


def test_a_snapshot_of_the_hubs_cache_may_lead_to_its_blobs(checkpoint, packed, tmp_path):
    made = packed(checkpoint("qwen3_moe"))
    snapshot, blobs = tmp_path / "hub/snapshots/rev", tmp_path / "hub/blobs"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for n, path in enumerate(made.iterdir()):
        path.rename(blobs / str(n))
        (snapshot / path.name).symlink_to(f"../../blobs/{n}")
    assert index_of(snapshot).layers[0].record is not None


def test_a_manifest_bomb_is_not_read(checkpoint, packed):
    folder = packed(checkpoint("qwen3_moe"))
    with open(folder / MANIFEST_NAME, "wb") as file:
        file.truncate(MAX_MANIFEST_NBYTES + 1)  # sparse
    with pytest.raises(PackedLayoutError, match="too large"):
        index_of(folder)


def test_a_header_bomb_in_an_expert_file_is_refused(checkpoint, packed):
    folder = packed(checkpoint("qwen3_moe"))
    path = folder / "experts-00001-of-00001.safetensors"
    with open(path, "r+b") as file:
        file.write(struct.pack("<Q", 2**60))
    with pytest.raises(CheckpointError):
        index_of(folder)
    assert not verify(folder).sound


def test_nothing_is_written_through_a_link(checkpoint, packed, tmp_path):
    """Repairing config.json once wrote into whatever `.config.json.partial` led to."""
    folder = packed(checkpoint("qwen3_moe"))
    outside = tmp_path / "mine"
    outside.write_text("the user's own")
    (folder / "config.json").unlink()
    (folder / ".config.json.partial").symlink_to(outside)
    repair(folder, checkpoint("qwen3_moe"))
    assert outside.read_text() == "the user's own"
    assert verify(folder).sound


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("layers", 0, "record_nbytes"), 2**40),
        (("layers", 0, "num_experts"), 9),
        (("files", -1, "name"), "model-other.safetensors"),
        (("files", 0, "size"), 2**40),
    ],
)
def test_lies_about_sizes_are_damage_and_no_reason_to_write(checkpoint, packed, where, value):
    """They were a ValueError of the reader, and a KeyError of repair."""
    folder = packed(checkpoint("qwen3_moe"))
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    put(manifest, where, value)
    if where[-1] == "num_experts":
        manifest["layers"][0]["checksums"].append("0" * 16)
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))
    before = {p.name: p.stat().st_mtime_ns for p in folder.glob("*.safetensors")}
    assert not verify(folder).sound
    with pytest.raises(PackError):
        repair(folder, checkpoint("qwen3_moe"))
    assert {p.name: p.stat().st_mtime_ns for p in folder.glob("*.safetensors")} == before


@pytest.mark.parametrize("kind", ["files", "others"])
def test_a_file_of_any_size_is_not_read_into_memory(checkpoint, packed, kind):
    """A manifest and a sparse file that agree on a terabyte."""
    folder = packed(checkpoint("qwen3_moe"))
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    entry = manifest[kind][-1]
    entry |= {"size": 2**40} | ({"header_nbytes": 2**40} if kind == "files" else {})
    os.truncate(folder / entry["name"], 2**40)
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))
    assert [d.file for d in verify(folder).damage] == [entry["name"]]


def test_bytes_behind_the_last_tensor_are_damage(checkpoint, packed):
    """A file and a manifest that agree on bytes which no checksum covers."""
    folder = packed(checkpoint("qwen3_moe"))
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    entry = manifest["files"][-1]
    with open(folder / entry["name"], "ab") as file:
        file.write(b"more")
    entry["size"] += 4
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))
    assert [d.file for d in verify(folder).damage] == [entry["name"]]


def test_a_pipe_and_a_name_that_cannot_be_are_damage(checkpoint, packed):
    """The pipe would be waited for without end."""
    folder = packed(checkpoint("qwen3_moe"))
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    os.mkfifo(folder / "pipe.json")
    entry = {"size": 0, "digest": "0" * 16}
    manifest["others"] += [entry | {"name": "pipe.json"}, entry | {"name": "\ud800"}]
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))
    assert [d.file for d in verify(folder).damage] == ["pipe.json", "\ud800"]


def test_a_journal_bomb_is_not_read(checkpoint, tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    with open(target / JOURNAL_NAME, "wb") as file:
        file.truncate(2**40)
    with pytest.raises(PackError, match="not finished"):
        pack_checkpoint(checkpoint("qwen3_moe"), target)
    pack_checkpoint(checkpoint("qwen3_moe"), target, force=True)
    assert verify(target).sound


def test_nesting_is_no_recursion_error(honest):
    folder, _ = honest
    (folder / MANIFEST_NAME).write_text("[" * 200_000)
    with pytest.raises(CheckpointError):
        open_whole(folder)
