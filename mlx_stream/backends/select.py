"""Choose a backend by name; a missing capability is an error that names it."""

from __future__ import annotations

import mlx.core as mx

from mlx_stream.backends.base import Backend
from mlx_stream.errors import CapabilityError


def select_backend(name: str) -> Backend:
    """``"auto"`` takes a Mac's GPU, else an NVIDIA GPU, else the CPU.

    Raises:
        CapabilityError: the backend cannot run here.
    """
    if name == "auto":
        name = "metal" if mx.metal.is_available() else "cuda" if mx.cuda.is_available() else "cpu"
    if name == "metal":
        from mlx_stream.backends.metal import MetalBackend

        return MetalBackend()
    if name == "cuda":
        from mlx_stream.backends.cuda.backend import CudaBackend

        return CudaBackend()
    if name == "cpu":
        from mlx_stream.backends.cpu.backend import CpuBackend

        return CpuBackend()
    raise CapabilityError(
        f"there is no backend {name!r}",
        expected="auto, metal, cuda or cpu",
        actual=name,
        remedy="use --backend auto",
    )
