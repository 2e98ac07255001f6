"""The expert MLPs of one read group, dequantized block by block and multiplied by BLAS.

Everything runs transposed, outputs by rows: out [N, R] = w [N, K] @ x [K, R]. Weights keep
their storage order, the hidden state needs no transpose between the two projections, and this
is the form of sgemm that is fast with few rows. Owns scratch, not weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mlx_stream.backends.cpu.dequant import Spec
from mlx_stream.backends.cpu.gemm import (
    ROW_BLOCK,
    W_BLOCK_ROWS,
    Arena,
    Projection,
    activation_operand,
    blocks,
    by_projection,
    copy_transposed,
    padded,
    row_stride,
)
from mlx_stream.backends.cpu.operand import PADDING, TRANSPOSE_BLOCK, Layout, fill_activation
from mlx_stream.backends.cpu.pool import WorkerPool

ExpertWeights = Mapping[tuple[str, str], np.ndarray]
Names = Mapping[str, Mapping[str, str]]  # dtype names by projection and part
Allocate = Callable[[tuple[int, ...]], np.ndarray]

# Below this much work, handing it to another thread takes longer than doing it.
INLINE_WORK = 20_000_000
DECODE_COST = 12  # decoding a weight takes as long as multiplying it with so many rows


@dataclass(frozen=True)
class MlpSpec:
    """One layer's expert MLP. 'glu': down(activation(up, gate)); 'mlp': fc2(activation(fc1))."""

    kind: str  # 'glu' | 'mlp'
    quant: Mapping[str, Spec]
    activation: Callable[..., np.ndarray] | None  # numpy twin, see resolve_activation
    mlx_activation: Any  # the nn.Module, used when there is no twin
    input_dims: int  # D
    hidden_dims: int  # F

    @cached_property
    def inner(self) -> tuple[Projection, ...]:
        """Projections into the hidden state, in the activation's argument order."""
        names = ("up_proj", "gate_proj") if self.kind == "glu" else ("fc1",)
        return tuple(
            Projection(name, self.quant[name], self.input_dims, self.hidden_dims) for name in names
        )

    @cached_property
    def outer(self) -> Projection:
        """The projection back to the model's width."""
        name = "down_proj" if self.kind == "glu" else "fc2"
        return Projection(name, self.quant[name], self.hidden_dims, self.input_dims)

    @cached_property
    def input_layouts(self) -> tuple[Layout, ...]:
        """Distinct x operands the inner projections need: one, unless they are packed apart."""
        return tuple(dict.fromkeys(projection.layout for projection in self.inner))


@dataclass(frozen=True)
class ExpertJob:
    """One expert and the rows routed to it. load and store may run on workers: numpy only."""

    weights: ExpertWeights
    rows: int  # R
    load: Callable[[np.ndarray], None]  # fills x [R, D] float32
    store: Callable[[np.ndarray], None]  # receives y [R, D] float32, in job order, one at a time


def grouped_mlp(
    jobs: Sequence[ExpertJob],
    spec: MlpSpec,
    dtypes: Mapping[tuple[str, str], str],
    pool: WorkerPool,
) -> None:
    """Run every job. The result does not depend on timing, on threads or on the grouping.

    dtypes: safetensors dtype name of every key of the weights. The weights must stay valid
    until the call returns. y is valid only during `store`.
    """
    jobs = [job for job in jobs if job.rows]
    names = by_projection(dtypes)
    if spec.activation is not None and _work(jobs, spec) < INLINE_WORK:
        with pool.one_blas_thread():
            for job in jobs:
                job.store(_run_job(job, spec, names, pool))
        return
    if spec.activation is None or len(jobs) < 2 * pool.threads:
        for start in range(0, len(jobs), pool.threads):
            _run_split(jobs[start : start + pool.threads], spec, names, pool)
        return

    def run(job: ExpertJob) -> np.ndarray:
        return _run_job(job, spec, names, pool)

    pool.map_ordered(run, jobs, lambda job, y: job.store(y))


def _work(jobs: Sequence[ExpertJob], spec: MlpSpec) -> int:
    """Weights decoded plus multiplications: what the call will take, in the same unit."""
    weights = (len(spec.inner) + 1) * spec.input_dims * spec.hidden_dims
    return sum(weights * (job.rows + DECODE_COST) for job in jobs)


def scratch_nbytes(spec: MlpSpec, threads: int, max_rows: int = ROW_BLOCK) -> int:
    """Most bytes `grouped_mlp` holds at a time, for jobs of at most max_rows rows.

    Every job in flight has x/y [R, D], and its working set is bounded by ROW_BLOCK rows.
    """
    rows = min(max_rows, ROW_BLOCK)
    # Temporaries inside numpy and while transposing are no larger than these once more.
    transient = 8 * rows * (TRANSPOSE_BLOCK + PADDING) + _weight_scratch_nbytes(spec)
    working = _Block.nbytes(spec, rows) + _weight_scratch_nbytes(spec) + transient
    return (threads + 1) * (working + 4 * max_rows * spec.input_dims)


def _weight_scratch_nbytes(spec: MlpSpec) -> int:
    return max(projection.scratch_nbytes for projection in (*spec.inner, spec.outer))


class _Block:
    """Up to ROW_BLOCK rows of one expert on their way through the MLP."""

    def __init__(self, job: ExpertJob, x: np.ndarray, spec: MlpSpec, allocate: Allocate) -> None:
        """x: [R, D]; replaced by y in `finish`."""
        self.weights, self.x, self.spec = by_projection(job.weights), x, spec
        rows = len(x)
        self.operands = {
            layout: activation_operand(layout, rows, allocate) for layout in spec.input_layouts
        }
        self.hidden = [allocate((spec.hidden_dims, rows)) for _ in spec.inner]  # up, gate [F, R]
        self.hidden_operand = activation_operand(spec.outer.layout, rows, allocate)
        self.output = padded(spec.input_dims, rows, allocate)  # y transposed [D, R]

    @staticmethod
    def nbytes(spec: MlpSpec, rows: int) -> int:
        columns = sum(layout.columns for layout in spec.input_layouts)
        columns += len(spec.inner) * spec.hidden_dims + spec.outer.layout.columns + spec.input_dims
        return 4 * row_stride(rows) * columns + 64 * (len(spec.input_layouts) + len(spec.inner) + 2)

    def load(self) -> None:
        for layout, operand in self.operands.items():
            fill_activation(layout, self.x.T, operand)

    def project_in(self, rows: slice, dtypes: Names, arena: Arena) -> None:
        """Rows of the hidden state: inner projections, then the activation if it is numpy."""
        for projection, hidden in zip(self.spec.inner, self.hidden, strict=True):
            operand = self.operands[projection.layout]
            parts, names = self.weights[projection.name], dtypes[projection.name]
            projection.apply(parts, names, operand, rows, hidden[rows], arena)
        if self.spec.activation is not None:
            parts = [hidden[rows] for hidden in self.hidden]
            self.spec.activation(*parts, out=parts[0])

    def activate_mlx(self) -> None:
        """The activation through MLX, on the thread that owns the streams."""
        import mlx.core as mx

        result = self.spec.mlx_activation(*(mx.array(hidden.T) for hidden in self.hidden))
        self.hidden[0][...] = np.array(result.astype(mx.float32)).T

    def fill_hidden(self) -> None:
        fill_activation(self.spec.outer.layout, self.hidden[0], self.hidden_operand)

    def project_out(self, rows: slice, dtypes: Names, arena: Arena) -> None:
        target = self.output[rows]
        outer = self.spec.outer
        parts, names = self.weights[outer.name], dtypes[outer.name]
        outer.apply(parts, names, self.hidden_operand, rows, target, arena)

    def finish(self) -> None:
        copy_transposed(self.output, self.x)


def _run_job(job: ExpertJob, spec: MlpSpec, dtypes: Names, pool: WorkerPool) -> np.ndarray:
    """One whole expert on this thread. Returns y [R, D], which began as x."""
    x = np.empty((job.rows, spec.input_dims), np.float32)
    job.load(x)
    block_nbytes = _Block.nbytes(spec, min(job.rows, ROW_BLOCK))
    memory = pool.scratch(block_nbytes + _weight_scratch_nbytes(spec))
    for rows in blocks(job.rows, ROW_BLOCK):
        arena = Arena(memory[:block_nbytes])
        weight_arena = Arena(memory[block_nbytes:])
        block = _Block(job, x[rows], spec, arena.float32)
        block.load()
        for outputs in blocks(spec.hidden_dims, W_BLOCK_ROWS):
            block.project_in(outputs, dtypes, weight_arena)
        block.fill_hidden()
        for outputs in blocks(spec.input_dims, W_BLOCK_ROWS):
            block.project_out(outputs, dtypes, weight_arena)
        block.finish()
    return x


def _run_split(
    jobs: Sequence[ExpertJob],
    spec: MlpSpec,
    dtypes: Names,
    pool: WorkerPool,
) -> None:
    """At most `threads` experts at a time, every one split over the threads by output rows."""
    inputs = [np.empty((job.rows, spec.input_dims), np.float32) for job in jobs]
    for job, x in zip(jobs, inputs, strict=True):
        job.load(x)
    most = max((job.rows for job in jobs), default=0)
    for rows in blocks(most, ROW_BLOCK):
        pieces = [
            _Block(job, x[rows], spec, _allocate)
            for job, x in zip(jobs, inputs, strict=True)
            if rows.start < job.rows
        ]
        _split_pieces(pieces, spec, dtypes, pool)
    for job, x in zip(jobs, inputs, strict=True):
        job.store(x)


def _split_pieces(
    pieces: Sequence[_Block],
    spec: MlpSpec,
    dtypes: Names,
    pool: WorkerPool,
) -> None:
    weight_nbytes = _weight_scratch_nbytes(spec)

    def project_in(task: tuple[_Block, slice]) -> None:
        task[0].project_in(task[1], dtypes, Arena(pool.scratch(weight_nbytes)))

    def project_out(task: tuple[_Block, slice]) -> None:
        task[0].project_out(task[1], dtypes, Arena(pool.scratch(weight_nbytes)))

    for piece in pieces:
        piece.load()
    inner = blocks(spec.hidden_dims, W_BLOCK_ROWS)
    pool.map_ordered(project_in, [(piece, rows) for piece in pieces for rows in inner])
    for piece in pieces:
        if spec.activation is None:
            piece.activate_mlx()
        piece.fill_hidden()
    outer = blocks(spec.input_dims, W_BLOCK_ROWS)
    pool.map_ordered(project_out, [(piece, rows) for piece in pieces for rows in outer])
    for piece in pieces:
        piece.finish()


def _allocate(shape: tuple[int, ...]) -> np.ndarray:
    return np.empty(shape, np.float32)
