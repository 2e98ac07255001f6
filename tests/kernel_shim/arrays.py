"""Arrays as kernels see them: raw storage plus an element type that numpy may not have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Buf:
    """Raw storage and its element type's name; needed for bfloat16, which numpy lacks.

    Attributes:
        array: the elements; bfloat16 as uint16 bit patterns.
        dtype: name as MLX spells it, ``"bfloat16"`` or numpy's own.
    """

    array: np.ndarray
    dtype: str

    def __post_init__(self) -> None:
        if storage_dtype(self.dtype) != self.array.dtype:
            raise TypeError(f"{self.dtype} is stored as {storage_dtype(self.dtype)}")

    def decoded(self) -> np.ndarray:
        """The values: bfloat16 widened to float32 without loss, all else as it is."""
        if self.dtype != "bfloat16":
            return self.array
        return (self.array.astype(np.uint32) << 16).view(np.float32)


def storage_dtype(name: str) -> np.dtype:
    """The numpy dtype that holds elements of the named type."""
    return np.dtype("uint16" if name == "bfloat16" else name)


def bf16(values: Any) -> Buf:
    """Round to bfloat16, nearest even. Exact for values that came from bfloat16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return Buf(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16), "bfloat16")


def as_buf(array: np.ndarray | Buf) -> Buf:
    """An input as row-contiguous storage, as MLX passes it to a kernel."""
    if isinstance(array, Buf):
        return Buf(np.ascontiguousarray(array.array).reshape(array.array.shape), array.dtype)
    array = np.asarray(array)
    return Buf(np.ascontiguousarray(array).reshape(array.shape), array.dtype.name)
