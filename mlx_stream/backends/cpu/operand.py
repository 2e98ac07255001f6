"""GEMM operands: quantized weights and activations in an order that is cheap to dequantize.

A matrix product does not care about the order of its inputs, so packed codes are unpacked plane
by plane (all codes at bit 0, then all at bit 4, ...) with whole-row masks instead of being
interleaved, and a plane's position 2^shift is divided out of the activations. Affine biases
become extra columns: sum_k (s q + b) x = sum_k s q x + b * (sum of x over the group).

    w operand [n, columns] = [plane 0 | plane 1 | ... | biases]
    x operand [columns, R] = [x of plane 0; x of plane 1 / 2^bits; ...; group sums of x]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mlx_stream.backends.cpu.dequant import Spec, dequantize, group_scales, unpack
from mlx_stream.backends.cpu.formats import to_float32

UNIT_BITS = 16


@dataclass(frozen=True)
class Layout:
    """Order of the columns of one projection's operands. Hashable: equal layouts share x."""

    input_dims: int  # K
    planes: int  # plane j holds inputs j, j + planes, j + 2 planes, ...
    plane_bits: int  # x of plane j is scaled by 2^(-plane_bits * j)
    group_size: int  # of the bias columns; 0: none

    @property
    def groups(self) -> int:
        return self.input_dims // self.group_size if self.group_size else 0

    @property
    def columns(self) -> int:
        return self.input_dims + self.groups

    @property
    def plane_dims(self) -> int:
        return self.input_dims // self.planes

    def weight_scratch(self, rows: int) -> int:
        """Elements of float32 scratch `fill_weight` needs for this many rows."""
        return 2 * rows * self.plane_dims if self.planes > 1 else 0


def layout_of(spec: Spec, input_dims: int) -> Layout:
    """The layout used for weights packed as `spec` says."""
    if spec.mode != "affine":
        return Layout(input_dims, 1, 0, 0)
    if UNIT_BITS % spec.bits or spec.bits == 8:
        return Layout(input_dims, 1, 0, spec.group_size)
    return Layout(input_dims, UNIT_BITS // spec.bits, spec.bits, spec.group_size)


def fill_activation(layout: Layout, x: np.ndarray, out: np.ndarray) -> None:
    """Write the x operand. x: [K, R] float32, any strides. out: [columns, R]."""
    dims, size = layout.plane_dims, layout.input_dims
    if layout.planes == 1:
        np.copyto(out[:size], x)
    for plane in range(layout.planes if layout.planes > 1 else 0):
        factor = np.float32(2.0 ** (-layout.plane_bits * plane))
        target = out[plane * dims : (plane + 1) * dims]
        np.multiply(x[plane :: layout.planes], factor, out=target)
    if layout.groups:
        grouped = x.reshape(layout.groups, layout.group_size, x.shape[1])
        np.add.reduce(grouped, axis=1, out=out[size:])


def fill_weight(
    layout: Layout,
    parts: Mapping[str, np.ndarray],
    dtypes: Mapping[str, str],
    spec: Spec,
    rows: slice,
    out: np.ndarray,
    scratch: np.ndarray,
) -> None:
    """Write the w operand of `rows`. out: [n, columns]; scratch: float32 [weight_scratch(n)]."""
    if not layout.groups:
        dequantize(parts, dtypes, spec, out, rows)
        return
    values, bias_columns = out[:, : layout.input_dims], out[:, layout.input_dims :]
    to_float32(parts["biases"][rows], dtypes["biases"], bias_columns)
    scales = group_scales(parts, dtypes, spec, rows)
    if layout.planes > 1:
        _fill_planes(layout, parts["weight"][rows], scales, values, scratch)
        return
    unpack(parts["weight"][rows], spec, values)
    grouped = values.reshape(len(values), layout.groups, layout.group_size)
    np.multiply(grouped, scales[..., None], out=grouped)


def _fill_planes(
    layout: Layout, weight: np.ndarray, scales: np.ndarray, out: np.ndarray, scratch: np.ndarray
) -> None:
    """out [n, planes * dims]: masked 16-bit units as floats, times the scale of their group."""
    rows, dims = len(weight), layout.plane_dims
    units = np.ascontiguousarray(weight).view(np.uint16)  # [n, dims]
    spread = scratch[: rows * dims].reshape(rows, dims)
    masked = scratch[rows * dims : 2 * rows * dims].view(np.uint16)[: rows * dims]
    masked = masked.reshape(rows, dims)
    np.copyto(spread.reshape(rows, layout.groups, -1), scales[..., None])
    planes = out.reshape(rows, layout.planes, dims)
    for plane in range(layout.planes):
        mask = np.uint16(((1 << layout.plane_bits) - 1) << (layout.plane_bits * plane))
        np.bitwise_and(units, mask, out=masked)
        np.copyto(planes[:, plane], masked)
    np.multiply(planes, spread[:, None], out=planes)
