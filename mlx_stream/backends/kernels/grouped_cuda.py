"""Launch parameters of the grouped-expert CUDA kernels, and what they can compute.

Pure: shapes in, `Launch` out. Production hands the result to `run_cuda`, the tests to the CPU shim.
The kernels are ``cuda/moe_up.cu`` (gate, up and activation), ``cuda/moe_down.cu`` (down projection
and un-sort) and ``cuda/moe_combine.cu`` (the router's weighted sum).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from mlx_stream.backends.kernels.launch import Launch
from mlx_stream.backends.kernels.source import KernelSource, load_kernel
from mlx_stream.storage.quant_spec import QuantSpec

THREADS = 128
STRIP = 64  # columns of a block, of gate and of up each
ROW_TILES = (16, 32, 64)
COMBINE_THREADS, COMBINE_WIDTH = 256, 8
MIN_COMPUTE_CAPABILITY = (8, 0)  # mma.m16n8k16 and cp.async
MAX_TILES = 65535  # blocks along y

# (mode, bits) -> MODE of dequantize.h
MODES = {("affine", 4): 0, ("affine", 8): 1, ("mxfp4", 4): 2}
GROUP_SIZES = {"affine": (32, 64, 128), "mxfp4": (32,)}
DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True)
class CudaActivation:
    """What activations.h computes: its number, whether it is gated, and its two constants."""

    number: int
    gated: bool
    limit: float = 0.0
    alpha: float = 0.0


def cuda_activation(module: Any) -> CudaActivation | None:
    """The kernel's counterpart of an mlx-lm expert activation, by class name; None if it has none.

    The caller makes sure that the class still computes what its name meant (see
    `backends.cpu.activations.resolve_activation`).
    """
    name = type(module).__name__
    if name in ("SwiGLU", "PreciseSwiGLU"):
        return CudaActivation(0, True)
    if name == "ClampedSwiGLU":
        return CudaActivation(1, True, limit=float(module.limit))
    if name == "DeepseekV41SwiGLU":
        limit = float(module.limit)
        return CudaActivation(2, True, limit=limit) if limit > 0 else CudaActivation(0, True)
    if name == "SwigluOAI":
        return CudaActivation(3, True, limit=float(module._limit), alpha=float(module._alpha))
    if name == "GeGLU":
        return CudaActivation(4, True)
    if name == "GELU":
        number = {"none": 17, "fast": 18}.get(module._approx, 16)
        return CudaActivation(number, False)
    number = {"SiLU": 19, "ReLU": 20, "ReLU2": 21}.get(name)
    return None if number is None else CudaActivation(number, False)


@dataclass(frozen=True)
class Projection:
    """One matrix ``[E, n, k]``: how it is packed and whether it has a bias."""

    spec: QuantSpec
    k: int
    n: int
    bias: bool

    @property
    def mode(self) -> int:
        """MODE of the kernels."""
        return MODES[self.spec.mode, self.spec.bits]


def why_not(dtype: str, projection: Projection) -> str | None:
    """The reason why the kernels cannot compute a projection, or None if they can."""
    spec, k, n = projection.spec, projection.k, projection.n
    if dtype not in DTYPES:
        return f"tensor cores take float16 or bfloat16, not {dtype}"
    if (spec.mode, spec.bits) not in MODES or spec.group_size not in GROUP_SIZES[spec.mode]:
        return f"no kernel for {spec.bits}-bit {spec.mode}, group {spec.group_size}"
    if k % max(32, spec.group_size) or n % 8:
        return f"[{n}, {k}] is not a multiple of [8, {max(32, spec.group_size)}]"
    return None


def row_tile(rows: int, experts: int) -> int:
    """Rows of a tile for this many rows over this many experts that have any.

    A tile never straddles experts, so a large one is half empty when experts have few rows, and a
    small one reads and unpacks the same weights more often.
    """
    mean = rows / max(1, experts)
    return next((tile for tile in ROW_TILES if mean <= 1.5 * tile), ROW_TILES[-1])


def build_tiles(counts: np.ndarray, tile: int) -> np.ndarray:
    """``[n, 4]`` int32: expert, first row, rows, 0 of each tile, for ``counts [E]`` rows.

    Experts without rows have no tile.
    """
    starts = np.concatenate(([0], np.cumsum(counts)))
    per_expert = -(-counts // tile)
    experts = np.repeat(np.arange(len(counts)), per_expert)
    first_tile = np.concatenate(([0], np.cumsum(per_expert)))[experts]
    offset = (np.arange(len(experts)) - first_tile) * tile
    rows = np.minimum(tile, counts[experts] - offset)
    return np.stack([experts, starts[experts] + offset, rows, np.zeros_like(rows)], axis=1).astype(
        np.int32
    )


def up_launch(
    dtype: str, up: Projection, activation: CudaActivation, rows: int, tiles: int, tile: int
) -> Launch:
    """``moe_up``: the fused gate, up and activation, or fc1 and activation."""
    assert tiles <= MAX_TILES, "cut the rows first"
    columns = STRIP if activation.gated else 2 * STRIP
    return Launch(
        template={
            **_gemm_template(dtype, up, tile),
            "ACT": activation.number,
            "GATED": activation.gated,
            "BIAS": up.bias,
        },
        grid=(-(-up.n // columns) * THREADS, tiles, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=((rows, up.n),),
        output_dtypes=(dtype,),
    )


def down_launch(dtype: str, down: Projection, rows_out: int, tiles: int, tile: int) -> Launch:
    """``moe_down``: every one of the `rows_out` rows must be the place of a row."""
    assert tiles <= MAX_TILES, "cut the rows first"
    return Launch(
        template={**_gemm_template(dtype, down, tile), "BIAS": down.bias},
        grid=(-(-down.n // (2 * STRIP)) * THREADS, tiles, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=((rows_out, down.n),),
        output_dtypes=(dtype,),
    )


def combine_launch(dtype: str, tokens: int, dims: int, add: bool) -> Launch:
    """``moe_combine``: weighted sums ``[tokens, dims]``, added to an earlier sum or not."""
    threads = tokens * dims // COMBINE_WIDTH
    return Launch(
        template={"T": dtype, "D": dims, "ADD": add},
        grid=(max(1, threads), 1, 1),
        threadgroup=(COMBINE_THREADS, 1, 1),
        output_shapes=((tokens, dims),),
        output_dtypes=(dtype,),
    )


@cache
def cuda_kernel_source(name: str) -> KernelSource:
    """A kernel of ``cuda/`` under a name that holds a digest of its text.

    MLX keeps compiled kernels on disk by name and template alone: without the digest a newer
    version of a kernel would run the old one's code.
    """
    source = load_kernel(name, "cuda")
    digest = hashlib.sha256(f"{source.header}\0{source.body}".encode()).hexdigest()[:10]
    return replace(source, name=f"{name}_{digest}")


def _gemm_template(dtype: str, projection: Projection, tile: int) -> dict[str, str | int | bool]:
    return {
        "T": dtype,
        "MODE": projection.mode,
        "GS": projection.spec.group_size,
        "K": projection.k,
        "N": projection.n,
        "BM": tile,
    }
