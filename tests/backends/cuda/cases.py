"""Inputs of the grouped CUDA kernels, and what numpy says they must give.

The weights are packed by MLX and unpacked here, in numpy, from the formats' definitions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from mlx_stream.backends.kernels.grouped_cuda import (
    CudaActivation,
    Projection,
    build_tiles,
    combine_launch,
    cuda_kernel_source,
    down_launch,
    up_launch,
)
from mlx_stream.backends.kernels.launch import Launch
from mlx_stream.backends.kernels.source import KernelSource
from mlx_stream.storage.quant_spec import QuantSpec
from tests.kernel_shim.arrays import Buf, bf16
from tests.kernel_shim.run import Finding, run_on_cpu

SWIGLU = CudaActivation(0, True)
TOLERANCE = {"float16": 2e-3, "bfloat16": 1e-2}  # of the largest output
Array = np.ndarray | Buf


@dataclass(frozen=True)
class Case:
    """One launch and its expected output ``[R, N]``."""

    kernel: str
    launch: Launch
    inputs: tuple[Array, ...]
    expected: np.ndarray

    def run(self, source: KernelSource | None = None, **options) -> tuple[float, list[Finding]]:
        """Largest error relative to the largest output, and the checker's findings."""
        source = source or cuda_kernel_source(self.kernel)
        (y,), findings = run_on_cpu(source, self.launch, self.inputs, **options)
        error = np.abs(y.astype(np.float32) - self.expected).max() / np.abs(self.expected).max()
        return float(error), findings


def cast(values: np.ndarray, dtype: str) -> tuple[Array, np.ndarray]:
    """Rounded to `dtype` as a kernel gets it, and the same values as float32."""
    if dtype == "bfloat16":
        buf = bf16(values)
        return buf, buf.decoded()
    rounded = np.asarray(values, dtype)
    return rounded, rounded.astype(np.float32)


def as_input(array: mx.array) -> Array:
    """An MLX array as a kernel gets it."""
    if array.dtype == mx.bfloat16:
        return Buf(np.array(array.view(mx.uint16)), "bfloat16")
    return np.array(array)


FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def unpack(words: np.ndarray, scales: Array, biases: Array | None, spec: QuantSpec) -> np.ndarray:
    """``[E, n, k]`` float32 from packed weights."""
    shifts = np.arange(0, 32, spec.bits, dtype=np.uint32)
    q = (words[..., None] >> shifts & (2**spec.bits - 1)).reshape(*words.shape[:-1], -1)
    s = scales.decoded() if isinstance(scales, Buf) else scales
    if spec.mode == "mxfp4":
        s = np.exp2(s.astype(np.float32) - 127)
        return FP4[q] * np.repeat(s, spec.group_size, axis=-1)
    b = biases.decoded() if isinstance(biases, Buf) else biases
    s, b = (np.repeat(v.astype(np.float32), spec.group_size, axis=-1) for v in (s, b))
    return q.astype(np.float32) * s + b


def packed(
    rng: np.random.Generator, dtype: str, p: Projection, experts: int
) -> tuple[tuple[Array, ...], np.ndarray]:
    """Weight, scales and biases of random matrices, and their values."""
    w = rng.standard_normal((experts, p.n, p.k)).astype(np.float32) / math.sqrt(p.k)
    w *= np.exp2(rng.integers(-2, 3, (experts, 1, p.k // p.spec.group_size))).repeat(
        p.spec.group_size, axis=-1
    )  # groups that differ, so that a wrong group shows
    array = mx.array(w).astype(getattr(mx, dtype))
    q, s, *b = mx.quantize(array, p.spec.group_size, p.spec.bits, mode=p.spec.mode)
    words, scales = as_input(q), as_input(s)
    biases = as_input(b[0]) if b else cast(np.zeros(1), dtype)[0]
    return (words, scales, biases), unpack(words, scales, biases, p.spec)


def apply_activation(a: CudaActivation, gate: np.ndarray, up: np.ndarray | None) -> np.ndarray:
    """The activation's definition in numpy, by its number."""

    def sigmoid(x: np.ndarray) -> np.ndarray:
        return 1 / (1 + np.exp(-x))

    def gelu(x: np.ndarray) -> np.ndarray:
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def clip(x: np.ndarray) -> np.ndarray:
        return np.clip(x, -a.limit, a.limit)

    capped = np.minimum(gate, a.limit)
    formulas: dict[int, Callable[[], np.ndarray]] = {
        0: lambda: gate * sigmoid(gate) * up,
        1: lambda: np.minimum(gate * sigmoid(gate), a.limit) * clip(up),
        2: lambda: capped * sigmoid(capped) * clip(up),
        3: lambda: capped * sigmoid(a.alpha * capped) * (clip(up) + 1),
        4: lambda: gelu(gate) * up,
        16: lambda: gelu(gate),
        17: lambda: gate * (1 + np.vectorize(math.erf)(gate / math.sqrt(2))) / 2,
        18: lambda: gate * sigmoid(1.702 * gate),
        19: lambda: gate * sigmoid(gate),
        20: lambda: np.maximum(gate, 0),
        21: lambda: np.maximum(gate, 0) ** 2,
    }
    return formulas[a.number]()


def up_case(
    dtype: str,
    spec: QuantSpec,
    *,
    k: int,
    n: int,
    counts: Sequence[int],
    tile: int,
    activation: CudaActivation = SWIGLU,
    bias: bool = False,
    seed: int = 0,
) -> Case:
    """``moe_up`` on random data; rows take tokens in random order, some more than once."""
    rng = np.random.default_rng(seed)
    p, rows = Projection(spec, k, n, bias), int(sum(counts))
    x, x_values = cast(2 * rng.standard_normal((max(4, rows // 2), k)), dtype)
    tokens = rng.integers(0, len(x_values), rows).astype(np.int32)
    experts = np.repeat(np.arange(len(counts)), counts)
    values, arrays, biases = [], [], []
    for _ in range(2 if activation.gated else 1):
        planes, w = packed(rng, dtype, p, len(counts))
        b, b_values = cast(rng.standard_normal((len(counts), n)) if bias else np.zeros(1), dtype)
        y = np.stack([w[e] @ x_values[t] for e, t in zip(experts, tokens, strict=True)])
        values.append(y + b_values[experts] if bias else y)
        arrays.append(planes)
        biases.append(b)
    tiles = build_tiles(np.asarray(counts), tile)
    params = np.array([activation.limit, activation.alpha], np.float32)
    inputs = (x, tokens, tiles, *arrays[0], *arrays[-1], biases[0], biases[-1], params)
    launch = up_launch(dtype, p, activation, rows, len(tiles), tile)
    up = values[-1] if activation.gated else None
    return Case("moe_up", launch, inputs, apply_activation(activation, values[0], up))


def down_case(
    dtype: str,
    spec: QuantSpec,
    *,
    k: int,
    n: int,
    counts: Sequence[int],
    tile: int,
    bias: bool = False,
    seed: int = 0,
) -> Case:
    """``moe_down`` with random places."""
    rng = np.random.default_rng(seed)
    p, rows = Projection(spec, k, n, bias), int(sum(counts))
    h, h_values = cast(rng.standard_normal((rows, k)), dtype)
    places = rng.permutation(rows).astype(np.int32)
    experts = np.repeat(np.arange(len(counts)), counts)
    planes, w = packed(rng, dtype, p, len(counts))
    b, b_values = cast(rng.standard_normal((len(counts), n)) if bias else np.zeros(1), dtype)
    y = np.stack([w[e] @ v for e, v in zip(experts, h_values, strict=True)])
    expected = np.empty_like(y)
    expected[places] = y + b_values[experts] if bias else y
    tiles = build_tiles(np.asarray(counts), tile)
    launch = down_launch(dtype, p, rows, len(tiles), tile)
    return Case("moe_down", launch, (h, places, tiles, *planes, b), expected)


def combine_case(dtype: str, *, tokens: int, topk: int, dims: int, add: bool) -> Case:
    """``moe_combine`` where about a third of the places are empty."""
    rng = np.random.default_rng(topk)
    rows, row_values = cast(rng.standard_normal((tokens * topk, dims)), dtype)
    places = rng.permutation(tokens * topk).reshape(tokens, topk).astype(np.int32)
    places[rng.random(places.shape) < 0.3] = -1
    scores = rng.random((tokens, topk)).astype(np.float32)
    before, before_values = cast(rng.standard_normal((tokens, dims) if add else (1,)), dtype)
    weights = np.where(places < 0, 0, scores)
    expected = np.einsum("tk,tkd->td", weights, row_values[places])
    expected = expected + before_values if add else expected
    launch = combine_launch(dtype, tokens, dims, add)
    return Case("moe_combine", launch, (rows, places, scores, before), expected)


def mutated(kernel: str, old: str, new: str) -> KernelSource:
    """A kernel of ours with a bug put in; `old` must occur in its text exactly once."""
    source = cuda_kernel_source(kernel)
    assert (source.header + source.body).count(old) == 1, f"{old!r} is not in {kernel} once"
    return replace(
        source, header=source.header.replace(old, new), body=source.body.replace(old, new)
    )
