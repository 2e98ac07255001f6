"""Launch parameters of a kernel, and the two calls that run it on a GPU.

A kernel's launch function (shapes in, `Launch` out) is written once; production passes its result
to `run_metal` or `run_cuda`, the tests pass it to the CPU shim. Nothing here knows what a kernel
computes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

import mlx.core as mx

from mlx_stream.backends.kernels.source import KernelSource
from mlx_stream.errors import MlxStreamError

# Names of the element types a kernel may have, as MLX spells them.
DTYPES = (
    *("bool", "float32", "float16", "bfloat16"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
)
MAX_THREADS = 1024  # of a threadgroup or block: the limit of Apple and NVIDIA chips alike

TemplateValue = str | int | bool  # str: a dtype's name
Dim3 = tuple[int, int, int]


class LaunchError(MlxStreamError):
    """Launch parameters that do not belong to the kernel they are used with."""


@dataclass(frozen=True)
class Launch:
    """Everything but the inputs that one launch of a kernel needs. Element types are names.

    Attributes:
        template: value of each template parameter: a dtype's name, an int or a bool.
        grid: extent in threads, not threadgroups; Metal may have a ragged last threadgroup,
            CUDA rounds up to whole blocks, so a CUDA kernel must guard.
        threadgroup: extent of a threadgroup (block) in threads.
        output_shapes: one shape an output.
        output_dtypes: one dtype's name an output.
        init_value: fills the outputs beforehand; None leaves them uninitialised.
        dynamic_shared: bytes of ``extern __shared__`` memory a block; CUDA only.
    """

    template: Mapping[str, TemplateValue]
    grid: Dim3
    threadgroup: Dim3
    output_shapes: tuple[tuple[int, ...], ...]
    output_dtypes: tuple[str, ...]
    init_value: float | None = None
    dynamic_shared: int = 0


def dtype_name(dtype: mx.Dtype) -> str:
    """``mx.bfloat16 -> "bfloat16"``."""
    return str(dtype).rpartition(".")[2]


def check_launch(source: KernelSource, launch: Launch, n_inputs: int) -> None:
    """Hold a launch against its kernel's metadata; both production and the shim call it.

    Raises:
        LaunchError: the message names the kernel and the parameter.
    """
    kinds = dict(source.template)
    if list(launch.template) != list(kinds):
        _fail(source, "template parameters differ", list(kinds), list(launch.template))
    for name, value in launch.template.items():
        if _kind_of(value) != kinds[name]:
            _fail(source, f"template parameter {name} has the wrong kind", kinds[name], value)
    if n_inputs != len(source.inputs):
        _fail(source, "number of inputs differs", source.inputs, n_inputs)
    if len({len(source.outputs), len(launch.output_shapes), len(launch.output_dtypes)}) != 1:
        found = f"{len(launch.output_shapes)} shapes, {len(launch.output_dtypes)} dtypes"
        _fail(source, "number of outputs differs", source.outputs, found)
    if unknown := set(launch.output_dtypes) - set(DTYPES):
        _fail(source, "unknown output dtype", DTYPES, sorted(unknown))
    for label, extent in (("grid", launch.grid), ("threadgroup", launch.threadgroup)):
        if len(extent) != 3 or min(extent) < 1:
            _fail(source, f"{label} must be three positive numbers", "(x, y, z)", extent)
    x, y, z = launch.threadgroup
    if x * y * z > MAX_THREADS:
        _fail(source, "too many threads in a threadgroup", MAX_THREADS, x * y * z)
    if launch.dynamic_shared and source.language != "cuda":
        _fail(source, "dynamic shared memory is CUDA's", 0, launch.dynamic_shared)


def run_metal(
    source: KernelSource, launch: Launch, inputs: Sequence[mx.array], *, stream: Any = None
) -> list[mx.array]:
    """Launch a ``.metal`` kernel through ``mx.fast.metal_kernel``. Lazy, as every MLX operation."""
    _require_language(source, "metal")
    return _run(_metal_kernel(source), source, launch, inputs, stream)


def run_cuda(
    source: KernelSource, launch: Launch, inputs: Sequence[mx.array], *, stream: Any = None
) -> list[mx.array]:
    """Launch a ``.cu`` kernel through ``mx.fast.cuda_kernel``. Lazy, as every MLX operation."""
    _require_language(source, "cuda")
    arrays = (*map(_kind_of_array, inputs), *launch.output_dtypes)
    return _run(_cuda_kernel(source, launch.dynamic_shared, arrays), source, launch, inputs, stream)


def _run(
    kernel: Callable[..., list[mx.array]],
    source: KernelSource,
    launch: Launch,
    inputs: Sequence[mx.array],
    stream: Any,
) -> list[mx.array]:
    check_launch(source, launch, len(inputs))
    template = [
        (name, getattr(mx, value) if isinstance(value, str) else value)
        for name, value in launch.template.items()
    ]
    return kernel(
        inputs=list(inputs),
        template=template or None,
        grid=launch.grid,
        threadgroup=launch.threadgroup,
        output_shapes=list(launch.output_shapes),
        output_dtypes=[getattr(mx, name) for name in launch.output_dtypes],
        init_value=launch.init_value,
        stream=stream,
    )


@cache
def _metal_kernel(source: KernelSource) -> Callable[..., list[mx.array]]:
    """One kernel object a source; MLX itself caches the compiled library by text."""
    return mx.fast.metal_kernel(
        name=source.name,
        input_names=list(source.inputs),
        output_names=list(source.outputs),
        header=source.header,
        source=source.body,
    )


@cache
def _cuda_kernel(
    source: KernelSource, dynamic_shared: int, arrays: tuple[str, ...]
) -> Callable[..., list[mx.array]]:
    """One kernel object a source and set of array types.

    MLX keeps compiled CUDA modules by name and template values alone, so that the same name with
    other array types or another text would run the wrong module: the name tells them apart.
    """
    parts = "\0".join((source.header, source.body, *arrays))
    digest = hashlib.sha256(parts.encode()).hexdigest()[:12]
    return mx.fast.cuda_kernel(
        name=f"{source.name}_{digest}",
        input_names=list(source.inputs),
        output_names=list(source.outputs),
        header=source.header,
        source=source.body,
        shared_memory=dynamic_shared,
    )


def _kind_of_array(array: mx.array) -> str:
    return dtype_name(array.dtype) + ("" if array.ndim else " scalar")


def _kind_of(value: TemplateValue) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        return "int"
    return "dtype" if value in DTYPES else f"unknown dtype {value}"


def _require_language(source: KernelSource, language: str) -> None:
    if source.language != language:
        _fail(source, "the kernel is written in another language", language, source.language)


def _fail(source: KernelSource, problem: str, expected: object, actual: object) -> NoReturn:
    raise LaunchError(
        f"kernel {source.name}: {problem}", file=source.path, expected=expected, actual=actual
    )
