"""The grouped expert MLP in plain MLX operations: planes, a sorted gather, three matmuls.

The expert path of the metal backend, and the twin that other implementations are compared with. It
calls ``gather_qmm`` exactly as mlx-lm's switch layers do, on the planes of one read group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_stream.backends.base import ChunkInput, ExpertMlp, Fence, PublishedGroup
from mlx_stream.backends.grouping import check_expert_ids
from mlx_stream.errors import TensorFormatError
from mlx_stream.storage.read_plan import GroupRead

Planes = Mapping[tuple[str, str], mx.array]

_DTYPES = {
    "U32": mx.uint32,
    "U8": mx.uint8,
    "F32": mx.float32,
    "F16": mx.float16,
    "BF16": mx.bfloat16,
}


def plane_arrays(
    read: GroupRead, memory: mx.array, lead: int = 0
) -> dict[tuple[str, str], mx.array]:
    """Views ``[G, ...]`` of a slot's planes; the slot starts at byte `lead` of uint8 `memory`.

    The dtype is viewed first and sliced after: the other order copies. A plane at an odd offset
    (a file whose data is not aligned to its item size) is copied, never misread.
    """
    planes = {}
    for plane in read.planes:
        if plane.dtype not in _DTYPES:
            raise TensorFormatError(
                "an expert tensor has a dtype that MLX planes cannot hold",
                tensor=f"layer {read.layer} {'.'.join(plane.key)}",
                expected=sorted(_DTYPES),
                actual=plane.dtype,
                remedy="convert the checkpoint with mlx_lm.convert",
            )
        assert plane.contiguous, "planar staging needs contiguous planes"
        start, nbytes = lead + plane.offsets[0], plane.nbytes * len(read.experts)
        dtype = _DTYPES[plane.dtype]
        if start % dtype.size or memory.size % dtype.size:
            flat = mx.contiguous(memory[start : start + nbytes]).view(dtype)
        else:
            flat = memory.view(dtype)[start // dtype.size : (start + nbytes) // dtype.size]
        planes[plane.key] = flat.reshape(len(read.experts), *plane.shape)
    return planes


def projection(
    linear: nn.Module, planes: Planes, name: str, x: mx.array, ids: mx.array
) -> mx.array:
    """One switch projection ``[R, 1, in] -> [R, 1, out]`` for rows sorted by local expert id."""
    weight = planes[name, "weight"]
    if hasattr(linear, "mode"):
        # Scales of another dtype than x would be cast in full at every call.
        scales, biases = _like(planes[name, "scales"], x), planes.get((name, "biases"))
        y = mx.gather_qmm(
            x,
            weight,
            scales,
            None if biases is None else _like(biases, x),
            rhs_indices=ids,
            transpose=True,
            group_size=linear.group_size,
            bits=linear.bits,
            mode=linear.mode,
            global_scale=planes.get((name, "global_scale")),
            sorted_indices=True,
        )
    else:
        y = mx.gather_mm(x, _like(weight, x).swapaxes(-1, -2), rhs_indices=ids, sorted_indices=True)
    bias = planes.get((name, "bias"))
    return y if bias is None else y + mx.expand_dims(_like(bias, x)[ids], -2)


def grouped_mlp_ops(module: nn.Module, planes: Planes, x: mx.array, ids: mx.array) -> mx.array:
    """``[R, D] -> [R, D]``: the expert MLP of rows sorted by local expert id ``[R]``."""
    x = mx.expand_dims(x, -2)
    if "fc1" in module:
        h = module.activation(projection(module.fc1, planes, "fc1", x, ids))
        return projection(module.fc2, planes, "fc2", h, ids).squeeze(-2)
    up = projection(module.up_proj, planes, "up_proj", x, ids)
    gate = projection(module.gate_proj, planes, "gate_proj", x, ids)
    h = module.activation(up, gate)
    return projection(module.down_proj, planes, "down_proj", h, ids).squeeze(-2)


def _like(array: mx.array, x: mx.array) -> mx.array:
    return array if array.dtype in (x.dtype, mx.uint8) else array.astype(x.dtype)


class EvalFence:
    """Passes when the arrays that read a slot have been evaluated."""

    def __init__(self, arrays: Sequence[mx.array]) -> None:
        self._arrays = list(arrays)

    def passed(self) -> bool:
        """Only when nothing was computed from the slot; MLX offers no query."""
        return not self._arrays

    def wait(self) -> None:
        """Evaluate, and drop the references."""
        mx.eval(self._arrays)
        self._arrays.clear()


class RowsMlp(Protocol):
    """The expert MLP of rows sorted by expert; `gathered_mlp` is the stock one."""

    def __call__(
        self, module: nn.Module, planes: Planes, x: mx.array, tokens: np.ndarray, ids: np.ndarray
    ) -> mx.array:
        """``x [C, D]``, the token and the local expert of each row ``[R]`` -> ``[R, D]``."""


def gathered_mlp(
    module: nn.Module, planes: Planes, x: mx.array, tokens: np.ndarray, ids: np.ndarray
) -> mx.array:
    """Gather the rows, then :func:`grouped_mlp_ops`."""
    return grouped_mlp_ops(module, planes, x[mx.array(tokens)], mx.array(ids))


class MlxLayerComputation:
    """An expert layer over chunks, one gather per chunk and group.

    Weighted sums go through an un-sort of fixed order, never through atomics, so results are the
    same from run to run.

    Args:
        rows_mlp: computes the rows; stock MLX operations unless a backend chose its kernels.
    """

    def __init__(
        self,
        mlp: ExpertMlp,
        chunks: Sequence[ChunkInput],
        rows_mlp: RowsMlp = gathered_mlp,
    ) -> None:
        self._rows_mlp = rows_mlp
        for chunk in chunks:
            check_expert_ids(chunk.indices, mlp.layer.num_experts, mlp.layer.name)
        self._mlp = mlp
        self._chunks = list(chunks)
        self._outputs: list[mx.array] = [self._empty(c) for c in chunks]
        self._seen = np.zeros(mlp.layer.num_experts, dtype=bool)

    def _empty(self, chunk: ChunkInput) -> mx.array:
        tokens, k = chunk.indices.shape
        dims = self._mlp.layer.input_dims
        shape = (tokens, dims) if chunk.combined else (tokens, k, dims)
        return mx.zeros(shape, dtype=chunk.x.dtype)

    def add(self, groups: Sequence[PublishedGroup]) -> Fence:
        """Compute these groups for every chunk; work may still run when this returns."""
        touched: list[mx.array] = []
        for group in groups:
            self._seen[list(group.experts)] = True
            for i, chunk in enumerate(self._chunks):
                updated = self._add_chunk(group, chunk, self._outputs[i])
                if updated is not None:
                    self._outputs[i] = updated
                    touched.append(updated)
        mx.async_eval(touched)
        return EvalFence(touched)

    def _add_chunk(self, group: PublishedGroup, chunk: ChunkInput, y: mx.array) -> mx.array | None:
        local = np.full(self._mlp.layer.num_experts, -1, dtype=np.int32)
        local[list(group.experts)] = np.arange(len(group.experts), dtype=np.int32)
        ids = local[chunk.indices].reshape(-1)
        rows = np.flatnonzero(ids >= 0)
        if not rows.size:
            return None
        rows = rows[np.argsort(ids[rows], kind="stable")]
        k = chunk.indices.shape[1]
        out = self._rows_mlp(self._mlp.module, group.weights, chunk.x, rows // k, ids[rows])
        if not chunk.combined:
            flat = y.reshape(-1, y.shape[-1])
            flat[mx.array(rows)] = out.astype(flat.dtype)
            return flat.reshape(y.shape)
        weights = chunk.scores.reshape(-1)[mx.array(rows)]
        return y + _sum_by_token(out * weights[:, None], rows // k, len(chunk.indices)).astype(
            y.dtype
        )

    def outputs(self) -> list[mx.array]:
        """One array per chunk; every routed expert must have been added."""
        used = np.unique(np.concatenate([c.indices.reshape(-1) for c in self._chunks]))
        assert self._seen[used].all(), "an expert of this layer was never added"
        return self._outputs


def _sum_by_token(values: mx.array, tokens: np.ndarray, count: int) -> mx.array:
    """``[R, D] -> [count, D]``: add rows of the same token, in row order.

    Each token's rows are gathered into a padded table (the pad points at a zero row) and summed,
    which is deterministic, unlike a scatter-add.
    """
    order = np.argsort(tokens, kind="stable")
    sorted_tokens = tokens[order]
    starts = np.searchsorted(sorted_tokens, np.arange(count))
    place = np.arange(len(tokens)) - starts[sorted_tokens]
    table = np.full((count, int(place.max()) + 1), len(tokens), dtype=np.int32)
    table[sorted_tokens, place] = order
    padded = mx.concatenate([values, mx.zeros((1, values.shape[1]), dtype=values.dtype)])
    return padded[mx.array(table)].sum(axis=1)
