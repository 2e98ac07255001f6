"""The text MLX compiles for a kernel, built from the same parts and by the same rules.

`metal_kernel` follows mlx/backend/common/metal_kernel.cpp, `cuda_kernel` follows
mlx/backend/cuda/custom_kernel.cpp. test_export.py holds the first against what MLX itself records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mlx_stream.backends.kernels.launch import Launch, TemplateValue
from mlx_stream.backends.kernels.source import KernelSource

from .arrays import Buf, storage_dtype

# An input with fewer elements is passed in Metal's constant address space.
MIN_DEVICE_SIZE = 8
INPUT, OUTPUT, FILLED_OUTPUT = 0, 1, 2  # state.h: Buffer.kind

# name -> (type, expression on `const ShimIds& i` of the shim), in MLX's order
METAL_ATTRIBUTES = {
    "dispatch_quadgroups_per_threadgroup": ("uint", "i.simdgroups * 8"),
    "dispatch_simdgroups_per_threadgroup": ("uint", "i.simdgroups"),
    "dispatch_threads_per_threadgroup": ("uint3", "shim_uint3(i.group_threads)"),
    "grid_origin": ("uint3", "uint3{0, 0, 0}"),
    "grid_size": ("uint3", "shim_uint3(i.grid_threads)"),
    "quadgroup_index_in_threadgroup": ("uint", "i.index / 4"),
    "quadgroups_per_threadgroup": ("uint", "i.simdgroups * 8"),
    "simdgroup_index_in_threadgroup": ("uint", "i.simdgroup"),
    "simdgroups_per_threadgroup": ("uint", "i.simdgroups"),
    "thread_execution_width": ("uint", "32"),
    "thread_index_in_quadgroup": ("uint", "i.index % 4"),
    "thread_index_in_simdgroup": ("uint", "i.lane"),
    "thread_index_in_threadgroup": ("uint", "i.index"),
    "thread_position_in_grid": ("uint3", "shim_uint3(i.thread_in_grid)"),
    "thread_position_in_threadgroup": ("uint3", "shim_uint3(i.thread_in_group)"),
    "threadgroup_position_in_grid": ("uint3", "shim_uint3(i.group_in_grid)"),
    "threadgroups_per_grid": ("uint3", "shim_uint3(i.groups)"),
    "threads_per_grid": ("uint3", "shim_uint3(i.grid_threads)"),
    "threads_per_simdgroup": ("uint", "32"),
    "threads_per_threadgroup": ("uint3", "shim_uint3(i.group_threads)"),
}
METAL_TYPES = {"bool": "bool", "float32": "float", "float16": "float16_t", "bfloat16": "bfloat16_t"}
CUDA_TYPES = {
    "bool": "bool",
    "float32": "float",
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
}


@dataclass(frozen=True)
class Argument:
    """One buffer of a kernel: its declaration, and what the shim puts into it."""

    name: str
    type: str
    data: np.ndarray
    kind: int
    by_value: bool = False  # a reference in Metal, a value in CUDA


@dataclass(frozen=True)
class KernelText:
    """A kernel's full text in the parts that the shim treats differently; `text` joins them."""

    header: str
    opening: str
    body: str
    closing: str
    arguments: tuple[Argument, ...]
    call: str  # the kernel's name with template arguments
    attributes: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """What MLX hands to the compiler, after its own standard header."""
        return self.header + self.opening + self.body + self.closing


def metal_kernel(source: KernelSource, launch: Launch, inputs: Sequence[Buf]) -> KernelText:
    """The text of a Metal kernel for these inputs."""
    arguments: list[Argument] = []
    for name, buf in zip(source.inputs, inputs, strict=True):
        space = "constant" if buf.array.size < MIN_DEVICE_SIZE else "device"
        scalar = buf.array.ndim == 0
        kind = f"const {space} {_type(buf.dtype, METAL_TYPES)}{'&' if scalar else '*'}"
        arguments.append(Argument(name, kind, buf.array, INPUT, by_value=scalar))
        types = ("const constant int*", "const constant int64_t*", "const constant int&")
        arguments += _dimensions(source, name, buf, types)
    arguments += _outputs(launch, source, "device ", METAL_TYPES)
    attributes = tuple(name for name in METAL_ATTRIBUTES if name in source.body)
    parameters = [f"  {a.type} {a.name} [[buffer({i})]]" for i, a in enumerate(arguments)]
    parameters += [f"  {METAL_ATTRIBUTES[name][0]} {name} [[{name}]]" for name in attributes]
    name = _metal_name(source, launch, inputs)
    values = ", ".join(_metal_value(v) for v in launch.template.values())
    call = f"{name}<{values}>" if values else name
    opening = "".join(
        (f"template <{_metal_parameters(launch)}>\n" if values else "")
        + f"[[kernel]] void {name}(\n"
        + ",\n".join(parameters)
        + ") {\n"
    )
    instantiation = f'\ntemplate [[host_name("{name}")]] [[kernel]] decltype({call}) {call};\n'
    return KernelText(
        header=source.header,
        opening=opening,
        body=source.body,
        closing="\n}\n" + (instantiation if values else ""),
        arguments=tuple(arguments),
        call=call,
        attributes=attributes,
    )


def cuda_kernel(source: KernelSource, launch: Launch, inputs: Sequence[Buf]) -> KernelText:
    """The text of a CUDA kernel for these inputs, without MLX's includes before it."""
    arguments: list[Argument] = []
    for name, buf in zip(source.inputs, inputs, strict=True):
        kind = f"const {_type(buf.dtype, CUDA_TYPES)}*"
        arguments.append(Argument(name, kind, buf.array, INPUT))
        arguments += _dimensions(source, name, buf, ("Shape", "Strides", "int"), cuda=True)
    arguments += _outputs(launch, source, "", CUDA_TYPES)
    name = f"custom_kernel_{source.name}"
    grid_constant = {"Shape", "Strides", "int"}
    parameters = [
        f"    {'const __grid_constant__ ' if a.type in grid_constant else ''}{a.type} {a.name}"
        for a in arguments
    ]
    constants = "".join(_cuda_constant(n, v) for n, v in launch.template.items())
    opening = (
        "namespace mlx::core::cu {\n\nnamespace cg = cooperative_groups;\n\n"
        + f"__global__ void {name}(\n"
        + ",\n".join(parameters)
        + f") {{\n{constants}\n"
    )
    return KernelText(
        header=source.header,
        opening=opening,
        body=source.body,
        closing="\n}\n\n} // namespace mlx::core::cu\n",
        arguments=tuple(arguments),
        call=f"mlx::core::cu::{name}",
    )


def nvcc_text(source: KernelSource, launch: Launch, inputs: Sequence[Buf]) -> str:
    """A CUDA kernel as a file for nvcc, with the includes that MLX's own header would bring."""
    names = ("cuda_fp16.h", "cuda_bf16.h", "cooperative_groups.h", "cstdint")
    includes = "".join(f"#include <{name}>\n" for name in names)
    return includes + cuda_kernel(source, launch, inputs).text


def _type(dtype: str, special: dict[str, str]) -> str:
    return special.get(dtype, f"{dtype}_t")


def _dimensions(
    source: KernelSource, name: str, buf: Buf, types: tuple[str, str, str], *, cuda: bool = False
) -> list[Argument]:
    """``x_shape``, ``x_strides`` and ``x_ndim``, each if the body contains that text."""
    array = buf.array
    if array.ndim == 0:
        return []
    strides = np.array(array.strides, np.int64) // array.itemsize
    shape = np.array(array.shape, np.int32)
    if cuda:  # passed by value, as arrays of fixed size
        shape, strides = (np.pad(a, (0, 8 - a.size)) for a in (shape, strides))
    values = (shape, strides, np.array(array.ndim, np.int32))
    return [
        Argument(f"{name}_{what}", kind, value, INPUT, by_value=cuda or what == "ndim")
        for what, kind, value in zip(("shape", "strides", "ndim"), types, values, strict=True)
        if f"{name}_{what}" in source.body
    ]


def _outputs(
    launch: Launch, source: KernelSource, qualifier: str, types: dict[str, str]
) -> list[Argument]:
    found = []
    specs = zip(source.outputs, launch.output_shapes, launch.output_dtypes, strict=True)
    for name, shape, dtype in specs:
        data, kind = np.zeros(shape, storage_dtype(dtype)), OUTPUT
        if launch.init_value is not None:
            data, kind = _filled(shape, dtype, launch.init_value), FILLED_OUTPUT
        found.append(Argument(name, f"{qualifier}{_type(dtype, types)}*", data, kind))
    return found


def _filled(shape: tuple[int, ...], dtype: str, value: float) -> np.ndarray:
    if dtype != "bfloat16":
        return np.full(shape, value, dtype)
    return np.full(shape, np.float32(value).view(np.uint32) >> 16, np.uint16)


def _metal_value(value: TemplateValue) -> str:
    return _type(value, METAL_TYPES) if isinstance(value, str) else str(int(value))


def _metal_parameters(launch: Launch) -> str:
    kinds = {str: "typename", bool: "bool", int: "int"}
    return ", ".join(f"{kinds[type(v)]} {n}" for n, v in launch.template.items())


def _metal_name(source: KernelSource, launch: Launch, inputs: Sequence[Buf]) -> str:
    """``custom_kernel_NAME``, then the template's values and what each array looks like."""
    parts = [f"custom_kernel_{source.name}"]
    if launch.template:
        parts.append("_" + "_".join(_metal_value(v) for v in launch.template.values()))
    for buf in inputs:
        constant = "c" if buf.array.size < MIN_DEVICE_SIZE else ""
        suffix = constant if buf.array.ndim else "s"
        parts.append(_type(buf.dtype, METAL_TYPES) + suffix)
    parts += [_type(dtype, METAL_TYPES) for dtype in launch.output_dtypes]
    return "_".join(parts)


def _cuda_constant(name: str, value: TemplateValue) -> str:
    if isinstance(value, bool):
        return f"  constexpr bool {name} = {str(value).lower()};\n"
    if isinstance(value, int):
        return f"  constexpr int {name} = {value};\n"
    return f"  using {name} = {_type(value, CUDA_TYPES)};\n"
