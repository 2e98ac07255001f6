"""A hub for the tests that plan from one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.hub_server import Hub, serve, use_endpoint


@pytest.fixture
def hub(checkpoint, tmp_path, monkeypatch) -> Iterator[Hub]:
    """A local hub that holds a tiny sharded checkpoint; this process talks to it."""
    with serve(checkpoint("qwen3_moe", shard_bytes=150_000)) as hub:
        use_endpoint(monkeypatch, hub.endpoint, tmp_path)
        yield hub
