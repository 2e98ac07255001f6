"""The heads: published names and shapes load, others are refused, logits are right."""

import struct
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_stream.errors import (
    CheckpointError,
    HeaderError,
    MissingTensorError,
    PrerouterError,
    TensorFormatError,
    TruncatedFileError,
)
from mlx_stream.prerouter.head_file import open_heads
from mlx_stream.prerouter.heads import Heads
from mlx_stream.prerouter.spec import EDGE0_8B, EDGE0_35B
from tests.prerouter.making import HEADS, NESTED, PLAIN, numpy_logits, random_heads, save_heads

# (form, hidden, experts, width of fc1, experts a token): the published sizes, of a few layers.
SIZES = {
    "35b": (EDGE0_35B, 2048, 256, 512, 4),
    "8b": (EDGE0_8B, 1536, 128, 512, 8),
}


def few(which, heads=3):
    """The published spec of the last few layers."""
    spec, *sizes = SIZES[which]
    owners, consumers = spec.owners[-heads:], spec.consumers[-heads:]
    consumers = tuple(n for n in consumers if n - 1 in owners)
    return replace(spec, owners=owners, consumers=consumers), *sizes


def small(**changes):
    return replace(EDGE0_35B, owners=(6, 7), consumers=(7, 8), **changes)


@pytest.mark.parametrize("names", [PLAIN, NESTED])
@pytest.mark.parametrize("which", SIZES)
def test_published_heads_load_and_their_logits_are_right(tmp_path, which, names):
    spec, hidden, experts, width, top_k = few(which)
    arrays = random_heads(spec, hidden, experts, width=width)
    assert arrays[spec.owners[0], "fc1"].shape == (512, 2560 if which == "35b" else 1792)
    assert arrays[spec.owners[0], "fc2"].shape == (experts, 512)
    save_heads(tmp_path / HEADS, arrays, names)
    file = open_heads(tmp_path / HEADS, spec, hidden=hidden, experts=experts)
    assert (file.inputs, file.width) == (hidden + 2 * experts, 512)
    heads = Heads.load(file, spec.active_owners, mx.float32)
    rng, count = np.random.default_rng(1), len(spec.active_owners)
    x = rng.standard_normal((count, hidden), np.float32)
    now, before = (
        np.stack([rng.choice(experts, top_k, replace=False) for _ in range(count)])
        for _ in range(2)
    )
    found = np.array(heads.logits(mx.array(x), mx.array(now), mx.array(before)))
    fresh = np.array(heads.logits(mx.array(x), mx.array(now), None))
    for n, owner in enumerate(spec.active_owners):
        expected = numpy_logits(arrays, owner, x[n], now[n], before[n])
        np.testing.assert_allclose(found[n], expected, rtol=0, atol=1e-5)
        expected = numpy_logits(arrays, owner, x[n], now[n], [])
        np.testing.assert_allclose(fresh[n], expected, rtol=0, atol=1e-5)


def test_float16_is_computed_in_float16(tmp_path):
    spec = small()
    arrays = random_heads(spec, 64, 8)
    save_heads(tmp_path / HEADS, arrays)
    file = open_heads(tmp_path / HEADS, spec, hidden=64, experts=8)
    heads = Heads.load(file, spec.active_owners, mx.float16)
    assert heads.nbytes == Heads.planned_nbytes(file, 2, mx.float16)
    x = np.random.default_rng(1).standard_normal((2, 64), np.float32)
    found = heads.logits(mx.array(x), mx.array([[1, 2]] * 2), None)
    assert found.dtype == mx.float32
    for n, owner in enumerate(spec.owners):
        expected = numpy_logits(arrays, owner, x[n], [1, 2], [])
        np.testing.assert_allclose(np.array(found[n]), expected, atol=0.02)


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_stored_dtypes(tmp_path, dtype):
    spec = small()
    arrays = random_heads(spec, 64, 8, dtype=np.float32)
    stored = {k: mx.array(a).astype(getattr(mx, dtype)) for k, a in arrays.items()}
    save_heads(tmp_path / HEADS, stored)
    file = open_heads(tmp_path / HEADS, spec, hidden=64, experts=8)
    for owner, part, values in file.read(spec.owners):
        expected = np.array(stored[owner, part].astype(mx.float32))
        np.testing.assert_array_equal(values, expected)


def test_a_missing_linear_init_is_zeros_or_an_error(tmp_path):
    arrays = random_heads(small(), 64, 8, linear=False)
    save_heads(tmp_path / HEADS, arrays)
    with pytest.raises(MissingTensorError, match="linear_init"):
        open_heads(tmp_path / HEADS, small(), hidden=64, experts=8)
    spec = small(missing_linear_init="zeros")
    heads = Heads.load(
        open_heads(tmp_path / HEADS, spec, hidden=64, experts=8), spec.owners, mx.float32
    )
    x = np.ones((2, 64), np.float32)
    found = np.array(heads.logits(mx.array(x), mx.array([[0, 3]] * 2), mx.array([[1, 2]] * 2)))
    np.testing.assert_allclose(found[1], numpy_logits(arrays, 7, x[1], [0, 3], [1, 2]), atol=1e-5)


def drop(key):
    return lambda a: a.pop(key)


def swap(key, shape, dtype=np.float16):
    return lambda a: a.update({key: np.zeros(shape, dtype)})


@pytest.mark.parametrize(
    ("change", "kind", "word"),
    [
        (drop((7, "fc1")), MissingTensorError, "layers.7.fc1"),
        (drop((6, "fc2")), MissingTensorError, "layers.6.fc2"),
        (swap((7, "fc1"), (16, 79)), TensorFormatError, r"\[16, 79\]"),
        (swap((7, "fc1"), (17, 80)), TensorFormatError, r"\[17, 80\]"),
        (swap((6, "fc1"), (80,)), TensorFormatError, r"\[80\]"),
        (swap((6, "fc1"), (0, 80)), TensorFormatError, r"\[0, 80\]"),
        (swap((7, "fc2"), (9, 16)), TensorFormatError, r"\[9, 16\]"),
        (swap((7, "linear_init"), (8, 81)), TensorFormatError, r"\[8, 81\]"),
        (swap((7, "fc1"), (16, 80), np.int8), TensorFormatError, "I8"),
        (swap((8, "fc1"), (16, 80)), PrerouterError, "no head"),
        (swap((7, "bias"), (8,)), PrerouterError, "no head"),
    ],
)
def test_other_files_are_refused(tmp_path, change, kind, word):
    arrays = random_heads(small(), 64, 8)
    change(arrays)
    save_heads(tmp_path / HEADS, arrays)
    with pytest.raises(kind, match=word) as caught:
        open_heads(tmp_path / HEADS, small(), hidden=64, experts=8)
    assert caught.value.file == str(tmp_path / HEADS)
    assert "prerouter off" in str(caught.value)


def test_the_same_head_under_both_names_is_refused(tmp_path):
    arrays = {PLAIN.format(*k): mx.array(a) for k, a in random_heads(small(), 64, 8).items()}
    arrays[NESTED.format(6, "fc1")] = arrays[PLAIN.format(6, "fc1")]
    mx.save_safetensors(str(tmp_path / HEADS), arrays)
    with pytest.raises(PrerouterError, match="no head"):
        open_heads(tmp_path / HEADS, small(), hidden=64, experts=8)


def test_values_that_are_no_numbers_are_refused(tmp_path):
    arrays = random_heads(small(), 64, 8)
    arrays[7, "fc2"][3, 3] = np.nan
    save_heads(tmp_path / HEADS, arrays)
    file = open_heads(tmp_path / HEADS, small(), hidden=64, experts=8)
    with pytest.raises(TensorFormatError, match="not numbers"):
        Heads.load(file, small().owners, mx.float32)


def test_damaged_files_are_refused(tmp_path):
    path = tmp_path / HEADS
    with pytest.raises(PrerouterError, match="cannot be read"):
        open_heads(path, small(), hidden=64, experts=8)
    path.write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    with pytest.raises(HeaderError):
        open_heads(path, small(), hidden=64, experts=8)
    save_heads(path, random_heads(small(), 64, 8))
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(TruncatedFileError):
        open_heads(path, small(), hidden=64, experts=8)
    path.write_bytes(whole)
    file = open_heads(path, small(), hidden=64, experts=8)
    path.write_bytes(whole[:-10])  # cut after it was opened
    with pytest.raises(CheckpointError, match="ended early"):
        Heads.load(file, small().owners, mx.float32)
