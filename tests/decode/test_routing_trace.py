"""The trace file: what goes in comes out, and nothing else comes in."""

from __future__ import annotations

import contextlib
import json
import pickle
import zipfile
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_stream.decode import routing_trace
from mlx_stream.decode.routing_trace import RoutingTrace, TraceError
from tests.support.traces import random_trace


def assert_same(a, b):
    for name in ("model", "layers", "num_experts", "expert_nbytes"):
        assert getattr(a, name) == getattr(b, name)
    for x, y in zip(
        (*a.prompt, *a.decode, a.tokens), (*b.prompt, *b.decode, b.tokens), strict=True
    ):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y)


@settings(max_examples=30, deadline=None)
@given(
    layers=st.lists(st.integers(0, 90), min_size=1, max_size=5, unique=True).map(tuple),
    k=st.integers(1, 8),
    prompt=st.integers(0, 30),
    steps=st.integers(0, 30),
)
def test_round_trip(tmp_path_factory, layers, k, prompt, steps):
    trace = random_trace(layers=layers, k=k, prompt=prompt, steps=steps)
    path = tmp_path_factory.mktemp("trace") / "t.npz"
    trace.save(path)
    assert_same(RoutingTrace.load(path), trace)
    assert trace.steps == steps
    assert trace.total_nbytes == len(layers) * 8 * 100
    assert [p.name for p in path.parent.iterdir()] == ["t.npz"], "no temporary file stays"


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "t.npz"
    random_trace().save(path)
    return path


def rewrite(path, **changes):
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    arrays.update(changes)
    np.savez(path, **{k: v for k, v in arrays.items() if v is not None})


def header(path, **changes):
    with np.load(path) as archive:
        values = json.loads(archive["header"].tobytes())
    values.update(changes)
    return np.frombuffer(json.dumps(values).encode(), dtype=np.uint8)


def refused(path, *words):
    with pytest.raises(TraceError) as caught:
        RoutingTrace.load(path)
    error = caught.value
    assert error.file == str(path)
    assert error.remedy
    for word in words:
        assert word in str(error)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, ["trace version 1", "actual: 2"]),
        ({"layers": [0, 0, 2]}, ["different layers"]),
        ({"layers": []}, ["whole numbers"]),
        ({"layers": ["0", 1, 2]}, ["whole numbers"]),
        ({"layers": 3}, ["whole numbers"]),
        ({"num_experts": [8, 8]}, ["num_experts", "3 layers"]),
        ({"num_experts": [8, 8, 2]}, ["ids 0..1"]),
        ({"num_experts": [8, 8, 1 << 20]}, ["num_experts"]),
        ({"expert_nbytes": [1, -1, 1]}, ["expert_nbytes"]),
        ({"expert_nbytes": [1, True, 1]}, ["expert_nbytes"]),
    ],
)
def test_a_wrong_header_is_refused(saved, changes, words):
    rewrite(saved, header=header(saved, **changes))
    refused(saved, *words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt.1": np.zeros((20, 2))}, ["prompt.1", "float64"]),
        ({"prompt.1": np.zeros((19, 2), np.int16)}, ["prompt.1", "20 tokens"]),
        ({"decode.0": np.full((12, 2), 8, np.int16)}, ["decode.0", "ids 0..7"]),
        ({"decode.0": np.full((12, 2), -1, np.int16)}, ["decode.0", "ids 0..7"]),
        ({"decode.0": np.zeros(12, np.int16)}, ["decode.0"]),
        ({"decode.2": np.zeros((12, 0), np.int16)}, ["decode.2"]),
        ({"decode.2": None}, ["decode.2"]),
        ({"tokens": np.zeros(12)}, ["tokens", "float64"]),
        ({"tokens": np.zeros((2, 6), np.int32)}, ["tokens"]),
        ({"header": np.frombuffer(b"[1]", np.uint8)}, ["trace version 1"]),
        ({"header": np.frombuffer(b"{", np.uint8)}, []),
        ({"header": np.frombuffer(b'{"version": 1}', np.uint8)}, ["header"]),
        ({"header": np.frombuffer(b"\xff\xfe", np.uint8)}, []),
    ],
)
def test_wrong_parts_are_refused(saved, changes, words):
    rewrite(saved, **changes)
    refused(saved, *words)


def test_a_pickle_is_not_run(tmp_path):
    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("the pickle was run",))

    path = tmp_path / "t.npz"
    random_trace().save(path)
    rewrite(path, tokens=np.array([Trap()], dtype=object))
    refused(path)
    path.write_bytes(pickle.dumps(Trap()))
    refused(path, "written by mlx_stream trace")


def test_other_files_are_refused(tmp_path, saved):
    refused(tmp_path / "missing.npz", "No such file")
    refused(tmp_path)
    (tmp_path / "text.npz").write_text("hello")
    refused(tmp_path / "text.npz")
    with zipfile.ZipFile(tmp_path / "zip.npz", "w") as archive:
        archive.writestr("note.txt", "hello")
    refused(tmp_path / "zip.npz")
    content = saved.read_bytes()
    for size in (0, 10, len(content) // 2, len(content) - 5):
        saved.write_bytes(content[:size])
        refused(saved)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_flipped_byte_never_escapes_as_another_error(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("trace") / "t.npz"
    random_trace().save(path)
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    with contextlib.suppress(TraceError):
        RoutingTrace.load(path)


def test_sizes_are_bounded_before_unpacking(tmp_path, monkeypatch, saved):
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("header.npy", bytes(2 << 20))
    refused(tmp_path / "bomb.npz", "too large", "header")
    monkeypatch.setattr(routing_trace, "MAX_ARRAY_NBYTES", 100)
    refused(saved, "too large", "100 bytes unpacked")
    monkeypatch.setattr(routing_trace, "MAX_FILE_NBYTES", 100)
    refused(saved, "too large", "100 bytes")
    monkeypatch.setattr(routing_trace, "MAX_FILE_NBYTES", 1 << 20)
    monkeypatch.setattr(routing_trace, "MAX_LAYERS", 1)
    refused(saved, "at most 1 layers")


def test_saving_checks_too(tmp_path):
    trace = random_trace()
    with pytest.raises(TraceError, match="tokens"):
        replace(trace, tokens=trace.tokens[:-1]).save(tmp_path / "t.npz")
    assert not list(tmp_path.iterdir())
    with pytest.raises(TraceError, match="cannot be written"):
        trace.save(tmp_path / "no" / "t.npz")


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "t.npz"
    random_trace().save(path)
    before = path.read_bytes()

    def full(file, **arrays):
        file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(np, "savez_compressed", full)
    with pytest.raises(TraceError, match="no space left"):
        random_trace(seed=1).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["t.npz"]
