"""Headers and folders: what is refused, with which error, and that nothing else ever escapes."""

from __future__ import annotations

import json
import math
import os
from itertools import pairwise

import numpy as np
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from mlx_stream.errors import (
    CheckpointError,
    HeaderError,
    MissingTensorError,
    TruncatedFileError,
)
from mlx_stream.storage.checkpoint import FileIdentity, open_checkpoint, parse_header
from mlx_stream.storage.safetensors_header import DTYPE_BITS, MAX_HEADER_NBYTES

from .builders import (
    FAST,
    bf16_glu,
    entry,
    file_bytes,
    random_tensor,
    write_checkpoint,
    write_shard,
)

U8 = entry("U8", [4], 0, 4)
DEEP = b'{"a":' * 200_000  # more nesting than any recursion limit


def parse(raw: bytes, size: int | None = None):
    return parse_header(raw, len(raw) if size is None else size, "model.safetensors")


def with_entry(**changes: object) -> bytes:
    return file_bytes({"a": {**U8, **changes}}, b"1234")


def test_valid_header_gives_absolute_offsets():
    raw = file_bytes({"b": entry("F32", [2, 1], 4, 12), "a": U8, "__metadata__": {}}, b"x" * 12)
    first, second = parse(raw)
    start = len(raw) - 12
    assert (first.name, first.offset, first.nbytes, first.shape) == ("a", start, 4, (4,))
    assert (second.name, second.offset, second.nbytes) == ("b", start + 4, 8)


BAD_HEADERS = {
    "empty file": b"",
    "seven bytes": b"\x02\0\0\0\0\0\0",
    "length zero": file_bytes(b"", b"{}", length=0),
    "longer than the file": file_bytes({"a": U8}, b"1234", length=10_000),
    "length bomb": file_bytes({}, length=2**63),
    "not JSON": file_bytes(b"not json at all"),
    "not UTF-8": file_bytes(b'{"\xff": 1}'),
    "not an object": file_bytes(b"[1, 2]"),
    "cut JSON": file_bytes(b'{"a": {"dtype": "U8", "shape"'),
    "NaN": file_bytes(b'{"a": NaN}'),
    "nested too deep": file_bytes(DEEP),
    "number too long": file_bytes(b'{"a": ' + b"9" * 10_000 + b"}"),
    "duplicate tensor": file_bytes(
        b'{"a": %s, "a": %s}' % ((json.dumps(U8).encode(),) * 2), b"1234"
    ),
    "duplicate field": file_bytes(
        b'{"a": {"dtype":"U8","dtype":"I8","shape":[],"data_offsets":[0,1]}}'
    ),
    "entry not an object": file_bytes({"a": 3}),
    "no dtype": file_bytes({"a": {"shape": [4], "data_offsets": [0, 4]}}, b"1234"),
    "unknown dtype": with_entry(dtype="U128"),
    "dtype not text": with_entry(dtype=["U8"]),
    "wrong dtype": with_entry(dtype="F32"),
    "negative shape": with_entry(shape=[-4]),
    "two negatives": with_entry(shape=[-2, -2]),
    "fractional shape": with_entry(shape=[4.0]),
    "boolean shape": with_entry(shape=[True, 4]),
    "shape not a list": with_entry(shape="4"),
    "huge shape": with_entry(shape=[2**62, 2**62]),
    "too huge shape": with_entry(shape=[2**70]),
    "shape wraps to 4": with_entry(shape=[2**32, 2**32, 4]),
    "too many axes": with_entry(shape=[4] + [1] * 100),
    "shape too small": with_entry(shape=[3]),
    "negative offset": with_entry(data_offsets=[-4, 0]),
    "offsets reversed": with_entry(data_offsets=[4, 0]),
    "three offsets": with_entry(data_offsets=[0, 2, 4]),
    "overlap": file_bytes({"a": U8, "b": entry("U8", [4], 3, 7)}, b"1234567"),
    "same bytes": file_bytes({"a": U8, "b": U8}, b"1234"),
}


@pytest.mark.parametrize("raw", BAD_HEADERS.values(), ids=BAD_HEADERS.keys())
def test_bad_header_is_a_header_error(raw):
    with pytest.raises(HeaderError) as caught:
        parse(raw)
    error = caught.value
    assert error.file == "model.safetensors"
    assert error.expected is not None
    assert error.actual is not None
    assert error.remedy
    assert len(str(error)) < 2000


def test_header_bound_is_checked_before_the_header_is_read():
    raw = (MAX_HEADER_NBYTES + 1).to_bytes(8, "little")
    with pytest.raises(HeaderError, match="length"):
        parse_header(raw, 1 << 40, "f")


def test_header_not_read_whole():
    with pytest.raises(HeaderError, match="not read whole"):
        parse(file_bytes({"a": U8})[:-3], 1000)


@pytest.mark.parametrize("end", [5, 2**40, 2**63 - 1])
def test_tensor_past_the_end_is_truncation(end):
    raw = file_bytes({"a": entry("U8", [end], 0, end)}, b"1234")
    with pytest.raises(TruncatedFileError) as caught:
        parse(raw)
    assert str(len(raw)) in caught.value.actual
    assert str(len(raw) - 4 + end) in caught.value.expected
    assert caught.value.tensor == "a"


def test_empty_tensors_are_no_overlap():
    raw = file_bytes(
        {"a": entry("U8", [0], 2, 2), "b": U8, "c": entry("F32", [3, 0], 4, 4)}, b"1234"
    )
    assert {t.name for t in parse(raw)} == {"a", "b", "c"}


# --- fuzz -----------------------------------------------------------------------------------


def check_outcome(raw: bytes, size: int) -> None:
    try:
        tensors = parse(raw, size)
    except CheckpointError:
        return
    taken = sorted((t.offset, t.offset + t.nbytes) for t in tensors if t.nbytes)
    assert all(end <= size for _, end in taken)
    assert all(a[1] <= b[0] for a, b in pairwise(taken))
    for t in tensors:
        assert t.nbytes * 8 == math.prod(t.shape) * DTYPE_BITS[t.dtype]


@FAST
@given(st.binary(max_size=300), st.integers(0, 400))
def test_fuzz_bytes(raw, size):
    check_outcome(raw, size)
    check_outcome(file_bytes(raw), size)
    check_outcome(file_bytes(raw), 8 + len(raw) + size)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)
SMALL = st.integers(-1, 9)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*DTYPE_BITS, "X", None]) | JSON,
        "shape": st.lists(SMALL, max_size=3) | JSON,
        "data_offsets": st.tuples(SMALL, SMALL) | JSON,
    }
)


@FAST
@given(st.dictionaries(st.text(max_size=4), ENTRY | JSON, max_size=4), st.integers(-5, 40))
def test_fuzz_structure(header, extra):
    raw = file_bytes(header)
    check_outcome(raw, max(0, len(raw) + extra))


@FAST
@given(st.data())
def test_fuzz_one_changed_byte(data):
    raw = bytearray(file_bytes({"a": entry("F32", [2, 2], 0, 16), "b": entry("U8", [3], 16, 19)}))
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    check_outcome(bytes(raw), len(raw) + 19)


ARRAYS = st.dictionaries(
    st.text(st.characters(codec="utf-8"), max_size=6).filter(lambda n: n != "__metadata__"),
    st.tuples(
        st.sampled_from([np.uint8, np.float16, np.float32, np.int64]),
        st.lists(st.integers(0, 5), max_size=3),
    ),
    max_size=5,
)


@FAST
@given(ARRAYS)
def test_same_tensors_as_the_safetensors_library(wanted):
    rng = np.random.default_rng(0)
    arrays = {n: np.array(rng.random(shape) * 100, dt) for n, (dt, shape) in wanted.items()}
    raw = safetensors.numpy.save(arrays)
    theirs = dict(safetensors.deserialize(raw))
    ours = {t.name: t for t in parse(raw)}
    assert ours.keys() == theirs.keys()
    for name, t in ours.items():
        assert (t.dtype, list(t.shape)) == (theirs[name]["dtype"], theirs[name]["shape"])
        assert raw[t.offset : t.offset + t.nbytes] == bytes(theirs[name]["data"])


# --- folders --------------------------------------------------------------------------------


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def sharded(tmp_path):
    """Two shards: a in the first, b in the second."""
    return write_checkpoint(
        tmp_path / "model",
        {"model_type": "x"},
        {"a": random_tensor("U8", 5)},
        {"b": random_tensor("F32", 2, 3)},
    )


SHARD = "model-{:05}-of-00002.safetensors"


def test_shards_without_index(sharded):
    checkpoint = open_checkpoint(str(sharded))
    assert [f.path.name for f in checkpoint.files] == [SHARD.format(1), SHARD.format(2)]
    assert checkpoint.tensors["b"].file == 1
    assert checkpoint.tensor_bytes == 5 + 24
    assert checkpoint.config == {"model_type": "x"}


def test_good_index(sharded):
    write_index(sharded, {"a": SHARD.format(1), "b": SHARD.format(2)})
    assert set(open_checkpoint(sharded).tensors) == {"a", "b"}


@pytest.mark.parametrize(
    "weight_map",
    [
        {"a": SHARD.format(1), "c": SHARD.format(2)},
        {"a": SHARD.format(2)},
        {"a": "model-00003-of-00003.safetensors"},
        {"a": "weights.npz"},
    ],
    ids=["no such tensor", "wrong shard", "no such shard", "not a shard"],
)
def test_index_that_does_not_match(sharded, weight_map):
    write_index(sharded, weight_map)
    with pytest.raises(MissingTensorError) as caught:
        open_checkpoint(sharded)
    assert caught.value.tensor in ("a", "c")
    assert list(weight_map.values())[-1] in caught.value.file


@pytest.mark.parametrize(
    "name",
    [
        "../other.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..",
        ".",
        "",
        "a\\b",
        "a\0b",
        7,
        None,
    ],
)
def test_index_with_escaping_names(sharded, name):
    write_index(sharded, {"a": name})
    with pytest.raises(CheckpointError, match="outside"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": 1'])
def test_broken_index(sharded, text):
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError):
        open_checkpoint(sharded)


def test_tensor_in_two_shards(sharded):
    write_shard(sharded / SHARD.format(2), {"a": random_tensor("U8", 5)})
    with pytest.raises(HeaderError, match="two files") as caught:
        open_checkpoint(sharded)
    assert caught.value.tensor == "a"


def test_truncated_shard(sharded):
    path = sharded / SHARD.format(2)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(TruncatedFileError) as caught:
        open_checkpoint(sharded)
    assert caught.value.file == str(path)
    assert caught.value.tensor == "b"


def test_hub_cache_of_symlinks(sharded, tmp_path):
    cache = tmp_path / "snapshot"
    cache.mkdir()
    for f in sharded.iterdir():
        (cache / f.name).symlink_to(f)
    assert set(open_checkpoint(cache).tensors) == {"a", "b"}
    (sharded / SHARD.format(2)).unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_checkpoint(cache)


@pytest.mark.parametrize("text", [None, "", "[]", '{"a":', "[" * 100_000])
def test_broken_config(tmp_path, text):
    folder = write_checkpoint(tmp_path, {}, bf16_glu("l.0"))
    if text is None:
        (folder / "config.json").unlink()
    else:
        (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(folder)


def test_folders_without_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "other.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="no weights"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="not a folder"):
        open_checkpoint(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match="not a folder"):
        open_checkpoint(tmp_path / "nowhere")


def test_shard_that_is_not_a_file(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    os.mkfifo(tmp_path / "model.safetensors")  # would block an open for ever
    with pytest.raises(CheckpointError, match="cannot be read"):
        open_checkpoint(tmp_path)


def test_identity_sees_every_kind_of_change(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"12")
    identity = FileIdentity.of(path, os.stat(path))
    assert identity.matches(os.stat(path))
    os.utime(path, ns=(0, identity.mtime_ns + 1))
    assert not identity.matches(os.stat(path))
    os.utime(path, ns=(0, identity.mtime_ns))
    assert identity.matches(os.stat(path))
    (tmp_path / "g").write_bytes(b"12")
    os.utime(tmp_path / "g", ns=(0, identity.mtime_ns))
    os.replace(tmp_path / "g", path)
    assert not identity.matches(os.stat(path))
