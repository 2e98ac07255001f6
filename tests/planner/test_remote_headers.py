"""Plans of hub repositories: right, from headers alone, cached, and refused when they must be."""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path

import pytest
from huggingface_hub import constants

import mlx_stream
from mlx_stream.errors import HeadersOnlyError, HubError, MissingTensorError, ModelNotFoundError
from mlx_stream.hub import resolve_model
from mlx_stream.planner.model_headers import open_headers
from mlx_stream.storage.checkpoint import open_checkpoint
from mlx_stream.storage.expert_index import build_expert_index
from mlx_stream.storage.open_files import open_all
from mlx_stream.storage.remote_checkpoint import FIRST_NBYTES, RemoteCheckpoint
from tests.support.hub_server import COMMIT, REPO

OPTIONS = {"memory_budget": "1GB", "chunk_tokens": 256}


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def test_the_plan_is_that_of_the_folder(hub, tmp_path):
    assert len(shards(hub.folder)) > 3
    assert mlx_stream.plan(REPO, 1000, **OPTIONS) == mlx_stream.plan(hub.folder, 1000, **OPTIONS)
    assert not list(tmp_path.rglob("*.safetensors"))


def test_every_tensor_lies_where_it_does_in_the_folder(hub):
    local, remote = open_checkpoint(hub.folder), open_headers(REPO)
    assert remote.tensors == local.tensors
    assert remote.config == local.config
    assert [f.size for f in remote.files] == [f.size for f in local.files]
    assert [f.path.name for f in remote.files] == [f.path.name for f in local.files]
    assert build_expert_index(remote).layers == build_expert_index(local).layers


def test_what_is_sent(hub):
    checkpoint = open_headers(REPO)
    for shard in shards(hub.folder):
        assert 0 < hub.bytes_of(shard.name) <= FIRST_NBYTES
    assert checkpoint.traffic.nbytes == sum(s.nbytes for s in hub.sent)
    assert checkpoint.traffic.requests == len(shards(hub.folder)) + 2
    assert {s.asked for s in hub.weight_requests} == {f"bytes=0-{FIRST_NBYTES - 1}"}
    # The branch is resolved once; everything after it is of one commit.
    assert [s.revision for s in hub.sent if s.host == "hub"][:2] == ["main", COMMIT]
    assert {s.revision for s in hub.sent[1:] if s.host == "hub"} == {COMMIT}


def test_the_token_goes_to_the_hub_and_not_to_its_store(hub):
    open_headers(REPO)
    assert {s.token for s in hub.sent if s.host == "hub"} == {"Bearer hf_of_the_test"}
    assert {s.token for s in hub.weight_requests} == {None}


def first_bytes(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(8)


def write_sparse(path: Path, tensors: dict[str, list[int]], metadata: str = "") -> None:
    """A BF16 shard with a hole where its data would be."""
    header, end = {"__metadata__": {"note": metadata}}, 0
    for name, shape in tensors.items():
        nbytes = 2
        for dim in shape:
            nbytes *= dim
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + nbytes]}
        end += nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + end)


@pytest.fixture
def large(tmp_path) -> Path:
    """Four layers with the expert sizes of Qwen3-30B-A3B, 4.8 GB of holes, long headers."""
    folder = tmp_path / "large"
    folder.mkdir()
    config = {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "vocab_size": 151936,
    }
    (folder / "config.json").write_text(json.dumps(config))
    where = {}
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.switch_mlp."
        tensors = {
            f"{prefix}gate_proj.weight": [128, 768, 2048],
            f"{prefix}up_proj.weight": [128, 768, 2048],
            f"{prefix}down_proj.weight": [128, 2048, 768],
        }
        name = f"model-{layer + 1:05}-of-00004.safetensors"
        write_sparse(folder / name, tensors, metadata="x" * 100_000 * layer)
        where |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def test_large_shards_cost_their_headers(hub, large):
    hub.folder = large
    options = {"memory_budget": "2GB"}
    assert mlx_stream.plan(REPO, 4096, **options) == mlx_stream.plan(large, 4096, **options)
    for shard in shards(large):
        assert shard.stat().st_size > 1.2e9
        header = 8 + struct.unpack("<Q", first_bytes(shard))[0]
        assert hub.bytes_of(shard.name) == max(FIRST_NBYTES, header) < 1e6
    assert len(hub.weight_requests) == 1 + 2 * 3


def test_a_server_that_ignores_ranges_is_hung_up_on(hub, large):
    hub.folder = large
    hub.faults["*"] = lambda answer: answer.whole()
    checkpoint = open_headers(REPO)
    assert checkpoint.tensors == open_checkpoint(large).tensors
    for shard in shards(large):
        assert checkpoint.traffic.by_file[shard.name] < 1e6
        assert hub.bytes_of(shard.name) < 50e6  # what the sockets' buffers took, not 1.2 GB


def test_one_file_without_an_index(hub, checkpoint):
    hub.folder = checkpoint("qwen3_moe")
    copy = hub.folder.parent / "no-index"
    shutil.copytree(hub.folder, copy, dirs_exist_ok=True)
    (copy / "model.safetensors.index.json").unlink(missing_ok=True)
    hub.folder = copy
    assert mlx_stream.plan(REPO, 100, **OPTIONS) == mlx_stream.plan(copy, 100, **OPTIONS)


def test_it_cannot_be_opened_for_reading(hub):
    with pytest.raises(HeadersOnlyError, match=r"tiny-moe@.*safetensors"):
        open_all(open_headers(REPO).files, "buffered")


def test_progress_ends_with_all_shards(hub):
    seen = []
    open_headers(REPO, progress=lambda done, total: seen.append((done, total)))
    count = len(shards(hub.folder))
    assert seen == [(n, count) for n in range(1, count + 1)]


def test_revisions(hub):
    for model, revision in ((f"{REPO}@refs/pr/3", None), (REPO, "refs/pr/3")):
        hub.sent.clear()
        open_headers(model, revision=revision)
        assert hub.sent[0].revision == "refs%2Fpr%2F3"
    with pytest.raises(ModelNotFoundError, match="two revisions"):
        open_headers(f"{REPO}@one", revision="two")


def test_a_second_plan_asks_once_and_a_pinned_one_never(hub):
    expected = mlx_stream.plan(REPO, 1000, **OPTIONS)
    hub.sent.clear()
    assert mlx_stream.plan(REPO, 1000, **OPTIONS) == expected
    assert [s.file for s in hub.sent] == ["config.json"]
    hub.sent.clear()
    assert mlx_stream.plan(f"{REPO}@{COMMIT}", 1000, **OPTIONS) == expected
    assert not hub.sent


def test_offline_uses_what_was_fetched(hub, monkeypatch):
    expected = mlx_stream.plan(REPO, 1000, **OPTIONS)
    hub.sent.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert mlx_stream.plan(REPO, 1000, **OPTIONS) == expected
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set"):
        mlx_stream.plan("owner/another", 1000, **OPTIONS)
    assert not hub.sent


def test_a_moved_branch_is_followed(hub, checkpoint):
    open_headers(REPO)
    hub.commit, hub.folder = "f" * 40, checkpoint("qwen3_moe")
    assert len(open_headers(REPO).files) == len(shards(hub.folder))


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "nonsense", "other"])
def test_a_damaged_cache_is_fetched_again(hub, tmp_path, damage):
    expected = open_headers(REPO)
    (file,) = (tmp_path / "xdg" / "mlx_stream" / "headers").glob("*.json")
    raw = file.read_bytes()
    digest, body = raw.split(b"\n", 1)
    bad = {
        "flip": raw[:200] + bytes([raw[200] ^ 1]) + raw[201:],
        "cut": raw[:-9],
        "empty": b"",
        "nonsense": b"\xff\n" + body,
        "other": digest + b"\n[]",
    }
    file.write_bytes(bad[damage])
    hub.sent.clear()
    assert open_headers(REPO) == expected
    assert hub.weight_requests
    assert file.read_bytes() == raw


def test_nothing_is_kept_where_the_server_names_no_commit(hub, tmp_path):
    hub.commit = None
    open_headers(REPO)
    assert {s.revision for s in hub.sent if s.host == "hub"} == {"main"}
    assert not (tmp_path / "xdg").exists()


def test_a_cache_that_cannot_be_written_costs_nothing_else(hub, tmp_path):
    (tmp_path / "xdg").write_text("a file where the folder should be")
    assert isinstance(open_headers(REPO), RemoteCheckpoint)


def snapshot(home: Path, folder: Path) -> Path:
    """`folder` as the hub's own cache would hold it."""
    base = home / "hub" / f"models--{REPO.replace('/', '--')}"
    (base / "refs").mkdir(parents=True)
    (base / "refs" / "main").write_text(COMMIT)
    return Path(shutil.copytree(folder, base / "snapshots" / COMMIT))


def test_a_downloaded_model_is_used(hub, tmp_path):
    path = snapshot(tmp_path, hub.folder)
    assert open_headers(REPO).path == path
    assert not hub.sent
    shards(path)[-1].unlink()
    assert isinstance(open_headers(REPO), RemoteCheckpoint)


def test_a_downloaded_revision_is_loaded_by_its_name(hub, tmp_path, monkeypatch):
    path = snapshot(tmp_path, hub.folder)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve_model(f"{REPO}@{COMMIT}") == path
    assert resolve_model(REPO, revision=COMMIT) == path


def test_a_shard_that_is_not_there_is_named(hub, tmp_path):
    copy = Path(shutil.copytree(hub.folder, tmp_path / "copy"))
    gone = shards(copy)[1]
    gone.unlink()
    hub.folder = copy
    with pytest.raises(HubError, match=gone.name):
        open_headers(REPO)


def test_an_index_of_another_version_is_refused(hub, tmp_path):
    copy = Path(shutil.copytree(hub.folder, tmp_path / "copy"))
    index = copy / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"]["model.new.weight"] = shards(copy)[0].name
    index.write_text(json.dumps(value))
    hub.folder = copy
    with pytest.raises(MissingTensorError, match="in no shard"):
        open_headers(REPO)
