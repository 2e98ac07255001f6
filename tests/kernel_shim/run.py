"""Run one launch of a ``.metal`` or ``.cu`` kernel on the CPU and check every access.

The same `KernelSource` and `Launch` as production uses go in; numpy arrays come out, with what the
checker found.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mlx_stream.backends.kernels.launch import Launch, check_launch
from mlx_stream.backends.kernels.source import KernelSource

from .arrays import Buf, as_buf
from .compiler import load, type_check
from .generate import INPUT, Argument, KernelText, cuda_kernel, metal_kernel
from .rewrite import cuda_cpp, metal_cpp

Order = Literal["fifo", "reverse", "shuffled"]
_ORDERS: tuple[Order, ...] = ("fifo", "reverse", "shuffled")
_GUARD = 64 << 10  # checker.cpp: kGuardZone
_METAL_LIMIT = 32 << 10
_CUDA_STATIC_LIMIT = 48 << 10
_CUDA_DYNAMIC_LIMIT = 99 << 10  # the smallest of sm_80 to sm_120: sm_86, sm_89, sm_120


@dataclass(frozen=True)
class Finding:
    """One kind of mistake the checker saw; the same message is counted, not repeated.

    Kinds: out-of-bounds, uninitialised, race, divergence, unwritten, double-write, write-to-input,
    threadgroup-memory, shuffle, misaligned, shift, stack.
    """

    kind: str
    message: str
    times: int

    def __str__(self) -> str:
        return f"{self.kind}: {self.message} (x{self.times})"


class _Parameters(ctypes.Structure):
    """Mirrors scheduler.cpp: Parameters."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("group", ctypes.c_uint * 3),
        ("order", ctypes.c_uint),
        ("check", ctypes.c_uint),
        ("seed", ctypes.c_uint64),
        ("memory_limit", ctypes.c_uint64),
        ("dynamic_shared", ctypes.c_uint64),
    )


def run_on_cpu(
    source: KernelSource,
    launch: Launch,
    inputs: Sequence[np.ndarray | Buf],
    *,
    check: bool = True,
    order: Order = "shuffled",
    seed: int = 0,
    memory_limit: int | None = None,
) -> tuple[list[np.ndarray], list[Finding]]:
    """Run a kernel on CPU fibers.

    Args:
        source: the kernel, as `load_kernel` gives it.
        launch: its launch parameters, as its launch function gives them.
        inputs: one array an input; bfloat16 as `Buf` (see `bf16`).
        check: compile with the access checker; without, only divergence is found, and an access
            far outside of a buffer may end the process.
        order: which ready thread runs next, and which threadgroup.
        seed: of the shuffled order.
        memory_limit: bytes of threadgroup memory; default: Metal 32 KiB, CUDA 48 (dynamic 99) KiB.

    Returns:
        The outputs, bfloat16 widened to float32, and the findings. After a finding that stops the
        launch (out of bounds, divergence, write to an input) outputs are incomplete.

    Raises:
        LaunchError: the launch does not belong to the kernel.
        NotMetalError, CompileError: the kernel's text is invalid.
    """
    check_launch(source, launch, len(inputs))
    bufs = [as_buf(array) for array in inputs]
    kernel, library = _build(source, launch, bufs, check)
    views = _place(kernel.arguments)
    parameters = _parameters(source, launch, check, order, seed, memory_limit)
    lines = _launch(library, kernel.arguments, views, parameters)
    last = -len(source.outputs)  # outputs come last
    outputs = map(_decoded, views[last:], kernel.arguments[last:], launch.output_dtypes)
    return list(outputs), [_finding(line, kernel.arguments) for line in lines]


def check_types(source: KernelSource, launch: Launch, inputs: Sequence[np.ndarray | Buf]) -> None:
    """Only compile a Metal kernel with its address spaces, as `run_on_cpu` does first.

    Raises:
        CompileError: the kernel does not type-check.
    """
    check_launch(source, launch, len(inputs))
    kernel = metal_kernel(source, launch, [as_buf(array) for array in inputs])
    type_check(metal_cpp(kernel, type_build=True))


def _build(
    source: KernelSource, launch: Launch, bufs: list[Buf], check: bool
) -> tuple[KernelText, ctypes.CDLL]:
    if source.language == "cuda":
        kernel = cuda_kernel(source, launch, bufs)
        return kernel, load(cuda_cpp(kernel), metal=False, check=check)
    kernel = metal_kernel(source, launch, bufs)
    type_check(metal_cpp(kernel, type_build=True))
    return kernel, load(metal_cpp(kernel, type_build=False), metal=True, check=check)


def _decoded(view: np.ndarray, argument: Argument, dtype: str) -> np.ndarray:
    array = view.view(argument.data.dtype).reshape(argument.data.shape)
    return Buf(array, dtype).decoded().copy()


def _place(arguments: Sequence[Argument]) -> list[np.ndarray]:
    """All buffers in one block, 0xff between them, so that a stray access lands in a guard zone."""
    total = sum(a.data.nbytes + 64 for a in arguments) + _GUARD * (len(arguments) + 1) + 64
    memory = np.full(total, 0xFF, np.uint8)
    views, offset = [], _GUARD - memory.ctypes.data % 64
    for argument in arguments:
        offset = -(-(offset + memory.ctypes.data) // 64) * 64 - memory.ctypes.data
        view = memory[offset : offset + argument.data.nbytes]
        if argument.kind != 1:  # an unfilled output keeps 0xff: NaN as any float type
            view[:] = argument.data.reshape(-1).view(np.uint8)
        views.append(view)
        offset += argument.data.nbytes + _GUARD
    return views


def _parameters(
    source: KernelSource,
    launch: Launch,
    check: bool,
    order: Order,
    seed: int,
    memory_limit: int | None,
) -> _Parameters:
    grid = launch.grid
    if source.language == "cuda":  # whole blocks, where Metal has a ragged last threadgroup
        grid = tuple(-(-g // t) * t for g, t in zip(grid, launch.threadgroup, strict=True))
        default = _CUDA_DYNAMIC_LIMIT if launch.dynamic_shared else _CUDA_STATIC_LIMIT
    else:
        default = _METAL_LIMIT
    return _Parameters(
        (ctypes.c_uint * 3)(*grid),
        (ctypes.c_uint * 3)(*launch.threadgroup),
        _ORDERS.index(order),
        int(check),
        seed,
        default if memory_limit is None else memory_limit,
        launch.dynamic_shared,
    )


def _launch(
    library: ctypes.CDLL,
    arguments: Sequence[Argument],
    views: list[np.ndarray],
    parameters: _Parameters,
) -> list[str]:
    count = len(arguments)
    entry = library.shim_launch
    entry.restype = ctypes.c_size_t
    text = ctypes.create_string_buffer(1 << 16)
    entry(
        ctypes.cast(library.shim_entry, ctypes.c_void_p),
        (ctypes.c_void_p * count)(*(view.ctypes.data for view in views)),
        (ctypes.c_size_t * count)(*(view.nbytes for view in views)),
        (ctypes.c_int * count)(*(argument.kind for argument in arguments)),
        count,
        ctypes.byref(parameters),
        text,
        ctypes.c_size_t(len(text)),
    )
    return text.value.decode().splitlines()


def _finding(line: str, arguments: Sequence[Argument]) -> Finding:
    """The runtime knows buffers by number; the reader knows them by name."""
    kind, message, times = line.split("\t")

    def name(match: re.Match[str]) -> str:
        argument = arguments[int(match[1])]
        return f"{'input' if argument.kind == INPUT else 'output'} {argument.name}"

    return Finding(kind, re.sub(r"buffer (\d+)", name, message), int(times))
