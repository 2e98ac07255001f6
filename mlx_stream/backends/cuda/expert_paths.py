"""Three ways to compute one group's experts, and the choice between them.

- **fused**: our kernels (gate, up and activation in one, then down), for the formats they know.
- **dequantize**: the group's weights to the activations' dtype once, then sorted ``gather_mm``.
  Only stock MLX operations that exist on every GPU; always right.
- **gather_qmm**: mlx-lm's own call, for what cannot be dequantized apart (nvfp4 tensor scales).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_stream.backends.base import ExpertMlp
from mlx_stream.backends.cpu.activations import resolve_activation
from mlx_stream.backends.kernels.grouped_cuda import (
    CudaActivation,
    Projection,
    build_tiles,
    combine_launch,
    cuda_activation,
    cuda_kernel_source,
    down_launch,
    row_tile,
    up_launch,
    why_not,
)
from mlx_stream.backends.kernels.launch import Launch, dtype_name
from mlx_stream.backends.kernels.selection import Choice
from mlx_stream.backends.kernels.source import KernelSource
from mlx_stream.backends.mlx_ops import Planes, grouped_mlp_ops

DEQUANTIZED_NBYTES = 256 << 20  # of the weights unpacked at a time

Launcher = Callable[[KernelSource, Launch, Sequence[mx.array]], list[mx.array]]


@dataclass(frozen=True)
class Rows:
    """Rows of one chunk that go to some experts of a group, sorted by expert.

    Attributes:
        tokens: ``[R]`` row of x.
        counts: rows of each of these experts.
        places: ``[R]`` a permutation: where each row goes in the result; None leaves them sorted.
    """

    tokens: np.ndarray
    counts: np.ndarray
    places: np.ndarray | None = None


class PartMlp(Protocol):
    """The expert MLP of a part of a group."""

    def __call__(self, x: mx.array, rows: Rows) -> mx.array:
        """``x [C, D] -> [R, D]``."""


class ExpertPath(Protocol):
    """One of the three ways, for one layer."""

    def parts(self, planes: Planes, experts: int) -> Iterator[tuple[slice, PartMlp]]:
        """Cut a group of `experts` into parts that fit the scratch memory; slices of experts."""


class FusedPath:
    """Our kernels; a group is one part."""

    def __init__(self, mlp: ExpertMlp, activation: CudaActivation, launcher: Launcher) -> None:
        self._first, self._second = projections(mlp)
        self._names = _names(mlp)
        self._activation = activation
        self._launcher = launcher
        self._params = mx.array([activation.limit, activation.alpha], dtype=mx.float32)
        self._none: dict[mx.Dtype, mx.array] = {}

    def parts(self, planes: Planes, experts: int) -> Iterator[tuple[slice, PartMlp]]:
        """See ExpertPath."""
        yield slice(0, experts), lambda x, rows: self._compute(planes, x, rows)

    def _compute(self, planes: Planes, x: mx.array, rows: Rows) -> mx.array:
        dtype, count = dtype_name(x.dtype), len(rows.tokens)
        tile = row_tile(count, np.count_nonzero(rows.counts))
        tiles = build_tiles(rows.counts, tile)
        on_device = mx.array(tiles)
        gate, up, down = (self._arrays(planes, name, x.dtype) for name in self._names)
        launch = up_launch(dtype, self._first, self._activation, count, len(tiles), tile)
        inputs = [x, mx.array(rows.tokens.astype(np.int32)), on_device]
        inputs += [*gate[:3], *up[:3], gate[3], up[3], self._params]
        (h,) = self._launcher(cuda_kernel_source("moe_up"), launch, inputs)
        launch = down_launch(dtype, self._second, count, len(tiles), tile)
        places = np.arange(count) if rows.places is None else rows.places
        inputs = [h, mx.array(places.astype(np.int32)), on_device, *down]
        (y,) = self._launcher(cuda_kernel_source("moe_down"), launch, inputs)
        return y

    def _arrays(self, planes: Planes, name: str, dtype: mx.Dtype) -> list[mx.array]:
        """Weight, scales, biases, bias; one element where there is none: it is not read.

        The dtypes follow from the template (T and MODE): MLX keeps compiled kernels by name and
        template, not by the dtypes of their inputs.
        """
        none = self._none.setdefault(dtype, mx.zeros((1,), dtype=dtype))
        scales = planes[name, "scales"]
        scales = scales if scales.dtype == mx.uint8 else scales.astype(dtype)
        extras = (planes.get((name, part)) for part in ("biases", "bias"))
        return [
            planes[name, "weight"],
            scales,
            *(none if array is None else array.astype(dtype) for array in extras),
        ]


class DequantizePath:
    """Plan C: unpack some experts, then sorted gathers over dense matrices."""

    def __init__(self, mlp: ExpertMlp, nbytes: int = DEQUANTIZED_NBYTES) -> None:
        self._module = mlp.module
        self._nbytes = nbytes
        self._values = sum(
            tensor.shape[0] * _input_dims(mlp, tensor.key[0])
            for tensor in mlp.layer.tensors
            if tensor.key[1] == "weight"
        )

    def parts(self, planes: Planes, experts: int) -> Iterator[tuple[slice, PartMlp]]:
        """See ExpertPath. Weights are unpacked for the dtype of the first x that asks."""
        step = max(1, self._nbytes // (self._values * 4))
        for start in range(0, experts, step):
            part = slice(start, min(start + step, experts))
            yield part, _DequantizedMlp(self._module, {k: v[part] for k, v in planes.items()})


class _DequantizedMlp:
    def __init__(self, module: nn.Module, planes: Planes) -> None:
        self._module, self._planes = module, planes
        self._dense: dict[tuple[str, str], mx.array] | None = None

    def __call__(self, x: mx.array, rows: Rows) -> mx.array:
        if self._dense is None:
            names = dict.fromkeys(name for name, _ in self._planes)
            self._dense = {(n, "weight"): self._unpack(n, x.dtype) for n in names}
            self._dense |= {k: v for k, v in self._planes.items() if k[1] == "bias"}
        ids = mx.array(np.repeat(np.arange(len(rows.counts), dtype=np.int32), rows.counts))
        y = _dense_mlp(self._module, self._dense, x[mx.array(rows.tokens)], ids)
        return _placed(y, rows)

    def _unpack(self, name: str, dtype: mx.Dtype) -> mx.array:
        linear, weight = self._module[name], self._planes[name, "weight"]
        if not hasattr(linear, "mode"):
            return weight.astype(dtype)
        return mx.dequantize(
            weight,
            self._planes[name, "scales"],
            self._planes.get((name, "biases")),
            group_size=linear.group_size,
            bits=linear.bits,
            mode=linear.mode,
            dtype=dtype,
        )


def _dense_mlp(module: nn.Module, dense: Planes, x: mx.array, ids: mx.array) -> mx.array:
    """``[R, D] -> [R, D]`` with dense weights ``[G, out, in]``; rows sorted by id."""

    def project(name: str, x: mx.array) -> mx.array:
        w = dense[name, "weight"].swapaxes(-1, -2)
        y = mx.gather_mm(x, w, rhs_indices=ids, sorted_indices=True)
        bias = dense.get((name, "bias"))
        return y if bias is None else y + mx.expand_dims(bias.astype(x.dtype)[ids], -2)

    x = mx.expand_dims(x, -2)
    if "fc1" in module:
        return project("fc2", module.activation(project("fc1", x))).squeeze(-2)
    h = module.activation(project("up_proj", x), project("gate_proj", x))
    return project("down_proj", h).squeeze(-2)


def _placed(y: mx.array, rows: Rows) -> mx.array:
    return y if rows.places is None else y[mx.array(np.argsort(rows.places))]


class GatherQmmPath:
    """mlx-lm's own calls."""

    def __init__(self, mlp: ExpertMlp) -> None:
        self._module = mlp.module

    def parts(self, planes: Planes, experts: int) -> Iterator[tuple[slice, PartMlp]]:
        """See ExpertPath."""

        def compute(x: mx.array, rows: Rows) -> mx.array:
            ids = np.repeat(np.arange(experts, dtype=np.int32), rows.counts)
            y = grouped_mlp_ops(self._module, planes, x[mx.array(rows.tokens)], mx.array(ids))
            return _placed(y, rows)

        yield slice(0, experts), compute


def choose_path(
    mlp: ExpertMlp, dtype: mx.Dtype, *, kernels: str, refusal: str | None, launcher: Launcher
) -> tuple[ExpertPath, Choice]:
    """The path of a layer.

    Args:
        kernels: ``"auto"``, ``"fused"`` or ``"stock"``; forcing fused where it cannot be is not
            an error, the choice says why.
        refusal: why this device cannot run our kernels, or None.
    """
    if any(t.key[1] == "global_scale" for t in mlp.layer.tensors):
        return GatherQmmPath(mlp), Choice("gather_qmm", "nvfp4 with tensor scales")
    activation = cuda_activation(mlp.module.activation)
    reason = "stock kernels asked for" if kernels == "stock" else refusal or _why_not(mlp, dtype)
    if reason is None and (activation is None or resolve_activation(mlp.module.activation) is None):
        reason = f"no kernel for the activation {type(mlp.module.activation).__name__}"
    if reason is not None:
        return DequantizePath(mlp), Choice("dequantize", reason)
    assert activation is not None
    return FusedPath(mlp, activation, launcher), Choice("fused", "supported")


def _why_not(mlp: ExpertMlp, dtype: mx.Dtype) -> str | None:
    specs = [mlp.layer.spec(name) for name in _names(mlp)]
    if specs[0] != specs[1]:
        return "gate and up are packed differently"
    for projection in projections(mlp):
        if reason := why_not(dtype_name(dtype), projection):
            return reason
    return None


def projections(mlp: ExpertMlp) -> tuple[Projection, Projection]:
    """The first and the last matrix of the expert MLP."""
    first, last = _names(mlp)[0], _names(mlp)[-1]
    keys = {t.key for t in mlp.layer.tensors}
    dims, hidden = mlp.layer.input_dims, mlp.layer.hidden_dims
    return (
        Projection(mlp.layer.spec(first), dims, hidden, (first, "bias") in keys),
        Projection(mlp.layer.spec(last), hidden, dims, (last, "bias") in keys),
    )


def _names(mlp: ExpertMlp) -> tuple[str, str, str]:
    """Gate, up, down; the two-matrix form names its first twice."""
    if mlp.layer.kind == "mlp":
        return "fc1", "fc1", "fc2"
    return "gate_proj", "up_proj", "down_proj"


def _input_dims(mlp: ExpertMlp, name: str) -> int:
    """Input width of a projection."""
    return mlp.layer.hidden_dims if name == _names(mlp)[-1] else mlp.layer.input_dims


def combine_fused(
    rows: mx.array, places: np.ndarray, scores: mx.array, y: mx.array | None, launcher: Launcher
) -> mx.array:
    """Weighted sums by ``moe_combine``; places ``[C, width]`` into `rows`, negative for none."""
    tokens, dims = len(places), rows.shape[1]
    launch = combine_launch(dtype_name(rows.dtype), tokens, dims, y is not None)
    before = mx.zeros((1,), dtype=rows.dtype) if y is None else y
    inputs = [rows, mx.array(places), scores.astype(mx.float32), before]
    return launcher(cuda_kernel_source("moe_combine"), launch, inputs)[0]


def combine_ops(
    rows: mx.array, places: np.ndarray, scores: mx.array, y: mx.array | None
) -> mx.array:
    """The plain-ops twin of :func:`combine_fused`."""
    padded = mx.concatenate([rows, mx.zeros((1, rows.shape[1]), dtype=rows.dtype)])
    table = mx.array(np.where(places < 0, len(rows), places))
    total = (padded[table] * scores[..., None].astype(mx.float32)).sum(axis=1)
    return (total if y is None else total + y).astype(rows.dtype)
