"""Decoding tables of the low-precision formats, and storage dtypes as float32.

Pure data: every table is built once, from the formats' definitions, and read-only.
"""

from __future__ import annotations

import functools

import numpy as np

# E2M1: sign, two exponent bits, one mantissa bit.
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP8_MAX = 448.0
FP4_MAX = 6.0


@functools.cache
def fp4_values() -> np.ndarray:
    """E2M1 codes as float32 [16]; code 8 is -0."""
    values = np.array(FP4_VALUES, np.float32)
    return np.concatenate([values, -values])


@functools.cache
def fp8_values() -> np.ndarray:
    """E4M3 (finite-only variant) codes as float32 [256]; 0x7f and 0xff are NaN."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    normal = (8 + mantissa) * 2.0 ** (exponent - 10)
    value = np.where(exponent == 0, mantissa * 2.0**-9, normal)
    value = np.where((code & 127) == 127, np.nan, value)
    return np.where(code & 128, -value, value).astype(np.float32)


@functools.cache
def e8m0_values() -> np.ndarray:
    """Powers of two 2^(code - 127) as float32 [256]; code 255 is inf, as in MLX."""
    bits = np.arange(256, dtype=np.uint32) << 23
    bits[0] = 1 << 22  # 2^-127 is subnormal
    return bits.view(np.float32)


@functools.cache
def code_table(bits: int, kind: str) -> np.ndarray:
    """All values packed in one byte, float32 [256, 8 / bits], lowest bits first.

    kind: 'int' (unsigned integers), 'fp4', 'fp8'. Bytes, although 16-bit units would halve the
    lookups: their table is 1 MB, and evicts from L2 what the lookups are for.
    """
    codes = np.arange(256, dtype=np.uint32)[:, None] >> np.arange(0, 8, bits, dtype=np.uint32)
    codes &= (1 << bits) - 1
    if kind == "fp4":
        return fp4_values()[codes]
    if kind == "fp8":
        return fp8_values()[codes]
    return codes.astype(np.float32)


def to_float32(array: np.ndarray, dtype: str, out: np.ndarray | None = None) -> np.ndarray:
    """Values of a stored float tensor as float32; bf16 comes as uint16.

    dtype: the safetensors name. Without `out`, an aligned float32 input is returned as it is.
    """
    if dtype == "BF16" and out is not None and out.flags.c_contiguous:
        np.copyto(out.view(np.uint32), array)
        np.left_shift(out.view(np.uint32), 16, out=out.view(np.uint32))
        return out
    if dtype == "BF16":  # a strided target is slow for ufuncs: shift first, copy after
        bits = array.astype(np.uint32)
        np.left_shift(bits, 16, out=bits)
        array, dtype = bits.view(np.float32), "F32"
    if dtype not in ("F32", "F16"):
        raise ValueError(f"expected a float tensor (F32, F16, BF16), got {dtype}")
    if out is not None:
        np.copyto(out, array)
        return out
    if array.dtype == np.float32 and array.flags.aligned:
        return array
    return array.astype(np.float32)
