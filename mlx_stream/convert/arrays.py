"""Between bytes and mx.arrays, by the dtype names of safetensors."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_stream.backends.file_dtypes import FILE_NAMES

TO_FILE = FILE_NAMES
# What mx.load makes of each dtype; eight-bit floats are bytes there.
FROM_FILE = {name: dtype for dtype, name in FILE_NAMES.items()} | {
    "F8_E4M3": mx.uint8,
    "F8_E8M0": mx.uint8,
}


def from_bytes(data: np.ndarray, dtype: str, shape: tuple[int, ...]) -> mx.array:
    """A copy of uint8 `data` as an array of a dtype of the file. Raises KeyError for others."""
    return mx.array(data).view(FROM_FILE[dtype]).reshape(shape)


def to_bytes(array: mx.array) -> np.ndarray:
    """The array's bytes, row by row, as uint8 ``[nbytes]``; evaluates it."""
    flat = mx.contiguous(array).reshape(-1)
    return np.array(flat if flat.dtype == mx.uint8 else flat.view(mx.uint8))
