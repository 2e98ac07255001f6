"""Builders shared by the CPU backend's tests: MLX weights as the raw views a reader delivers."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_stream.storage.quant_spec import QuantSpec

DTYPE_NAMES = {
    mx.float32: "F32",
    mx.bfloat16: "BF16",
    mx.float16: "F16",
    mx.uint8: "U8",
    mx.uint32: "U32",
}
AFFINE = [QuantSpec("affine", bits, group) for bits in (1, 2, 3, 4, 5, 6, 8) for group in (32, 128)]
MODES = [QuantSpec("mxfp4", 4, 32), QuantSpec("mxfp8", 8, 32), QuantSpec("nvfp4", 4, 16)]


def spec_id(spec: QuantSpec) -> str:
    return f"{spec.mode}-{spec.bits}-g{spec.group_size}"


def raw(array: mx.array) -> np.ndarray:
    """The stored bytes as numpy; bf16 as uint16."""
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def quantized(weight: mx.array, spec: QuantSpec) -> dict[str, mx.array]:
    """Parts of a quantized matrix (or stack of matrices)."""
    names = ("weight", "scales", "biases")
    parts = mx.quantize(weight, spec.group_size, spec.bits, mode=spec.mode)
    return dict(zip(names, parts, strict=False))


def dequantized(parts: dict[str, mx.array], spec: QuantSpec) -> np.ndarray:
    """MLX's answer in float32."""
    affine = spec.mode == "affine"
    scales = parts["scales"].astype(mx.float32) if affine else parts["scales"]
    biases = parts["biases"].astype(mx.float32) if affine else None
    result = mx.dequantize(
        parts["weight"],
        scales,
        biases,
        spec.group_size,
        spec.bits,
        mode=spec.mode,
        global_scale=parts.get("global_scale"),
        dtype=mx.float32,
    )
    return np.array(result)


def unaligned(array: np.ndarray) -> np.ndarray:
    """The same values in a view whose address is odd."""
    memory = bytearray(array.nbytes + 1)
    memory[1:] = array.tobytes()
    view = np.frombuffer(memory, array.dtype, offset=1).reshape(array.shape)
    assert array.itemsize == 1 or not view.flags.aligned
    return view


def expert_tensors(switch: nn.Module) -> tuple[list[dict], dict]:
    """Per-expert raw views of a SwitchGLU / SwitchMLP, and the dtype names of their keys."""
    stacked = {
        (name, part): value
        for name, projection in switch.children().items()
        if name != "activation"
        for part, value in projection.parameters().items()
        if isinstance(value, mx.array)
    }
    dtypes = {key: DTYPE_NAMES[value.dtype] for key, value in stacked.items()}
    arrays = {key: raw(value) for key, value in stacked.items()}
    count = len(next(iter(arrays.values())))
    experts = [{key: array[e] for key, array in arrays.items()} for e in range(count)]
    return experts, dtypes
