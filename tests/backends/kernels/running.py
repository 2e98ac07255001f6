"""Kernels under the shim: a runner for the production entry points, and expert layers to run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from mlx_stream.backends.kernels.launch import Launch
from mlx_stream.backends.kernels.source import KernelSource
from mlx_stream.backends.mlx_ops import grouped_mlp_ops
from tests.kernel_shim.arrays import Buf
from tests.kernel_shim.run import Finding, run_on_cpu

TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1e-2}

Edit = Callable[[KernelSource], KernelSource]


@dataclass
class ShimRunner:
    """Stands in for ``run_metal``; keeps what the checker found, and counts launches by name."""

    edit: Edit = lambda source: source
    seed: int = 0
    findings: list[Finding] = field(default_factory=list)
    launches: Counter[str] = field(default_factory=Counter)

    def __call__(
        self, source: KernelSource, launch: Launch, inputs: Sequence[mx.array]
    ) -> list[mx.array]:
        outputs, found = run_on_cpu(
            self.edit(source), launch, [storage(a) for a in inputs], seed=self.seed
        )
        self.findings += found
        self.launches[source.name] += 1
        return [
            mx.array(value).astype(getattr(mx, dtype))
            for value, dtype in zip(outputs, launch.output_dtypes, strict=True)
        ]


def storage(array: mx.array) -> np.ndarray | Buf:
    """An MLX array as the shim takes it."""
    if array.dtype == mx.bfloat16:
        return Buf(np.array(array.view(mx.uint16)), "bfloat16")
    return np.array(array)


def as_float32(array: mx.array) -> np.ndarray:
    """The values, exactly."""
    return np.array(array.astype(mx.float32))


def error(actual: mx.array, expected: mx.array) -> float:
    """Largest difference relative to the largest expected value."""
    want = as_float32(expected)
    return float(np.abs(as_float32(actual) - want).max() / np.abs(want).max())


Packing = tuple[str, int, int]  # mode, bits, group size
UNQUANTIZED: Packing = ("none", 0, 0)


@dataclass
class ExpertLayer:
    """A switch layer as the backend sees it: a module, and the planes that it was read into."""

    module: Any
    planes: dict[tuple[str, str], mx.array]
    names: tuple[str, ...]
    dims: tuple[int, int]

    def in_float32(self) -> dict[tuple[str, str], mx.array]:
        """The same weights for the twin: floats widened, packed ones as they are."""
        return {
            key: p if p.dtype in (mx.uint8, mx.uint32) else p.astype(mx.float32)
            for key, p in self.planes.items()
        }

    def twin(self, x: mx.array, rows: np.ndarray, ids: np.ndarray) -> mx.array:
        """The plain-ops answer, float32."""
        gathered = x.astype(mx.float32)[mx.array(rows)]
        return grouped_mlp_ops(self.module, self.in_float32(), gathered, mx.array(ids))


def make_layer(
    packing: Packing,
    experts: int,
    dims: tuple[int, int],
    activation: Any,
    dtype: mx.Dtype,
    *,
    mlp: bool = False,
    bias: bool = False,
    outer: Packing | None = None,
    seed: int = 0,
) -> ExpertLayer:
    """Random weights of about unit gain; `outer`: packing of the output projection if another."""
    mx.random.seed(seed)
    kind = SwitchMLP if mlp else SwitchGLU
    names = ("fc1", "fc2") if mlp else ("gate_proj", "up_proj", "down_proj")
    module = kind(dims[0], dims[1], experts, activation=activation, bias=bias)
    planes = {}
    for name in names:
        mode, bits, group = (outer or packing) if name == names[-1] else packing
        linear = module[name]
        linear.weight = mx.random.normal(linear.weight.shape) * (linear.input_dims**-0.5)
        if bias:
            linear.bias = mx.random.normal(linear.bias.shape)
        linear.set_dtype(dtype)
        if mode != "none":
            linear = linear.to_quantized(group, bits, mode)
            module[name] = linear
        for part in ("weight", "scales", "biases", "bias"):
            if linear.get(part) is not None:
                planes[name, part] = linear[part]
                linear[part] = None
    mx.eval(planes)
    return ExpertLayer(module, planes, names, dims)


def routed_rows(counts: Sequence[int], tokens: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Sorted rows with these counts per expert: the token of each, and its local expert."""
    ids = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
    return np.random.default_rng(seed).integers(0, tokens, len(ids)), ids


def tokens_of(count: int, dims: int, dtype: mx.Dtype, seed: int = 1) -> mx.array:
    """``[T, D]`` of about unit variance."""
    mx.random.seed(seed)
    return mx.random.normal((count, dims)).astype(dtype)


def substitute(name: str, old: str, new: str, *, count: int = 1) -> Edit:
    """An edit of one kernel's text; the text must occur `count` times, header and body together."""

    def edit(source: KernelSource) -> KernelSource:
        if source.name != name:
            return source
        found = source.header.count(old) + source.body.count(old)
        assert found == count, f"{old!r} occurs {found} times in {name}"
        return replace(
            source, header=source.header.replace(old, new), body=source.body.replace(old, new)
        )

    return edit


def packed_slots(
    layer: ExpertLayer,
    resident: Sequence[int],
    *,
    last: tuple[int, tuple[str, str]] | None = None,
    seed: int = 0,
) -> tuple[mx.array, dict[int, dict[tuple[str, str], int]]]:
    """An expert cache: the tensors of these experts, scattered over one buffer of uint32 words.

    Tensors lie in a random order, 16-byte aligned, with 0xff between them; `last` (an expert and a
    tensor) ends the buffer. Returns the words and the byte offset of each tensor of each expert.
    """
    tensors = [(expert, key) for expert in resident for key in layer.planes]
    np.random.default_rng(seed).shuffle(tensors)
    tensors.sort(key=lambda tensor: tensor == last)  # stable: only `last` moves
    places: dict[int, dict[tuple[str, str], int]] = {expert: {} for expert in resident}
    parts: list[np.ndarray] = [np.full(48, 0xFF, np.uint8)]
    offset = 48
    for expert, key in tensors:
        raw = storage(layer.planes[key][expert])
        flat = (raw.array if isinstance(raw, Buf) else raw).reshape(-1).view(np.uint8)
        gap = -len(flat) % 4 if (expert, key) == last else -len(flat) % 16 + 32
        places[expert][key] = offset
        parts += [flat, np.full(gap, 0xFF, np.uint8)]
        offset += len(flat) + gap
    return mx.array(np.concatenate(parts).view(np.uint32)), places
