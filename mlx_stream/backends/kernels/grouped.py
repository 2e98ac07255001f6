"""The grouped expert MLP by the Metal kernels: ``expert_gate_up``, ``expert_down``, ``_combine``.

Owns the launch parameters and the order of the inputs; the maths is in ``metal/``. The plain-ops
twin is `mlx_stream.backends.mlx_ops.grouped_mlp_ops`: same planes, same sorted rows, same result up
to rounding (the kernels keep float32 from the products to the activation).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_stream.backends.kernels.activations import KernelActivation, kernel_activation
from mlx_stream.backends.kernels.launch import Launch, dtype_name, run_metal
from mlx_stream.backends.kernels.source import KernelSource, load_kernel
from mlx_stream.backends.kernels.tiles import build_tiles, choose_tile_rows
from mlx_stream.backends.kernels.weight_formats import (
    FLOATS,
    LARGEST_MATRIX,
    SMALLEST_DIM,
    Matrix,
    Planes,
    matrix_of,
    quantization,
    weight_format,
)

Runner = Callable[[KernelSource, Launch, Sequence[mx.array]], list[mx.array]]

THREADS = 128  # of a tile's threadgroup
COMBINE_THREADS = 256
# Columns of a tile by its rows. Two matrices share the rows staged, so each gets fewer columns.
GATED_COLUMNS = {16: 64, 32: 32, 64: 32}
SINGLE_COLUMNS = {16: 64, 32: 64, 64: 64}


def supports(
    mode: str,
    bits: int,
    group_size: int,
    dtype: str,
    activation: KernelActivation | None,
    dims: tuple[int, int],
) -> tuple[bool, str]:
    """Whether the kernels can compute such an expert layer, and why not.

    mode, bits, group_size: of one projection; ``"none"`` is unquantized. dims: (D, F).
    """
    if weight_format(mode, bits, group_size) is None:
        return False, f"no kernel for {mode} weights of {bits} bits in groups of {group_size}"
    if dtype not in FLOATS:
        return False, f"no kernel for activations of dtype {dtype}"
    if activation is None:
        return False, "no kernel has this activation"
    if min(dims) < SMALLEST_DIM:
        return False, f"dimensions {dims} below {SMALLEST_DIM}"
    if dims[0] * dims[1] >= LARGEST_MATRIX:
        return False, f"a matrix of {dims[0]} x {dims[1]} has 2^32 weights or more"
    return True, "supported"


def supports_module(
    module: Any, dims: tuple[int, int], dtype: str, activation: KernelActivation | None
) -> tuple[bool, str]:
    """`supports` for every projection of a switch layer. activation: of `kernel_activation`."""
    names = _projections(module)
    if activation is not None and activation.gated != (len(names) == 3):
        return False, "the activation does not take one argument for each input projection"
    packings = [quantization(module[name]) for name in names]
    for packing in packings:
        ok, reason = supports(*packing, dtype, activation, dims)
        if not ok:
            return False, reason
    if len({*packings[:-1]}) != 1:
        return False, "gate and up projections are quantized differently"
    return True, "supported"


def grouped_mlp_metal(
    module: Any,
    planes: Planes,
    x: mx.array,
    token_rows: np.ndarray,
    ids: np.ndarray,
    *,
    places: np.ndarray | None = None,
    activation: KernelActivation | None = None,
    tile_rows: int | None = None,
    run: Runner = run_metal,
) -> mx.array:
    """``[R, D]``: the expert MLP of sorted rows, ``grouped_mlp_ops(module, planes, x[rows], ids)``.

    Args:
        module: the switch layer, its arrays removed.
        planes: ``[G, ...]`` planes of a read group.
        x: ``[T, D]`` tokens, not gathered; float32, float16 or bfloat16.
        token_rows: ``[R]`` row of x of each sorted row.
        ids: ``[R]`` ascending local expert ids.
        places: ``[R]`` permutation: sorted row r goes to row ``places[r]`` of the result, so that
            the flat rows ``token * K + k`` of a complete routing give ``[T * K, D]`` in place.
        activation: of `kernel_activation`, found here if None.
        tile_rows: 16, 32 or 64; chosen from the rows per expert if None.
        run: who launches; the tests pass the CPU shim.
    """
    rows, dims = len(ids), x.shape[1]
    if rows == 0:
        return mx.zeros((0, dims), dtype=x.dtype)
    assert places is None or (np.bincount(places, minlength=rows) == 1).all()
    names = _projections(module)
    activation = activation or kernel_activation(module.activation)
    inner, outer = (matrix_of(module[n], planes, n) for n in (names[0], names[-1]))
    if activation is None or inner is None or outer is None:
        raise AssertionError("ask supports_module before computing")

    counts = np.bincount(ids, minlength=planes[names[0], "weight"].shape[0])
    tile_rows = tile_rows or choose_tile_rows(counts)
    tile_map = build_tiles(counts, tile_rows)
    tiles, dtype = mx.array(tile_map), dtype_name(x.dtype)

    launch = gate_up_launch(inner, activation, dtype, rows, len(tile_map), tile_rows)
    constants = mx.array([activation.a, activation.b], dtype=mx.float32)
    gate, up = _parts(planes, names[0], constants), _parts(planes, names[-2], constants)
    sorted_tokens = mx.array(token_rows.astype(np.int32))
    (h,) = run(
        load_kernel("expert_gate_up", "metal"),
        launch,
        [x, sorted_tokens, tiles, constants, *gate, *up],
    )
    launch = down_launch(outer, dtype, rows, len(tile_map), tile_rows, placed=places is not None)
    targets = tiles if places is None else mx.array(places.astype(np.int32))
    (y,) = run(
        load_kernel("expert_down", "metal"),
        launch,
        [h, targets, tiles, *_parts(planes, names[-1], constants)],
    )
    return y


def combine_metal(
    y: mx.array,
    table: np.ndarray,
    scores: mx.array,
    previous: mx.array | None = None,
    *,
    dtype: mx.Dtype | None = None,
    run: Runner = run_metal,
) -> mx.array:
    """``[T, D]``: each token's rows of y times their scores, added in the order of k.

    Args:
        y: ``[R, D]`` rows.
        table: ``[T, K]`` row of each choice, -1 for a choice that is not in y.
        scores: ``[T, K]``.
        previous: ``[T, D]`` sum so far of a layer that arrives in groups.
        dtype: of the result, y's if None; float32 keeps sums over groups exact.
    """
    launch = combine_launch(
        table.shape[0], y.shape[1], dtype_name(dtype or y.dtype), added=previous is not None
    )
    inputs = [y, mx.array(table.astype(np.int32)), scores, y if previous is None else previous]
    return run(load_kernel("expert_combine", "metal"), launch, inputs)[0]


def gate_up_launch(
    matrix: Matrix,
    activation: KernelActivation,
    dtype: str,
    rows: int,
    tiles: int,
    tile_rows: int,
) -> Launch:
    """Launch of ``expert_gate_up``: `rows` sorted rows in `tiles` tiles of `tile_rows`."""
    columns = (GATED_COLUMNS if activation.gated else SINGLE_COLUMNS)[tile_rows]
    template = {
        "T": dtype,
        "FORMAT": matrix.format.code,
        "GROUP": matrix.format.group,
        "ACT": activation.code,
        "GATED": activation.gated,
        "BIASED": matrix.biased,
        "GLOBAL": matrix.tensor_scaled,
        "BM": tile_rows,
        "BN": columns,
    }
    return _tiled(template, matrix, columns, rows, tiles, dtype)


def down_launch(
    matrix: Matrix, dtype: str, rows: int, tiles: int, tile_rows: int, *, placed: bool
) -> Launch:
    """Launch of ``expert_down``; placed: rows go to the places given."""
    columns = SINGLE_COLUMNS[tile_rows]
    template = {
        "T": dtype,
        "FORMAT": matrix.format.code,
        "GROUP": matrix.format.group,
        "PLACED": placed,
        "BIASED": matrix.biased,
        "GLOBAL": matrix.tensor_scaled,
        "BM": tile_rows,
        "BN": columns,
    }
    return _tiled(template, matrix, columns, rows, tiles, dtype)


def combine_launch(tokens: int, dims: int, dtype: str, *, added: bool) -> Launch:
    """Launch of ``expert_combine``: one thread an output value."""
    return Launch(
        template={"O": dtype, "ADDED": added},
        grid=(dims, tokens, 1),
        threadgroup=(min(COMBINE_THREADS, dims), 1, 1),
        output_shapes=((tokens, dims),),
        output_dtypes=(dtype,),
    )


def _tiled(
    template: dict[str, str | int | bool],
    matrix: Matrix,
    columns: int,
    rows: int,
    tiles: int,
    dtype: str,
) -> Launch:
    return Launch(
        template=template,
        grid=(-(-matrix.outputs // columns) * THREADS, tiles, 1),
        threadgroup=(THREADS, 1, 1),
        output_shapes=((rows, matrix.outputs),),
        output_dtypes=(dtype,),
    )


def _projections(module: Any) -> tuple[str, ...]:
    """Input projections, then the output projection."""
    return ("fc1", "fc2") if "fc1" in module else ("gate_proj", "up_proj", "down_proj")


def _parts(planes: Planes, name: str, unused: mx.array) -> list[mx.array]:
    """Weight, scales, biases, bias and tensor scale; one the format lacks is stood in for."""
    weight = planes[name, "weight"]
    scales = planes.get((name, "scales"))
    scales = weight if scales is None else scales
    biases = planes.get((name, "biases"))
    bias, tensor_scale = planes.get((name, "bias")), planes.get((name, "global_scale"))
    return [
        weight,
        scales,
        scales if biases is None else biases,
        unused if bias is None else bias,
        unused if tensor_scale is None else tensor_scale,
    ]
