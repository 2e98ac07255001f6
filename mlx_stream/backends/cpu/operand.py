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

from mlx_stream.backends.cpu.dequant import Spec, byte_packs, dequantize, group_scales, unpack
from mlx_stream.backends.cpu.formats import to_float32

# Codes of these widths are unpacked by planes, from storage units of so many bits.
_UNIT_BITS = {1: 16, 2: 16, 4: 16, 3: 24, 6: 24}
PADDING = 16  # float32 elements: one cache line
TRANSPOSE_BLOCK = 512  # inputs at a time; a multiple of every group size and plane count


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
        return 3 * rows * self.plane_dims if self.planes > 1 else 0


def layout_of(spec: Spec, input_dims: int) -> Layout:
    """The layout used for weights packed as `spec` says."""
    if spec.mode != "affine":
        return Layout(input_dims, 1, 0, 0)
    unit_bits = _UNIT_BITS.get(spec.bits, spec.bits)
    return Layout(input_dims, unit_bits // spec.bits, spec.bits, spec.group_size)


def fill_activation(layout: Layout, x: np.ndarray, out: np.ndarray) -> None:
    """Write the x operand. x: [K, R] float32, any strides. out: [columns, R]."""
    if out.strides[0] < out.strides[1] or x.strides[0] > x.strides[1]:
        return _fill_inputs(layout, x, out, slice(0, layout.input_dims))
    # A transpose. Rows of x are often a power of two apart, so one column of it falls into a
    # few cache sets: go through copies with padded rows.
    padded = np.empty((x.shape[1], TRANSPOSE_BLOCK + PADDING), np.float32)
    turned = np.empty((TRANSPOSE_BLOCK, x.shape[1]), np.float32)
    for start in range(0, layout.input_dims, TRANSPOSE_BLOCK):
        inputs = slice(start, min(start + TRANSPOSE_BLOCK, layout.input_dims))
        count = inputs.stop - start
        np.copyto(padded[:, :count], x[inputs].T)
        np.copyto(turned[:count], padded[:, :count].T)
        _fill_inputs(layout, turned[:count], out, inputs)


def _fill_inputs(layout: Layout, x: np.ndarray, out: np.ndarray, inputs: slice) -> None:
    """The part of the x operand that comes from `inputs` (whole groups). x: those inputs."""
    for plane in range(layout.planes):
        base = plane * layout.plane_dims
        first, last = inputs.start // layout.planes, inputs.stop // layout.planes
        target = out[base + first : base + last]
        if plane == 0:
            np.copyto(target, x[:: layout.planes])
        else:
            factor = np.float32(2.0 ** (-layout.plane_bits * plane))
            np.multiply(x[plane :: layout.planes], factor, out=target)
    if layout.groups:
        size, base = layout.group_size, layout.input_dims
        target = out[base + inputs.start // size : base + inputs.stop // size]
        np.add.reduce(x.reshape(len(target), size, x.shape[1]), axis=1, out=target)


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
    np.multiply(values, np.repeat(scales, layout.group_size, axis=1), out=values)


def _fill_planes(
    layout: Layout, weight: np.ndarray, scales: np.ndarray, out: np.ndarray, scratch: np.ndarray
) -> None:
    """out [n, planes * dims]: masked 16-bit units as floats, times the scale of their group.

    ufuncs on contiguous arrays run in one loop, on anything else in one slow call per row; plain
    copies do not care. So planes are computed in contiguous scratch and copied into place.
    """
    rows, dims = len(weight), layout.plane_dims
    units = _units(layout, np.ascontiguousarray(weight))  # [n, dims]
    spread, values, memory = scratch.reshape(3, rows, dims)
    masked = memory.reshape(-1).view(units.dtype)[: units.size].reshape(rows, dims)
    signed = masked.view(np.int32) if masked.itemsize == 4 else masked  # converts faster
    np.copyto(spread.reshape(rows, layout.groups, -1), scales[..., None])
    planes = out.reshape(rows, layout.planes, dims)
    for plane in range(layout.planes):
        mask = ((1 << layout.plane_bits) - 1) << (layout.plane_bits * plane)
        np.bitwise_and(units, units.dtype.type(mask), out=masked)
        np.copyto(values, signed, casting="unsafe")
        np.multiply(values, spread, out=values)
        np.copyto(planes[:, plane], values)


def _units(layout: Layout, weight: np.ndarray) -> np.ndarray:
    """The storage units of packed rows [n, words]: uint16, or uint32 that hold 24 bits each."""
    if layout.planes * layout.plane_bits == 16:
        return weight.view(np.uint16)
    return byte_packs(weight.view(np.uint8), 3, np.uint32)
