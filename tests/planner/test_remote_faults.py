"""A hub that refuses, breaks off, lies or attacks: one typed error each, and little read."""

from __future__ import annotations

import json
import shutil
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants

from mlx_stream.errors import (
    CheckpointError,
    DenseModelError,
    HeaderError,
    HubError,
    MlxStreamError,
    ModelNotFoundError,
    TruncatedFileError,
)
from mlx_stream.planner import plan as planning
from mlx_stream.planner.model_headers import open_headers
from mlx_stream.storage.remote_fetch import ATTEMPTS, HubFetcher
from tests.support.hub_server import REPO, Answer, Fault, use_endpoint

INDEX = "model.safetensors.index.json"


@pytest.fixture
def shard(hub) -> str:
    return sorted(hub.folder.glob("*.safetensors"))[1].name


def refuse(status: int, code: str = "", **headers: str) -> Fault:
    extra = {"X-Error-Code": code} if code else {}
    return lambda answer: answer.head(status, {"Content-Length": "0"} | extra | headers)


def check_message(error: MlxStreamError, *words: str) -> None:
    assert error.expected is not None
    assert error.actual is not None
    assert error.remedy
    assert REPO in str(error)
    for word in words:
        assert word in str(error)


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        (refuse(401), ModelNotFoundError, ["401", "HF_TOKEN"]),
        (refuse(401, "GatedRepo"), HubError, ["gated", "401", "ask for access"]),
        (refuse(403, "GatedRepo"), HubError, ["gated", "403", "ask for access"]),
        (refuse(403), HubError, ["403 Forbidden", "token"]),
        (refuse(404), HubError, ["404 Not Found", "config.json"]),
        (refuse(404, "RepoNotFound"), ModelNotFoundError, ["cannot find the model"]),
        (refuse(404, "RevisionNotFound"), ModelNotFoundError, ["no such revision"]),
        (refuse(400), HubError, ["400 Bad Request"]),
        (refuse(500), HubError, ["500 Internal Server Error", "later"]),
        (refuse(503), HubError, ["503", "later"]),
        (refuse(429), HubError, ["429", "later"]),
        (refuse(599), HubError, ["599"]),
        (refuse(302, Location="/config.json"), HubError, ["config.json"]),
        (refuse(302, Location="file:///etc/passwd"), HubError, ["reached"]),
    ],
)
def test_refusals(hub, fault, kind, words):
    hub.faults["config.json"] = hub.faults[""] = fault
    with pytest.raises(kind) as caught:
        open_headers(REPO)
    check_message(caught.value, *words)
    assert not hub.weight_requests


def test_a_refused_shard_is_named_and_its_signature_is_not(hub, shard):
    hub.faults[shard] = refuse(403)
    with pytest.raises(HubError) as caught:
        open_headers(REPO)
    check_message(caught.value, shard, "403")
    assert "secret" not in str(caught.value)


def failing(times: int, fault: Fault) -> Fault:
    """`fault` for the first `times` requests, then as usual."""
    left = [times]

    def answer_with(answer: Answer) -> None:
        left[0] -= 1
        (fault if left[0] >= 0 else Answer.usual)(answer)

    return answer_with


def hang_up(answer: Answer) -> None:
    """The connection breaks in the middle of the body."""
    answer.head(206, {"Content-Length": "65536", "Content-Range": content_range(answer)})
    answer.wfile.write(bytes(1000))
    answer.close_connection = True


def content_range(answer: Answer) -> str:
    size = answer.path_on_disk.stat().st_size
    return f"bytes 0-65535/{size}"


@pytest.mark.parametrize("fault", [refuse(500), refuse(429), hang_up])
def test_a_passing_fault_is_retried(hub, shard, fault):
    hub.faults[shard] = failing(ATTEMPTS - 1, fault)
    checkpoint = open_headers(REPO)
    assert checkpoint.files
    assert sum(s.file == shard for s in hub.weight_requests) == ATTEMPTS


def test_a_lasting_one_is_not_retried_for_ever(hub, shard):
    hub.faults[shard] = hang_up
    with pytest.raises(HubError, match="cannot be reached"):
        open_headers(REPO)
    assert sum(s.file == shard for s in hub.weight_requests) == ATTEMPTS


def test_retry_after_is_followed_within_bounds(hub, monkeypatch):
    monkeypatch.setattr("mlx_stream.storage.remote_fetch.MAX_WAIT_SECONDS", 0.3)
    hub.faults["config.json"] = failing(1, refuse(429, **{"Retry-After": "86400"}))
    start = time.monotonic()
    open_headers(REPO)
    assert 0.3 <= time.monotonic() - start < 30


def stated(text: str) -> Fault:
    return lambda answer: answer.part(0, 65536, text)


@pytest.mark.parametrize(
    "text",
    [
        "bytes 0-99/1000000",
        "bytes 8-65535/150000",
        "bytes 0-65535/*",
        "bytes 0-65535/99999999999999999999999999",
        "bytes 0-65535/123456",  # the hub itself stated another size
        "items 0-1/2",
        "",
    ],
)
def test_a_wrong_content_range(hub, shard, text):
    hub.faults[shard] = stated(text)
    with pytest.raises(HubError, match="another range") as caught:
        open_headers(REPO)
    check_message(caught.value, shard, "Content-Range")


def test_no_range_and_no_length(hub, shard):
    def endless(answer: Answer) -> None:
        answer.head(200, {"Connection": "close"})
        answer.close_connection = True
        answer.body(0, 10)

    hub.faults[shard] = endless
    with pytest.raises(HubError, match="ignores range requests"):
        open_headers(REPO)


def test_a_compressed_answer(hub, shard):
    hub.faults[shard] = lambda answer: answer.head(
        200, {"Content-Length": "0", "Content-Encoding": "gzip"}
    )
    with pytest.raises(HubError, match="compressed"):
        open_headers(REPO)


@pytest.mark.parametrize("stated_length", [True, False])
def test_a_config_without_end(hub, monkeypatch, stated_length):
    monkeypatch.setattr("mlx_stream.storage.remote_checkpoint.MAX_JSON_NBYTES", 100_000)

    def flood(answer: Answer) -> None:
        headers = {"Content-Length": str(10**12)} if stated_length else {"Connection": "close"}
        answer.head(200, headers)
        answer.close_connection = True
        while True:
            answer.wfile.write(bytes(1 << 16))

    hub.faults["config.json"] = flood
    with pytest.raises(HubError, match="too large"):
        open_headers(REPO)


def test_a_slow_server(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.1)
    hub.faults["config.json"] = lambda answer: time.sleep(1)
    start = time.monotonic()
    with pytest.raises(HubError, match="in time") as caught:
        open_headers(REPO)
    check_message(caught.value, "0.1 s", "HF_HUB_DOWNLOAD_TIMEOUT")
    assert time.monotonic() - start < 10


def test_a_server_that_drips(hub, shard):
    def drip(answer: Answer) -> None:
        answer.head(206, {"Content-Length": "65536", "Content-Range": content_range(answer)})
        for _ in range(200):
            answer.wfile.write(b"x")
            time.sleep(0.05)

    hub.faults[shard] = drip
    fetcher = HubFetcher(REPO, "main", timeout=0.08)
    start = time.monotonic()
    with pytest.raises(HubError, match="in time"):
        fetcher.piece(shard, 0, 65536)
    assert time.monotonic() - start < 8


def test_nobody_listens(hub, tmp_path, monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        use_endpoint(monkeypatch, f"http://127.0.0.1:{unused.getsockname()[1]}", tmp_path)
        with pytest.raises(HubError) as caught:
            open_headers(REPO)
    check_message(caught.value, "cannot be reached", "HF_ENDPOINT")


@pytest.mark.parametrize("endpoint", ["nonsense", "http://[bad", "http://no such host"])
def test_an_endpoint_that_is_none(hub, tmp_path, monkeypatch, endpoint):
    use_endpoint(monkeypatch, endpoint, tmp_path)
    with pytest.raises(HubError, match="cannot be reached"):
        open_headers(REPO)


def test_offline(hub, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError) as caught:
        open_headers(REPO)
    check_message(caught.value, "HF_HUB_OFFLINE")
    assert not hub.sent


@pytest.fixture
def changed(hub, tmp_path) -> Callable[..., str]:
    """``changed(name, bytes)``: the repository with one file replaced."""

    def change(name: str, data: bytes) -> str:
        copy = Path(shutil.copytree(hub.folder, tmp_path / "copy"))
        (copy / name).write_bytes(data)
        hub.folder = copy
        return name

    return change


@pytest.mark.parametrize("length", [0, 90_000_000, 2**63, 2**64 - 1])
def test_a_header_bomb_is_not_fetched(hub, shard, changed, length):
    changed(shard, struct.pack("<Q", length) + (hub.folder / shard).read_bytes()[8:])
    with pytest.raises(HeaderError, match="header length"):
        open_headers(REPO)
    assert hub.bytes_of(shard) <= 65536


def test_a_long_header_in_a_large_file_is_not_fetched(hub, shard, changed):
    changed(shard, struct.pack("<Q", 2_000_000) + b"{" + bytes(3_000_000))
    with pytest.raises(HeaderError, match="too long"):
        open_headers(REPO)
    assert hub.bytes_of(shard) <= 65536


@pytest.mark.parametrize("keep", [0, 5, 100])
def test_a_truncated_header(hub, shard, changed, keep):
    changed(shard, (hub.folder / shard).read_bytes()[:keep])
    with pytest.raises(MlxStreamError) as caught:
        open_headers(REPO)
    check_message(caught.value, shard)


def test_a_truncated_shard(hub, shard, changed):
    changed(shard, (hub.folder / shard).read_bytes()[:-1])
    with pytest.raises(TruncatedFileError, match=shard):
        open_headers(REPO)


@pytest.mark.parametrize(
    "name",
    [
        "../model.safetensors",
        "/etc/passwd",
        "..",
        "a/model.safetensors",
        "..\\model.safetensors",
        "http://127.0.0.1:9/model.safetensors",
        "config.json",
        "weights.safetensors",
        "",
        7,
        None,
        ["model.safetensors"],
    ],
)
def test_a_malicious_index(hub, changed, name):
    changed(INDEX, json.dumps({"weight_map": {"x": name}}).encode())
    with pytest.raises(CheckpointError) as caught:
        open_headers(REPO)
    check_message(caught.value, INDEX)
    assert [s.file for s in hub.sent] == ["config.json", INDEX]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        (INDEX, b"{"),
        (INDEX, b"[]"),
        (INDEX, b'{"weight_map": {}}'),
        (INDEX, b'{"weight_map": []}'),
        (INDEX, b"{}"),
        (INDEX, b"[" * 100_000),
        ("config.json", b"<html>captive portal</html>"),
        ("config.json", b"\xff\xfe"),
        ("config.json", b""),
    ],
)
def test_json_that_is_none(hub, changed, name, data):
    changed(name, data)
    with pytest.raises(CheckpointError) as caught:
        open_headers(REPO)
    check_message(caught.value, name)
    assert not hub.weight_requests


def test_a_dense_model(hub, tmp_path):
    folder = tmp_path / "dense"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    text = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    raw = struct.pack("<Q", len(text)) + text + bytes(4)
    (folder / "model.safetensors").write_bytes(raw)
    hub.folder = folder
    with pytest.raises(DenseModelError) as caught:
        planning.plan(REPO, 100, memory_budget="1GB")
    check_message(caught.value, "mlx_lm.generate")


@pytest.mark.parametrize("model", ["no-owner", "a/b/c", "owner/na me", "owner/..", "-x/y", "a/b@"])
def test_names_that_cannot_be(hub, model):
    with pytest.raises(MlxStreamError):
        open_headers(model)


def test_a_token_that_cannot_be_sent(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_ключ")
    with pytest.raises(HubError) as caught:
        open_headers(REPO)
    assert "hf_ключ" not in str(caught.value)
