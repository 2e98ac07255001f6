"""A metal backend whose kernels run on the CPU shim."""

from collections.abc import Iterator

import pytest

from mlx_stream.backends.metal import MetalBackend

from .running import ShimRunner
from .wiring import Rig


@pytest.fixture
def rig(monkeypatch) -> Iterator[Rig]:
    monkeypatch.setenv("MLX_STREAM_KERNELS", "fused")
    run = ShimRunner()
    backend = MetalBackend(require_device=False, run=run)
    yield Rig(backend, run)
    assert run.findings == []
    backend.close()
