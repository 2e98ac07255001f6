"""Choose a backend by name; a missing capability is an error that names it."""

from __future__ import annotations

import mlx.core as mx

from mlx_stream.backends.base import Backend
from mlx_stream.errors import CapabilityError


def select_backend(name: str) -> Backend:
    """``"auto"`` takes Metal where there is a Mac GPU, else the CPU.

    Raises:
        CapabilityError: the backend cannot run here.
    """
    if name == "auto":
        name = "metal" if mx.metal.is_available() else "cpu"
    if name == "metal":
        from mlx_stream.backends.metal import MetalBackend

        return MetalBackend()
    if name == "cpu":
        from mlx_stream.backends.cpu.backend import CpuBackend

        return CpuBackend()
    raise CapabilityError(
        f"the {name} backend is not in this release",
        expected="capabilities 'pinned-staging' and 'grouped-mlp' on CUDA",
        actual="neither is implemented yet",
        remedy="use --backend cpu, or metal on a Mac",
    )
