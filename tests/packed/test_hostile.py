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

from mlx_stream.errors import CheckpointError, MlxStreamError, PackedLayoutError
from mlx_stream.packed.verify import verify
from mlx_stream.storage.packed_manifest import MANIFEST_NAME, MAX_MANIFEST_NBYTES, parse_manifest
from mlx_stream.storage.read_plan import plan_group
from tests.packed.building import index_of

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
    from tests.packed.building import pack_checkpoint

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


def test_nesting_is_no_recursion_error(honest):
    folder, _ = honest
    (folder / MANIFEST_NAME).write_text("[" * 200_000)
    with pytest.raises(CheckpointError):
        open_whole(folder)
