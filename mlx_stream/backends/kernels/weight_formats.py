"""How the kernels see one matrix of every expert: packing, shape, and what comes with it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

Planes = Mapping[tuple[str, str], mx.array]

FLOATS = ("float32", "float16", "bfloat16")
SMALLEST_DIM = 8  # MLX binds arrays below 8 elements in another address space
LARGEST_MATRIX = 1 << 32  # the kernels count the weights of one expert's matrix in 32 bits


@dataclass(frozen=True)
class WeightFormat:
    """`code` is the Format of ``metal/weights.h``; `group` weights share a scale (1 for plain)."""

    code: int
    group: int
    name: str

    @property
    def plain(self) -> bool:
        """Whether the weights are stored as floats."""
        return self.code == PLAIN

    @property
    def affine(self) -> bool:
        """Whether groups have a bias."""
        return self.name.startswith("affine")


PLAIN = 5
_AFFINE_CODES = {4: 0, 8: 1}
_AFFINE_GROUPS = (32, 64, 128)
_FIXED = {("mxfp4", 4, 32): 2, ("mxfp8", 8, 32): 3, ("nvfp4", 4, 16): 4}


def weight_format(mode: str, bits: int, group_size: int) -> WeightFormat | None:
    """The kernels' format of a quantization, None if they have none. ``"none"`` is unquantized."""
    if mode == "none":
        return WeightFormat(PLAIN, 1, "plain")
    if mode == "affine" and bits in _AFFINE_CODES and group_size in _AFFINE_GROUPS:
        return WeightFormat(_AFFINE_CODES[bits], group_size, f"affine{bits}")
    code = _FIXED.get((mode, bits, group_size))
    return None if code is None else WeightFormat(code, group_size, mode)


@dataclass(frozen=True)
class Matrix:
    """One projection of all experts of a group: ``[G, outputs, inputs]``, packed as `format`.

    Attributes:
        format: of the weights.
        outputs: rows of an expert's matrix.
        inputs: its columns, in weights.
        biased: whether a bias is added to the outputs.
        tensor_scaled: whether each expert has an nvfp4 tensor scale.
    """

    format: WeightFormat
    outputs: int
    inputs: int
    biased: bool
    tensor_scaled: bool


def quantization(linear: Any) -> tuple[str, int, int]:
    """(mode, bits, group size) of a switch projection; ``("none", 0, 0)`` if unquantized."""
    if hasattr(linear, "mode"):
        return linear.mode, linear.bits, linear.group_size
    return "none", 0, 0


def matrix_of(linear: Any, planes: Planes, name: str) -> Matrix | None:
    """What the planes of projection `name` hold; None if the kernels have no such format."""
    parts = {part for part in ("bias", "global_scale") if planes.get((name, part)) is not None}
    return matrix_from(linear, planes[name, "weight"].shape[1:], parts)


def matrix_from(linear: Any, shape: Sequence[int], parts: Collection[str]) -> Matrix | None:
    """As `matrix_of`, from one expert's weight ``[outputs, columns]`` and the parts beside it."""
    mode, bits, group_size = quantization(linear)
    packing = weight_format(mode, bits, group_size)
    if packing is None:
        return None
    outputs, columns = shape
    return Matrix(
        format=packing,
        outputs=outputs,
        inputs=columns if packing.plain else columns * 32 // bits,
        biased="bias" in parts,
        tensor_scaled="global_scale" in parts,
    )
