"""An engine through the CUDA backend's code, on MLX's default device and a fake CUDA runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.backends.cuda.fake_cudart import FakeCudart


@pytest.fixture
def fake() -> FakeCudart:
    """The runtime of this test."""
    return FakeCudart()


@pytest.fixture
def open_cuda(open_engine, monkeypatch, fake) -> Callable[..., Any]:
    """``open_cuda(folder, **config) -> Engine``; ``backend`` replaces the one on the fake."""
    from mlx_stream.backends.cuda.backend import CudaBackend

    def load(path: Path, *, backend: Any = None, **options: Any) -> Any:
        made = backend or CudaBackend(require_device=False, cudart=fake)
        monkeypatch.setattr("mlx_stream.engine.select_backend", lambda name: made)
        return open_engine(path, **options)

    return load
