"""mx.arrays as numpy memory and back, without copies. For the thread that owns the streams."""

from __future__ import annotations

import mlx.core as mx
import numpy as np


def evaluated(*arrays: mx.array | None) -> bool:
    """Evaluate; False inside mx.compile and other tracing, where arrays have no values."""
    try:
        mx.eval([array for array in arrays if array is not None])
    except ValueError:
        return False
    return True


def as_numpy(array: mx.array) -> np.ndarray:
    """View of an array's memory, evaluated; bf16 as uint16. Keeps the memory alive."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array, copy=False)


def empty_array(shape: tuple[int, ...]) -> tuple[mx.array, np.ndarray]:
    """A float32 mx.array and the writable numpy view to fill it through."""
    array = mx.zeros(shape, mx.float32)
    mx.eval(array)
    return array, np.array(array, copy=False)
