"""The CPU backend: numpy's BLAS over zero-copy views, in float32.

MLX's CPU wheel links a reference BLAS (about 6 GFLOPS); numpy's OpenBLAS is some fifty times
faster on the same cores. So experts, resident linear layers and long attention run through numpy,
and activations are float32 whatever the checkpoint stores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_stream.backends import shared_settings
from mlx_stream.backends.base import (
    ChunkInput,
    DecodeAsLayer,
    ExpertMlp,
    Fence,
    HostBuffer,
    LayerComputation,
    MemoryReport,
    NoFence,
    PublishedGroup,
    mlx_memory,
)
from mlx_stream.backends.cpu.activations import resolve_activation
from mlx_stream.backends.cpu.attention import attention_override
from mlx_stream.backends.cpu.elementwise import elementwise_override
from mlx_stream.backends.cpu.gemm import ROW_BLOCK
from mlx_stream.backends.cpu.grouped_mlp import (
    ExpertJob,
    ExpertWeights,
    MlpSpec,
    grouped_mlp,
    scratch_nbytes,
)
from mlx_stream.backends.cpu.linear import install_dense
from mlx_stream.backends.cpu.memory import HostMemory
from mlx_stream.backends.cpu.pool import WorkerPool
from mlx_stream.backends.grouping import group_by_expert
from mlx_stream.backends.kernels.selection import Choice
from mlx_stream.backends.slot_ops import MappedOnMlx
from mlx_stream.storage.read_plan import GroupRead

_NUMPY = {"U32": np.uint32, "U8": np.uint8, "F32": np.float32, "F16": np.float16, "BF16": np.uint16}
MLX_CACHE_NBYTES = 64 << 20


class CpuBackend(DecodeAsLayer, MappedOnMlx):
    """See the module docstring and :class:`mlx_stream.backends.base.Backend`."""

    name = "cpu"
    capabilities = frozenset({"staging", "grouped-mlp", "stacked-slots"})
    compute_dtype: mx.Dtype | None = mx.float32

    def __init__(self, threads: int | None = None) -> None:
        self._pool = WorkerPool(threads)
        self._specs: dict[int, tuple[ExpertMlp, MlpSpec]] = {}
        self.choices: dict[str, Choice] = {}
        self._memory = HostMemory()
        self._restore = (
            shared_settings.cache_limit.hold(MLX_CACHE_NBYTES),
            shared_settings.default_device.hold(mx.Device(mx.cpu)),
        )

    def allocate(self, nbytes: int, align: int) -> HostBuffer:
        """Page-aligned memory; pages count only once they are filled."""
        array, piece = self._memory.take(nbytes)
        return HostBuffer(array, piece)

    def free(self, buffer: HostBuffer) -> None:
        """The pages leave the process at once; no view of the buffer may be used any more."""
        self._memory.give(buffer.owner, buffer.nbytes)

    def trim(self) -> None:
        """Nothing is kept."""

    def publish(self, mlp: ExpertMlp, read: GroupRead, buffer: HostBuffer) -> PublishedGroup:
        """Per-expert numpy views over the slot."""
        views = [
            {
                plane.key: _view(buffer.array, plane.offsets[i], plane.nbytes, plane.dtype).reshape(
                    plane.shape
                )
                for plane in read.planes
            }
            for i in range(len(read.experts))
        ]
        return PublishedGroup(read.experts, views)

    def begin_layer(self, mlp: ExpertMlp, chunks: Sequence[ChunkInput]) -> LayerComputation:
        """All chunks together: each expert's weights are decoded once per layer."""
        spec, dtypes = self._spec(mlp)
        return CpuLayerComputation(mlp, spec, dtypes, chunks, self._pool)

    def prepare_model(self, model: nn.Module, vocab_size: int) -> Callable[[], None]:
        """Linear layers through BLAS; the vocabulary projection stays lazy, since all but one of
        its rows are never needed."""

        def skip(name: str, module: nn.Module) -> bool:
            in_a_layer = any(part.isdigit() for part in name.split("."))
            return not in_a_layer and module["weight"].shape[0] >= vocab_size > 0

        return install_dense(model, self._pool, skip=skip)

    @contextmanager
    def compute_scope(self) -> Iterator[None]:
        """Long attention, norms and rotary embeddings through numpy while the model runs."""
        with attention_override(self._pool), elementwise_override(self._pool):
            yield

    def scratch_nbytes(self, mlps: Sequence[ExpertMlp]) -> int:
        """Decoded weight blocks and row blocks of every worker, and MLX's buffer cache."""
        work = max(scratch_nbytes(self._spec(m)[0], self._pool.threads) for m in mlps)
        return work + MLX_CACHE_NBYTES

    def memory(self) -> MemoryReport:
        """MLX's counters plus the slots, which MLX does not see."""
        report = mlx_memory()
        return MemoryReport(
            report.active + self._memory.nbytes, report.peak + self._memory.nbytes, None
        )

    def close(self) -> None:
        """Stop the workers and put MLX's settings back."""
        self._pool.close()
        for restore in self._restore:
            restore()

    def _spec(self, mlp: ExpertMlp) -> tuple[MlpSpec, dict[tuple[str, str], str]]:
        known = self._specs.get(mlp.layer.index)
        if known is None or known[0] is not mlp:
            self._specs[mlp.layer.index] = known = (mlp, _mlp_spec(mlp))
            twin = known[1].activation is not None
            reason = "BLAS" if twin else f"BLAS, activation {type(mlp.module.activation).__name__}"
            self.choices[mlp.layer.name] = Choice("numpy" if twin else "numpy+mlx", reason)
        return known[1], {t.key: t.dtype for t in mlp.layer.tensors}


def _mlp_spec(mlp: ExpertMlp) -> MlpSpec:
    layer = mlp.layer
    return MlpSpec(
        kind=layer.kind,
        quant=dict(layer.quant),
        activation=resolve_activation(mlp.module.activation),
        mlx_activation=mlp.module.activation,
        input_dims=layer.input_dims,
        hidden_dims=layer.hidden_dims,
    )


def _view(memory: np.ndarray, offset: int, nbytes: int, dtype: str) -> np.ndarray:
    return memory[offset : offset + nbytes].view(_NUMPY[dtype])


class CpuLayerComputation:
    """One expert layer over the chunks of a segment, through :func:`grouped_mlp`.

    Outputs are MLX arrays whose memory numpy writes; experts add up in the order they are added,
    so results do not depend on timing.
    """

    def __init__(
        self,
        mlp: ExpertMlp,
        spec: MlpSpec,
        dtypes: dict[tuple[str, str], str],
        chunks: Sequence[ChunkInput],
        pool: WorkerPool,
    ) -> None:
        self._spec, self._dtypes, self._pool = spec, dtypes, pool
        self._chunks = list(chunks)
        self._out_dtypes = [c.x.dtype for c in chunks]
        self._inputs: list[np.ndarray] | None = None  # when the first expert asks: x may be lazy
        self._scores = [
            None if c.scores is None else np.array(c.scores.astype(mx.float32)) for c in chunks
        ]
        self._outputs = [_zeros(c, mlp.layer.input_dims) for c in chunks]
        self._targets = [np.array(y, copy=False) for y in self._outputs]
        self._routing = group_by_expert(
            [c.indices for c in chunks], mlp.layer.num_experts, mlp.layer.name
        )
        self._pending = set(self._routing.used().tolist())

    def add(self, groups: Sequence[PublishedGroup]) -> Fence:
        """Compute the rows of these experts; finished when it returns."""
        jobs = []
        for group in groups:
            for expert, weights in zip(group.experts, group.weights, strict=True):
                if expert in self._pending:
                    self._pending.discard(expert)
                    rows = self._routing.rows(expert)
                    # Blocks bound the scratch when a router sends everything to one expert.
                    jobs += [
                        self._job(rows[i : i + ROW_BLOCK], weights)
                        for i in range(0, len(rows), ROW_BLOCK)
                    ]
        if jobs:
            grouped_mlp(jobs, self._spec, self._dtypes, self._pool)
        return NoFence()

    def outputs(self) -> list[mx.array]:
        """One array per chunk; every routed expert must have been added."""
        assert not self._pending, f"experts never added: {sorted(self._pending)}"
        # The numpy views must die first, or MLX could not reuse the memory later.
        self._targets.clear()
        return [
            y if y.dtype == dtype else y.astype(dtype)
            for y, dtype in zip(self._outputs, self._out_dtypes, strict=True)
        ]

    def _job(self, rows: np.ndarray, weights: ExpertWeights) -> ExpertJob:
        if self._inputs is None:
            self._inputs = [_float_view(c.x) for c in self._chunks]
        inputs = self._inputs
        tokens, places = np.divmod(rows, self._routing.top_k)
        slices = self._routing.chunk_slices(tokens)
        starts = self._routing.chunk_starts

        def load(x: np.ndarray) -> None:
            for chunk, part in slices:
                np.take(inputs[chunk], tokens[part] - starts[chunk], axis=0, out=x[part])

        def store(y: np.ndarray) -> None:
            for chunk, part in slices:
                self._store(chunk, tokens[part] - starts[chunk], places[part], y[part])

        return ExpertJob(weights=weights, rows=len(rows), load=load, store=store)

    def _store(self, chunk: int, tokens: np.ndarray, places: np.ndarray, y: np.ndarray) -> None:
        target, scores = self._targets[chunk], self._scores[chunk]
        if scores is None:
            target[tokens, places] = y
            return
        y = y * scores[tokens, places][:, None]
        if len(tokens) > 1 and (tokens[1:] == tokens[:-1]).any():
            np.add.at(target, tokens, y)  # a router that names an expert twice for one token
        else:
            target[tokens] += y


def _float_view(x: mx.array) -> np.ndarray:
    """Float32 ``[C, D]``; a view when `x` is float32 already."""
    return np.array(x if x.dtype == mx.float32 else x.astype(mx.float32), copy=False)


def _zeros(chunk: ChunkInput, dims: int) -> mx.array:
    tokens, k = chunk.indices.shape
    shape = (tokens, dims) if chunk.combined else (tokens, k, dims)
    if tokens == 1:  # without a wait for what MLX computes meanwhile
        return mx.array(np.zeros(shape, np.float32))
    y = mx.zeros(shape, dtype=mx.float32)
    mx.eval(y)
    return y
