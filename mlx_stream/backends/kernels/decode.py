"""The expert MLP of a few tokens by the Metal kernels, with weights anywhere in one buffer.

The cache is one array of uint32 words; a slot table on the device says where each expert's tensors
are, so the router's choice need not come back to the host. An expert that is not in the cache
gives NaN, never another expert's answer: the caller makes its choices resident first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_stream.backends.kernels.activations import KernelActivation
from mlx_stream.backends.kernels.grouped import Runner
from mlx_stream.backends.kernels.launch import Launch, dtype_name, run_metal
from mlx_stream.backends.kernels.source import load_kernel
from mlx_stream.backends.kernels.weight_formats import Matrix

# Columns and rows of a slot table; the same numbers as in metal/decode.h.
PARTS = ("weight", "scales", "biases", "bias", "global_scale")
PROJECTIONS = {"gate_proj": 0, "fc1": 0, "up_proj": 1, "down_proj": 2, "fc2": 2}
ABSENT = 0xFFFFFFFF
ALIGNMENT = 16  # bytes, of every tensor in the buffer

MAX_TOKENS = 8  # above, the tiled kernels read each expert once instead of once a token
THREADS, OUTPUTS = 64, 8  # a threadgroup is two simdgroups of four outputs each


@dataclass(frozen=True)
class DecodeLayer:
    """What the kernels are compiled for. `floats`: dtype of the checkpoint's floats."""

    inner: Matrix  # [F, D] gate and up, or fc1
    outer: Matrix  # [D, F]
    activation: KernelActivation
    floats: str


def slot_table(
    num_experts: int, resident: Mapping[int, Mapping[tuple[str, str], int]]
) -> np.ndarray:
    """``[E, 3, 5]`` uint32 word offsets from byte offsets per resident expert and tensor."""
    table = np.full((num_experts, 3, len(PARTS)), ABSENT, dtype=np.uint32)
    for expert, tensors in resident.items():
        for (projection, part), start in tensors.items():
            assert start % ALIGNMENT == 0, f"{projection}.{part} of a slot is not aligned"
            table[expert, PROJECTIONS[projection], PARTS.index(part)] = start // 4
    return table


def decode_mlp_metal(
    layer: DecodeLayer,
    x: mx.array,
    ids: mx.array,
    slots: mx.array,
    table: mx.array,
    scores: mx.array | None = None,
    *,
    run: Runner = run_metal,
) -> mx.array:
    """``[T, D]`` weighted sums when scores are given, else ``[T, K, D]``.

    Args:
        layer: formats and shapes.
        x: ``[T, D]``, a handful: every (token, expert) pair reads its expert's weights.
        ids: ``[T, K]`` int32 or uint32 expert ids.
        slots: uint32 words that hold the resident experts' tensors.
        table: ``[E, 3, 5]`` of `slot_table`.
        scores: ``[T, K]`` router weights.
    """
    tokens, top_k = ids.shape
    dtype = dtype_name(x.dtype)
    dims = mx.array([layer.inner.outputs, layer.outer.outputs], dtype=mx.int32)
    constants = mx.array([layer.activation.a, layer.activation.b], dtype=mx.float32)
    (h,) = run(
        load_kernel("expert_decode_up", "metal"),
        decode_up_launch(layer, dtype, tokens, top_k),
        [x, ids, slots, table, dims, constants],
    )
    (y,) = run(
        load_kernel("expert_decode_down", "metal"),
        decode_down_launch(layer, dtype, tokens, top_k, combined=scores is not None),
        [h, ids, slots, table, dims, constants if scores is None else scores],
    )
    return y


def decode_up_launch(layer: DecodeLayer, dtype: str, tokens: int, top_k: int) -> Launch:
    """Launch of ``expert_decode_up``."""
    template = {
        "T": dtype,
        "S": layer.floats,
        "FORMAT": layer.inner.format.code,
        "GROUP": layer.inner.format.group,
        "ACT": layer.activation.code,
        "GATED": layer.activation.gated,
        "BIASED": layer.inner.biased,
        "GLOBAL": layer.inner.tensor_scaled,
    }
    shape = (tokens * top_k, layer.inner.outputs)
    return _rowwise(template, layer.inner.outputs, tokens * top_k, shape, dtype)


def decode_down_launch(
    layer: DecodeLayer, dtype: str, tokens: int, top_k: int, *, combined: bool
) -> Launch:
    """Launch of ``expert_decode_down``."""
    template = {
        "T": dtype,
        "S": layer.floats,
        "FORMAT": layer.outer.format.code,
        "GROUP": layer.outer.format.group,
        "COMBINED": combined,
        "BIASED": layer.outer.biased,
        "GLOBAL": layer.outer.tensor_scaled,
    }
    outputs = layer.outer.outputs
    shape = (tokens, outputs) if combined else (tokens, top_k, outputs)
    return _rowwise(template, outputs, tokens if combined else tokens * top_k, shape, dtype)


def _rowwise(
    template: dict[str, Any], outputs: int, products: int, shape: tuple[int, ...], dtype: str
) -> Launch:
    return Launch(
        template=template,
        grid=(-(-outputs // OUTPUTS) * THREADS, products, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=(shape,),
        output_dtypes=(dtype,),
    )
