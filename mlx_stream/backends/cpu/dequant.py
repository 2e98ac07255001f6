"""Quantized weights as float32, in the order MLX packs them.

`dequantize` is the plain contract: rows of the [out, in] matrix as float32, equal to
`mx.dequantize` in float32. Its temporaries are about as large as the block of rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

from mlx_stream.backends.cpu.formats import (
    FP4_MAX,
    FP8_MAX,
    code_table,
    e8m0_values,
    fp8_values,
    to_float32,
)


class Spec(Protocol):
    """What this module reads of a storage QuantSpec."""

    @property
    def mode(self) -> str: ...
    @property
    def bits(self) -> int: ...
    @property
    def group_size(self) -> int: ...


def dequantize(
    parts: Mapping[str, np.ndarray],
    dtypes: Mapping[str, str],
    spec: Spec,
    out: np.ndarray,
    rows: slice,
) -> None:
    """Write float32 weights of `rows` of the [out, in] matrix into out [rows, in].

    parts: 'weight' uint32 [out, in * bits / 32] (floats, bf16 as uint16, for mode 'none'),
    'scales' and for affine 'biases' [out, in / group_size], for nvfp4 optionally 'global_scale'.
    dtypes: their safetensors names. The views may be unaligned. out: rows contiguous.
    """
    weight = parts["weight"][rows]
    if spec.mode == "none":
        to_float32(weight, dtypes["weight"], out)
        return
    unpack(weight, spec, out)
    # Spread out first: one ufunc loop over everything is 3 times faster than one per group.
    scales = group_scales(parts, dtypes, spec, rows)
    np.multiply(out, np.repeat(scales, spec.group_size, axis=1), out=out)
    if spec.mode == "affine":
        biases = to_float32(parts["biases"][rows], dtypes["biases"])
        np.add(out, np.repeat(biases, spec.group_size, axis=1), out=out)


def group_scales(
    parts: Mapping[str, np.ndarray], dtypes: Mapping[str, str], spec: Spec, rows: slice
) -> np.ndarray:
    """The scales of `rows` as float32 [rows, groups], any nvfp4 tensor scale included."""
    scales = parts["scales"][rows]
    if spec.mode == "affine":
        return to_float32(scales, dtypes["scales"])
    if spec.mode in ("mxfp4", "mxfp8"):
        return e8m0_values()[scales]
    if spec.mode != "nvfp4":
        raise ValueError(f"unknown quantization mode {spec.mode!r}")
    scales = fp8_values()[scales]
    if (global_scale := parts.get("global_scale")) is not None:
        tensor_scale = to_float32(global_scale, dtypes["global_scale"]).reshape(())
        scales = scales * (tensor_scale / np.float32(FP8_MAX * FP4_MAX))
    return scales


def unpack(weight: np.ndarray, spec: Spec, out: np.ndarray) -> None:
    """Write the unscaled values of packed uint32 words [n, words] into out [n, in] float32."""
    weight = np.ascontiguousarray(weight)  # rows of a view are contiguous: no copy
    if spec.bits in (3, 5, 6):
        _unpack_odd(weight.view(np.uint8), spec.bits, out)
    elif spec.bits == 8 and spec.mode == "affine":
        np.copyto(out, weight.view(np.uint8))
    else:
        kind = {"affine": "int", "mxfp8": "fp8"}.get(spec.mode, "fp4")
        _take(code_table(spec.bits, kind), weight.view(np.uint8), out)


# numpy's take() has constant-size inner loops for items of these sizes.
_ITEM_TYPES = {4: np.float32, 8: np.uint64, 16: np.complex128}


def _take(table: np.ndarray, units: np.ndarray, out: np.ndarray) -> None:
    """out [n, units * k] = table[units], k float32 values at a time. table: [codes, k]."""
    per_unit = table.shape[1]
    if (item := _ITEM_TYPES.get(4 * per_unit)) is not None:
        # 'clip' never clips here; unlike 'raise' it writes straight into `out`.
        np.take(table.view(item)[:, 0], units, out=out.view(item), mode="clip")
    else:
        shaped = out.reshape(*units.shape, per_unit)
        np.take(table, units, axis=0, out=shaped, mode="clip")


def _unpack_odd(data: np.ndarray, bits: int, out: np.ndarray) -> None:
    """3, 5 and 6 bits: a little-endian bit stream of whole packs of 3 or 5 bytes.

    data: uint8 [n, in * bits / 8].
    """
    pack_bytes, word = (5, np.uint64) if bits == 5 else (3, np.uint32)
    stream = byte_packs(data, pack_bytes, word)
    values = out.reshape(*stream.shape, -1)
    mask = word((1 << bits) - 1)
    for lane in range(8 * pack_bytes // bits):
        np.copyto(values[..., lane], (stream >> word(bits * lane)) & mask, casting="unsafe")


def byte_packs(data: np.ndarray, size: int, word: type[np.unsignedinteger]) -> np.ndarray:
    """Every `size` bytes of data [n, bytes] as one little-endian integer [n, bytes / size]."""
    packs = data.reshape(data.shape[0], -1, size)
    stream = packs[..., 0].astype(word)
    for byte in range(1, size):
        stream |= packs[..., byte].astype(word) << word(8 * byte)
    return stream
