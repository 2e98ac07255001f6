"""What a conversion writes, as a checkpoint that nobody has on disk: names, shapes, config.

mlx-lm loads the source lazily, which settles every name, shape and dtype; no weight is read. The
result has made-up files and offsets, so that the packer plans it like any other checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_stream.convert.arrays import TO_FILE
from mlx_stream.convert.expert_inputs import layer_number, require_loadable
from mlx_stream.convert.options import Conversion
from mlx_stream.convert.widths import (
    ModuleWidth,
    cast_dtype,
    casts,
    converted_config,
    module_widths,
)
from mlx_stream.errors import DenseModelError, UnsupportedModelError
from mlx_stream.lazy_model import load_lazy
from mlx_stream.packed_model import packed_arguments
from mlx_stream.storage.checkpoint import Checkpoint, FileIdentity, TensorInfo
from mlx_stream.storage.expert_index import GLU, MLP, ExpertIndex, build_expert_index

SHARD_NBYTES = 5 << 30  # as mlx-lm's
_PROJECTIONS = {*GLU, *MLP, "gate_up_proj"}


@dataclass(frozen=True)
class ConversionPlan:
    """What a source becomes.

    Attributes:
        index: of what is written; its files and offsets are made up.
        widths: every module with a weight.
        config: config.json of what is written.
        model_config: as mlx-lm read it.
        counts: by layer number, how many experts it has.
        prefixes: by layer number, the path of the layer's experts.
        cast: names of the floats that get another dtype, and that dtype.
    """

    index: ExpertIndex
    widths: Mapping[str, ModuleWidth]
    config: dict[str, Any]
    model_config: dict[str, Any]
    counts: Mapping[int, int]
    prefixes: Mapping[int, str]
    cast: tuple[frozenset[str], mx.Dtype | None]


def plan_conversion(checkpoint: Checkpoint, conversion: Conversion) -> ConversionPlan:
    """Load lazily, decide widths, lay out.

    Raises:
        UnsupportedModelError, MissingTensorError: mlx-lm cannot load the source.
        DenseModelError: no routed experts.
        PackError: nothing can be quantized as it is asked.
    """
    model, config = load_source(checkpoint)
    prefixes = _expert_prefixes(checkpoint, model)
    widths = module_widths(model, conversion, frozenset(prefixes.values()))
    dtype = cast_dtype(config) if conversion.specs else None
    cast = frozenset(casts(model, dtype)), dtype
    shapes = _outputs(checkpoint, model, widths, cast)
    made = converted_config(config, widths, conversion)
    index = build_expert_index(_imagined(checkpoint, made, shapes))
    counts = {layer_number(f"{layer.name}."): layer.num_experts for layer in index.layers}
    return ConversionPlan(index, widths, made, config, counts, prefixes, cast)


def load_source(checkpoint: Checkpoint) -> tuple[nn.Module, dict[str, Any]]:
    """The source as mlx-lm loads it, lazily. Raises UnsupportedModelError, MissingTensorError."""
    found = checkpoint.config.get("quantization_config") or {}
    if not isinstance(found, dict):
        raise UnsupportedModelError(
            "config.json says in no known way how the weights are quantized",
            file=checkpoint.path / "config.json",
            expected="quantization_config as an object",
            actual=repr(found)[:100],
            remedy="download config.json again",
        )
    method = found.get("quant_method")
    if method in ("awq", "gptq", "bitnet"):
        raise UnsupportedModelError(
            "the source's quantization cannot be packed expert by expert",
            file=checkpoint.path / "config.json",
            expected="floats, 8-bit floats in blocks, mxfp4, or an MLX quantization",
            actual=f"quant_method {method!r}",
            remedy="convert it with mlx_lm.convert, then pack the result",
        )
    require_loadable(checkpoint)
    return load_lazy(checkpoint.path, **packed_arguments(checkpoint, False))


def _expert_prefixes(checkpoint: Checkpoint, model: nn.Module) -> dict[int, str]:
    """By layer number, the module that holds its experts' projections."""
    found: dict[int, str] = {}
    for path, module in model.named_modules():
        prefix, _, name = path.rpartition(".")
        stacked = "weight" in module and module.weight.ndim == 3
        if not (stacked and name in _PROJECTIONS) or hasattr(module, "num_heads"):
            continue
        number = layer_number(f"{prefix}.")
        if found.setdefault(number, prefix) != prefix:
            raise UnsupportedModelError(
                "a layer has two sets of experts",
                file=checkpoint.path,
                tensor=prefix,
                expected=found[number],
                actual=prefix,
                remedy="convert it with mlx_lm.convert, then pack the result",
            )
    if not found:
        raise DenseModelError(
            "The model has no routed experts, so there is nothing to stream.",
            file=checkpoint.path,
            expected="stacked expert tensors in mlx-lm's model",
            actual=f"model_type {checkpoint.config.get('model_type')!r}, none found",
            remedy="run dense models with mlx_lm.generate",
        )
    return found


def _outputs(
    checkpoint: Checkpoint,
    model: nn.Module,
    widths: Mapping[str, ModuleWidth],
    cast: tuple[frozenset[str], mx.Dtype | None],
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape) of every tensor that is written; a module's follow each other."""
    names, dtype = cast
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    scales_of = {path: m.scales for path, m in model.named_modules() if "scales" in m}
    for name, array in tree_flatten(model.parameters()):
        path, _, part = name.rpartition(".")
        width = widths.get(path)
        if name in names and dtype is not None:
            array = array.astype(dtype)
        if width is None or not width.changes or part not in ("weight", "scales", "biases"):
            found[name] = (_dtype(checkpoint, name, array), tuple(array.shape))
        elif part == "weight":
            scales = array if width.now is None else scales_of[path]
            if f"{path}.scales" in names and dtype is not None:
                scales = scales.astype(dtype)
            lazy = quantized_shape(array, width, scales.dtype)
            for suffix, a in zip(("weight", "scales", "biases"), lazy, strict=False):
                found[f"{path}.{suffix}"] = (_dtype(checkpoint, name, a), tuple(a.shape))
    return found


def quantized_shape(
    weight: mx.array, width: ModuleWidth, scales_dtype: mx.Dtype
) -> tuple[mx.array, ...]:
    """What quantizing the weight gives, never evaluated."""
    then, shape = width.then, list(weight.shape)
    assert then is not None
    if width.now is not None:
        shape[-1] = shape[-1] * 32 // width.now.bits
    floating = scales_dtype if mx.issubdtype(scales_dtype, mx.floating) else mx.bfloat16
    dtype = weight.dtype if width.now is None else floating
    floats = mx.zeros(shape, dtype=dtype)
    return tuple(mx.quantize(floats, then.group_size, then.bits, then.mode))


def _dtype(checkpoint: Checkpoint, name: str, array: mx.array) -> str:
    if array.dtype not in TO_FILE:
        raise UnsupportedModelError(
            "mlx-lm gives a weight a dtype that cannot be packed",
            file=checkpoint.path,
            tensor=name,
            expected=", ".join(TO_FILE.values()),
            actual=str(array.dtype),
            remedy="convert it with mlx_lm.convert, then pack the result",
        )
    return TO_FILE[array.dtype]


def _imagined(
    checkpoint: Checkpoint, config: dict[str, Any], shapes: dict[str, tuple[str, tuple[int, ...]]]
) -> Checkpoint:
    """A checkpoint of these tensors, in files of about SHARD_NBYTES."""
    sizes = {n: array_nbytes(dtype, shape) for n, (dtype, shape) in shapes.items()}
    shards: list[list[str]] = [[]]
    room = SHARD_NBYTES
    for name, nbytes in sizes.items():
        if shards[-1] and nbytes > room:
            shards.append([])
            room = SHARD_NBYTES
        shards[-1].append(name)
        room -= nbytes
    files, tensors = [], {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        at = 0
        for name in names:
            dtype, shape = shapes[name]
            tensors[name] = TensorInfo(name, number, dtype, shape, at, sizes[name])
            at += sizes[name]
        files.append(FileIdentity(Path(checkpoint.path / file), at, 0, 0, 0))
    return Checkpoint(checkpoint.path, config, tuple(files), tensors)


def array_nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of an array of a dtype of the file."""
    by_name = {name: d for d, name in TO_FILE.items()}
    return by_name[dtype].size * math.prod(shape)
