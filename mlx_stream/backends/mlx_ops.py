"""The grouped expert MLP in plain MLX operations: planes, a sorted gather, three matmuls.

The expert path of the metal backend, and the twin that other implementations are compared with. It
calls ``gather_qmm`` exactly as mlx-lm's switch layers do, on the planes of one read group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_stream.backends.base import ChunkInput, ExpertMlp, Fence, PublishedGroup
from mlx_stream.backends.grouping import check_expert_ids
from mlx_stream.errors import TensorFormatError
from mlx_stream.storage.read_plan import GroupRead

Planes = Mapping[tuple[str, str], mx.array]

DTYPES = {
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
        if plane.dtype not in DTYPES:
            raise TensorFormatError(
                "an expert tensor has a dtype that MLX planes cannot hold",
                tensor=f"layer {read.layer} {'.'.join(plane.key)}",
                expected=sorted(DTYPES),
                actual=plane.dtype,
                remedy="convert the checkpoint with mlx_lm.convert",
            )
        assert plane.contiguous, "planar staging needs contiguous planes"
        start, nbytes = lead + plane.offsets[0], plane.nbytes * len(read.experts)
        dtype = DTYPES[plane.dtype]
        if start % dtype.size or memory.size % dtype.size:
            flat = mx.contiguous(memory[start : start + nbytes]).view(dtype)
        else:
            flat = memory.view(dtype)[start // dtype.size : (start + nbytes) // dtype.size]
        planes[plane.key] = flat.reshape(len(read.experts), *plane.shape)
    return planes


class SlotPlanes(dict[tuple[str, str], Any]):
    """Planes of a slot, made at first use: publishing may come before the bytes have arrived.

    Attributes:
        read: where each tensor lies in the slot.
        base: uint8 memory that holds the slot, perhaps others too.
        lead: byte of `base` where the slot starts; a multiple of its alignment in memory.
    """

    def __init__(self, read: GroupRead, base: mx.array, lead: int) -> None:
        super().__init__()
        self.read, self.base, self.lead = read, base, lead

    def __missing__(self, key: tuple[str, str]) -> mx.array:
        self._fill()
        if not super().__contains__(key):
            raise KeyError(key)
        return super().__getitem__(key)

    def get(self, key: tuple[str, str], default: Any = None) -> Any:
        """As dict.get, after filling."""
        self._fill()
        return super().get(key, default)

    def places(self, position: int) -> dict[tuple[str, str], int]:
        """Byte of `base` where each tensor of expert number `position` starts."""
        return {plane.key: self.lead + plane.offsets[position] for plane in self.read.planes}

    def _fill(self) -> None:
        if not self:
            self.update(plane_arrays(self.read, self.base, self.lead))


class StackedPlanes(SlotPlanes):
    """The planes of stacked slots; `read` says where in them the group's experts lie."""

    def __init__(
        self, read: GroupRead, base: mx.array, planes: Mapping[tuple[str, str], mx.array]
    ) -> None:
        super().__init__(read, base, 0)
        self.update(planes)


def projection(
    linear: nn.Module,
    planes: Planes,
    name: str,
    x: mx.array,
    ids: mx.array,
    *,
    sorted_rows: bool = True,
) -> mx.array:
    """One switch projection ``[..., 1, in] -> [..., 1, out]`` of the planes' experts `ids`."""
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
            sorted_indices=sorted_rows,
        )
    else:
        y = mx.gather_mm(
            x, _like(weight, x).swapaxes(-1, -2), rhs_indices=ids, sorted_indices=sorted_rows
        )
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


def rows_of(
    group: PublishedGroup, indices: np.ndarray, num_experts: int
) -> tuple[np.ndarray, np.ndarray]:
    """Flat rows ``token * K + k`` of ``indices [C, K]`` routed to a group, and the plane row of
    each one's expert; ascending by that."""
    local = np.full(num_experts, -1, dtype=np.int32)
    local[list(group.experts)] = range(len(group.experts)) if group.slots is None else group.slots
    ids = local[indices].reshape(-1)
    rows = np.flatnonzero(ids >= 0)
    rows = rows[np.argsort(ids[rows], kind="stable")]
    return rows, ids[rows]


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


class Combine(Protocol):
    """The weighted sum of each token's rows; `combine_ops` is the stock one."""

    def __call__(
        self,
        values: mx.array,
        rows: np.ndarray,
        scores: mx.array,
        previous: mx.array | None,
        dtype: mx.Dtype,
    ) -> mx.array:
        """``previous [C, D]`` plus the rows ``values [R, D]`` times their scores.

        rows: ``[R]`` flat rows ``token * K + k`` into ``scores [C, K]``. dtype: of the layer's
        output; the sum may be kept in a wider one.
        """


def combine_ops(
    values: mx.array,
    rows: np.ndarray,
    scores: mx.array,
    previous: mx.array | None,
    dtype: mx.Dtype,
) -> mx.array:
    """Through an un-sort of fixed order, never atomics: the same from run to run."""
    count, k = scores.shape
    weights = scores.reshape(-1)[mx.array(rows)]
    total = _sum_by_token(values * weights[:, None], rows // k, count).astype(dtype)
    return total if previous is None else previous + total


class MlxLayerComputation:
    """An expert layer over chunks, one gather per chunk and group.

    Args:
        rows_mlp: computes the rows; stock MLX operations unless a backend chose its kernels.
        combine: sums rows by token, where the chunk has scores; as `rows_mlp`.
    """

    def __init__(
        self,
        mlp: ExpertMlp,
        chunks: Sequence[ChunkInput],
        rows_mlp: RowsMlp = gathered_mlp,
        combine: Combine = combine_ops,
    ) -> None:
        self._rows_mlp, self._combine = rows_mlp, combine
        for chunk in chunks:
            check_expert_ids(chunk.indices, mlp.layer.num_experts, mlp.layer.name)
        self._mlp = mlp
        self._chunks = list(chunks)
        self._outputs: list[mx.array | None] = [None] * len(self._chunks)
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

    def _add_chunk(
        self, group: PublishedGroup, chunk: ChunkInput, y: mx.array | None
    ) -> mx.array | None:
        rows, ids = rows_of(group, chunk.indices, self._mlp.layer.num_experts)
        if not rows.size:
            return None
        k = chunk.indices.shape[1]
        out = self._rows_mlp(self._mlp.module, group.weights, chunk.x, rows // k, ids)
        if chunk.scores is not None:
            return self._combine(out, rows, chunk.scores, y, chunk.x.dtype)
        y = self._empty(chunk) if y is None else y
        flat = y.reshape(-1, y.shape[-1])
        flat[mx.array(rows)] = out.astype(flat.dtype)
        return flat.reshape(y.shape)

    def outputs(self) -> list[mx.array]:
        """One array per chunk; every routed expert must have been added."""
        used = np.unique(np.concatenate([c.indices.reshape(-1) for c in self._chunks]))
        assert self._seen[used].all(), "an expert of this layer was never added"
        return [
            self._empty(c) if y is None else y.astype(c.x.dtype)
            for c, y in zip(self._chunks, self._outputs, strict=True)
        ]


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
