"""Fixtures shared by all tests: tiny checkpoints, stock models and engines that get closed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Checkpoint = Callable[..., Path]


@pytest.fixture(scope="session", autouse=True)
def _cache_folder(tmp_path_factory) -> Iterator[None]:
    """Plans must not follow what this machine's user has probed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("xdg")))
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Checkpoint:
    """``checkpoint(family, **options) -> folder``, written once a session; never modify it."""
    from tests.support.checkpoints import cached_checkpoint

    return lambda name, **options: cached_checkpoint(tmp_path_factory, name, **options)


@pytest.fixture(scope="session")
def stock() -> Callable[[Path], Any]:
    """``stock(folder) -> mlx-lm model``, all in memory, loaded once a session."""
    from tests.support.checkpoints import stock_model

    models: dict[Path, Any] = {}

    def load(path: Path) -> Any:
        if path not in models:
            models[path] = stock_model(path)
        return models[path]

    return load


@pytest.fixture
def open_engine() -> Iterator[Callable[..., Any]]:
    """``open_engine(folder, **config) -> Engine`` on the CPU backend; closed at teardown."""
    from mlx_stream.config import StreamConfig
    from mlx_stream.engine import Engine

    engines: list[Engine] = []

    def load(path: Path, **options: Any) -> Engine:
        # Tiny prompts would all take the union path: streaming is what most tests are about.
        defaults = {
            "memory_budget": 1 << 30,
            "chunk_tokens": 16,
            "backend": "cpu",
            "union_tokens": 0,
        }
        engines.append(Engine(path, StreamConfig(**(defaults | options))))
        return engines[-1]

    yield load
    for engine in engines:
        engine.close()


@pytest.fixture
def open_metal(open_engine, monkeypatch) -> Callable[..., Any]:
    """As `open_engine`, through the metal backend's code on MLX's default device."""
    from mlx_stream.backends.metal import MetalBackend

    def load(path: Path, *, backend: Any = None, **options: Any) -> Any:
        made = backend if backend is not None else MetalBackend(require_device=False)
        monkeypatch.setattr("mlx_stream.engine.select_backend", lambda name: made)
        return open_engine(path, io="buffered", **options)

    return load
