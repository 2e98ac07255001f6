"""Packed repositories on the hub: planned from the manifest and headers, which are not trusted."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

import mlx_stream
from mlx_stream.errors import CheckpointError, HeadersOnlyError, HubError, PackedLayoutError
from mlx_stream.planner.model_headers import open_headers
from mlx_stream.storage.checkpoint import open_checkpoint
from mlx_stream.storage.expert_index import build_expert_index
from mlx_stream.storage.open_files import open_all
from mlx_stream.storage.packed_manifest import MANIFEST_NAME
from mlx_stream.storage.remote_checkpoint import FIRST_NBYTES, RemoteCheckpoint
from tests.packed.building import SMALL_SHARD, index_of, pack_checkpoint, random_orders
from tests.support.hub_server import COMMIT, REPO, Hub

OPTIONS = {"memory_budget": "1GB", "chunk_tokens": 256}
EXPERTS = "experts-*.safetensors"


@pytest.fixture(scope="module")
def folder(checkpoint, tmp_path_factory) -> Path:
    """Several resident shards, a file for each layer, experts in another order."""
    source = checkpoint("qwen3_moe", shard_bytes=150_000)
    target = tmp_path_factory.mktemp("hub") / "packed"
    orders = random_orders(index_of(source))
    pack_checkpoint(source, target, orders=orders, shard_nbytes=SMALL_SHARD)
    assert len(list(target.glob("model*.safetensors"))) > 1
    assert len(list(target.glob(EXPERTS))) > 1
    return target


@pytest.fixture
def packed(hub, folder) -> Hub:
    hub.folder = folder
    return hub


@pytest.fixture
def changed(packed, tmp_path) -> Callable[[Callable[[dict[str, Any]], object]], None]:
    """``changed(edit)``: the repository with an edited manifest."""

    def change(edit: Callable[[dict[str, Any]], object]) -> None:
        copy = Path(shutil.copytree(packed.folder, tmp_path / "copy"))
        manifest = json.loads((copy / MANIFEST_NAME).read_text())
        edit(manifest)
        (copy / MANIFEST_NAME).write_text(json.dumps(manifest))
        packed.folder = copy

    return change


def test_the_plan_is_that_of_the_folder(packed, folder, tmp_path):
    assert mlx_stream.plan(REPO, 1000, **OPTIONS) == mlx_stream.plan(folder, 1000, **OPTIONS)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_every_tensor_lies_where_it_does_in_the_folder(packed, folder):
    local, remote = open_checkpoint(folder), open_headers(REPO)
    assert isinstance(remote, RemoteCheckpoint)
    assert (remote.tensors, remote.packed) == (local.tensors, local.packed)
    assert [(f.path.name, f.size) for f in remote.files] == [
        (f.path.name, f.size) for f in local.files
    ]
    layers = build_expert_index(remote).layers
    assert layers == build_expert_index(local).layers
    assert all(layer.record is not None for layer in layers)
    with pytest.raises(HeadersOnlyError, match="safetensors"):
        open_all(remote.files, "buffered")


def test_what_is_sent(packed, folder):
    checkpoint = open_headers(REPO)
    files = sorted(p.name for p in folder.glob("*.safetensors"))
    assert sorted(s.file for s in packed.weight_requests) == files
    assert all(0 < packed.bytes_of(name) <= FIRST_NBYTES for name in files)
    assert packed.bytes_of(MANIFEST_NAME) == (folder / MANIFEST_NAME).stat().st_size
    # The config, an index that is not there, the manifest, and each file's beginning.
    assert checkpoint.traffic.requests == 3 + len(files)


def test_a_second_plan_asks_nothing_of_a_commit(packed, folder, monkeypatch):
    first = open_headers(f"{REPO}@{COMMIT}")
    packed.sent.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert open_headers(f"{REPO}@{COMMIT}") == first
    assert not packed.sent


def test_a_manifest_without_end(packed, monkeypatch):
    monkeypatch.setattr("mlx_stream.storage.remote_checkpoint.MAX_JSON_NBYTES", 10_000)
    packed.faults[MANIFEST_NAME] = lambda answer: answer.head(200, {"Content-Length": str(10**12)})
    with pytest.raises(HubError, match="too large"):
        open_headers(REPO)
    assert not packed.weight_requests


LIES = {
    "another version": lambda m: m.update(version=2),
    "a path in a file": lambda m: m["files"][0].update(name="../../model.safetensors"),
    "a URL": lambda m: m["files"][0].update(name="http://127.0.0.1:9/model.safetensors"),
    "a file that is no weights": lambda m: m["files"][0].update(name="config.json"),
    "a path in a layer": lambda m: m["layers"][0].update(file="../experts-00001-of-00001"),
    "a file twice": lambda m: m["files"].append(m["files"][0]),
    "too many files": lambda m: m.update(files=m["files"] * 5000),
    "too many experts": lambda m: m["layers"][0].update(num_experts=2**40),
    "no resident weights": lambda m: m.update(
        files=[f for f in m["files"] if f["name"].startswith("experts")]
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies_costs_no_more_requests(packed, changed, lie):
    changed(LIES[lie])
    with pytest.raises(PackedLayoutError) as caught:
        open_headers(REPO)
    assert f"{REPO}@{COMMIT}/{MANIFEST_NAME}" in str(caught.value)
    assert not packed.weight_requests


def test_records_that_are_not_those_of_the_headers(packed, changed):
    changed(lambda m: m["layers"][0].update(record_nbytes=2 * m["layers"][0]["record_nbytes"]))
    with pytest.raises(PackedLayoutError, match="not those of the manifest"):
        open_headers(REPO)


def test_an_expert_file_that_is_not_there_is_named(packed, tmp_path):
    copy = Path(shutil.copytree(packed.folder, tmp_path / "copy"))
    gone = sorted(copy.glob(EXPERTS))[0]
    gone.unlink()
    packed.folder = copy
    with pytest.raises(HubError, match=gone.name):
        open_headers(REPO)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_a_manifest_that_is_none(packed, tmp_path, raw):
    copy = Path(shutil.copytree(packed.folder, tmp_path / "copy"))
    (copy / MANIFEST_NAME).write_bytes(raw)
    packed.folder = copy
    with pytest.raises(CheckpointError, match=MANIFEST_NAME):
        open_headers(REPO)
    assert not packed.weight_requests


def test_a_downloaded_packed_model_is_used_once_it_is_complete(packed, folder, tmp_path):
    base = tmp_path / "hub" / f"models--{REPO.replace('/', '--')}"
    (base / "refs").mkdir(parents=True)
    (base / "refs" / "main").write_text(COMMIT)
    path = Path(shutil.copytree(folder, base / "snapshots" / COMMIT))
    assert open_headers(REPO).path == path
    assert not packed.sent
    next(path.glob(EXPERTS)).unlink()
    assert isinstance(open_headers(REPO), RemoteCheckpoint)
