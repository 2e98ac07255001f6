"""Between bytes and mx.arrays, by the dtype names of safetensors."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

# What mx.load makes of each dtype; eight-bit floats are bytes there.
FROM_FILE = {
    "BOOL": mx.bool_,
    "U8": mx.uint8,
    "I8": mx.int8,
    "U16": mx.uint16,
    "I16": mx.int16,
    "U32": mx.uint32,
    "I32": mx.int32,
    "U64": mx.uint64,
    "I64": mx.int64,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
    "F32": mx.float32,
    "F8_E4M3": mx.uint8,
    "F8_E8M0": mx.uint8,
}
TO_FILE = {
    mx.bool_: "BOOL",
    mx.uint8: "U8",
    mx.int8: "I8",
    mx.uint16: "U16",
    mx.int16: "I16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.uint64: "U64",
    mx.int64: "I64",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.float32: "F32",
}


def from_bytes(data: np.ndarray, dtype: str, shape: tuple[int, ...]) -> mx.array:
    """A copy of uint8 `data` as an array of a dtype of the file. Raises KeyError for others."""
    return mx.array(data).view(FROM_FILE[dtype]).reshape(shape)


def to_bytes(array: mx.array) -> np.ndarray:
    """The array's bytes, row by row, as uint8 ``[nbytes]``; evaluates it."""
    flat = mx.contiguous(array).reshape(-1)
    return np.array(flat if flat.dtype == mx.uint8 else flat.view(mx.uint8))
