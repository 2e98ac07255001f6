"""Kernels and data for the shim's own tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mlx_stream.backends.kernels.launch import Launch
from mlx_stream.backends.kernels.source import KernelSource, Language, read_kernel

from . import Buf, bf16

KERNELS = Path(__file__).parent / "kernels"
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
AFFINE, MXFP4 = 0, 1


def inline_kernel(
    body: str,
    *,
    inputs: str = "x",
    outputs: str = "y",
    template: str = "",
    header: str = "",
    language: Language = "metal",
) -> KernelSource:
    """A kernel written in a test, as the loader would give it."""
    start = "#include <metal_stdlib>\nusing namespace metal;\n" if language == "metal" else ""
    return KernelSource(
        name="inline_kernel",
        inputs=tuple(inputs.split()),
        outputs=tuple(outputs.split()),
        template=tuple(tuple(item.split("=")) for item in template.split()),
        header=start + header,
        body=body + "\n",
        path="inline",
        language=language,
    )


def edited(source: KernelSource, old: str, new: str) -> KernelSource:
    """The kernel with one planted change, which must apply exactly once."""
    count = source.body.count(old) + source.header.count(old)
    assert count == 1, f"{old!r} occurs {count} times"
    return replace(
        source, body=source.body.replace(old, new), header=source.header.replace(old, new)
    )


@dataclass(frozen=True)
class Case:
    """A launch of moe_gemm with its inputs and what numpy computes for them."""

    source: KernelSource
    launch: Launch
    inputs: list[np.ndarray | Buf]
    expected: np.ndarray

    def error(self, output: np.ndarray) -> float:
        """Largest deviation relative to the largest expected value."""
        scale = np.abs(self.expected).max()
        return float(np.abs(output.astype(np.float32) - self.expected).max() / scale)


def cast(values: np.ndarray, dtype: str) -> np.ndarray | Buf:
    """Values rounded to the named type."""
    return bf16(values) if dtype == "bfloat16" else values.astype(dtype)


def as_float(array: np.ndarray | Buf) -> np.ndarray:
    """The array's values as float32."""
    return (array.decoded() if isinstance(array, Buf) else array).astype(np.float32)


def quantized(
    rng: np.random.Generator, shape: tuple[int, int, int], mode: int, dtype: str
) -> tuple[list[np.ndarray | Buf], np.ndarray]:
    """Random 4-bit weights ``[E, N, K]``: (packed, scales, biases) and their values."""
    experts, rows, depth = shape
    codes = rng.integers(0, 16, shape, dtype=np.uint8)
    nibbles = codes.reshape(experts, rows, depth // 8, 8).astype(np.uint32)
    packed = (nibbles << np.arange(0, 32, 4, dtype=np.uint32)).sum(-1, dtype=np.uint32)
    if mode == AFFINE:
        groups = (experts, rows, depth // 64)
        scales = cast(rng.uniform(0.01, 0.03, groups), dtype)
        biases = cast(rng.uniform(-0.2, -0.1, groups), dtype)
        values = codes * np.repeat(as_float(scales), 64, -1) + np.repeat(as_float(biases), 64, -1)
    else:
        scales = rng.integers(120, 125, (experts, rows, depth // 32), dtype=np.uint8)
        biases = np.zeros_like(scales)
        values = FP4[codes] * np.repeat(np.exp2(scales.astype(np.float32) - 127), 32, -1)
    return [packed, scales, biases], as_float(cast(values.astype(np.float32), dtype))


def tile_map(offsets: np.ndarray, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Expert and first row of each tile; a tile never holds rows of two experts."""
    tiles = [
        (expert, row)
        for expert in range(len(offsets) - 1)
        for row in range(offsets[expert], offsets[expert + 1], rows)
    ]
    experts, starts = zip(*tiles, strict=True)
    return np.array(experts, np.int32), np.array(starts, np.int32)


def moe_case(
    language: Language,
    dtype: str,
    mode: int = AFFINE,
    *,
    shape: tuple[int, int, int] = (4, 64, 128),
    tokens: int = 50,
) -> Case:
    """moe_gemm over random tokens; shape is ``[E, N, K]``."""
    rng = np.random.default_rng(0)
    experts, rows, depth = shape
    x = cast(rng.standard_normal((tokens, depth), np.float32), dtype)
    chosen = np.sort(rng.integers(0, experts, tokens))
    offsets = np.searchsorted(chosen, np.arange(experts + 1)).astype(np.int32)
    # Padding keeps small arrays out of Metal's constant address space (fewer than 8 elements).
    padded = np.concatenate([offsets, np.full(8, 99, np.int32)])
    tile_expert, tile_row = tile_map(offsets, 32)
    gate, gate_values = quantized(rng, shape, mode, dtype)
    up, up_values = quantized(rng, shape, mode, dtype)
    g = np.einsum("tk,tnk->tn", as_float(x), gate_values[chosen])
    u = np.einsum("tk,tnk->tn", as_float(x), up_values[chosen])
    suffix = {"metal": "metal/moe_gemm.metal", "cuda": "cuda/moe_gemm.cu"}[language]
    return Case(
        source=read_kernel(KERNELS / suffix),
        launch=Launch(
            template={"T": dtype, "MODE": mode, "GATED": True, "K": depth, "N": rows},
            grid=(rows // 32 * 128, len(tile_expert), 1),
            threadgroup=(128, 1, 1),
            output_shapes=((tokens, rows),),
            output_dtypes=(dtype,),
        ),
        inputs=[x, *gate, *up, tile_expert, tile_row, padded],
        expected=(g / (1 + np.exp(-g)) * u).astype(np.float32),
    )


def launch(
    threads: int,
    outputs: Sequence[tuple[tuple[int, ...], str]],
    *,
    group: int | None = None,
    template: dict[str, str | int | bool] | None = None,
    **options: float,
) -> Launch:
    """A one-dimensional launch of an inline kernel."""
    return Launch(
        template=template or {},
        grid=(threads, 1, 1),
        threadgroup=(group or threads, 1, 1),
        output_shapes=tuple(shape for shape, _ in outputs),
        output_dtypes=tuple(dtype for _, dtype in outputs),
        **options,
    )
