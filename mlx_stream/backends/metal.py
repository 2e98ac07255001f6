"""The metal backend: unified memory, planes filled in place, ``gather_qmm`` as the expert path.

A numpy view of an MLX array is writable and is the GPU's own memory, so readers fill what the GPU
reads. The base array is held for the life of the buffer and never assigned to.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_stream.backends.base import (
    ChunkInput,
    ExpertMlp,
    HostBuffer,
    LayerComputation,
    MemoryReport,
    PublishedGroup,
    ResidentOnMlx,
    mlx_memory,
)
from mlx_stream.backends.kernels.activations import KernelActivation, kernel_activation
from mlx_stream.backends.kernels.grouped import Runner, grouped_mlp_metal, supports_module
from mlx_stream.backends.kernels.launch import dtype_name, run_metal
from mlx_stream.backends.kernels.selection import (
    Choice,
    choose,
    forced_path,
    load_profile,
    machine_name,
)
from mlx_stream.backends.mlx_ops import MlxLayerComputation, Planes, plane_arrays
from mlx_stream.errors import CapabilityError
from mlx_stream.storage.read_plan import GroupRead

log = logging.getLogger(__name__)

PAGE_NBYTES = 16384  # Apple Silicon; F_NOCACHE reads need no alignment, DMA likes it
CACHE_LIMIT_NBYTES = 256 << 20  # MLX's default keeps freed buffers up to 1.5x of memory


class MetalBackend(ResidentOnMlx):
    """See the module docstring.

    Args:
        require_device: False runs the very same code on MLX's current default device, which is
            how it is tested without an Apple GPU.
        run: who launches our kernels; the tests pass a CPU shim.

    Attributes:
        choices: how each expert layer was computed last, by its name.

    Raises:
        CapabilityError: no Metal device.
    """

    name = "metal"
    capabilities = frozenset({"staging", "grouped-mlp", "unified-memory"})
    compute_dtype: mx.Dtype | None = None

    def __init__(self, *, require_device: bool = True, run: Runner = run_metal) -> None:
        if require_device and not mx.metal.is_available():
            raise CapabilityError(
                "the metal backend needs an Apple GPU",
                expected="mx.metal.is_available()",
                actual="no Metal device",
                remedy="use --backend cpu here",
            )
        self._run = run
        self._forced = forced_path()
        self._verified = load_profile(machine_name())
        self._activations: dict[int, KernelActivation | None] = {}
        self.choices: dict[str, Choice] = {}
        self._pool: dict[int, list[HostBuffer]] = defaultdict(list)
        self._device = require_device
        self._old_cache_limit = mx.set_cache_limit(CACHE_LIMIT_NBYTES)
        self._old_wired_limit = self._raise_wired_limit() if require_device else None

    def allocate(self, nbytes: int, align: int) -> HostBuffer:
        """A buffer of the pool, or a fresh one; a fresh large Metal buffer costs ~20 ms a GB."""
        size = -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
        if self._pool[size]:
            return self._pool[size].pop()
        step = max(align, PAGE_NBYTES)
        base = mx.zeros((size + step,), dtype=mx.uint8)
        mx.eval(base)
        view = np.array(base, copy=False)
        lead = -view.ctypes.data % step
        return HostBuffer(view[lead : lead + size], (base, lead))

    def free(self, buffer: HostBuffer) -> None:
        """Back to the pool; the pool is emptied by :meth:`close`."""
        self._pool[buffer.nbytes].append(buffer)

    def publish(self, mlp: ExpertMlp, read: GroupRead, buffer: HostBuffer) -> PublishedGroup:
        """Planes ``[G, ...]`` over the slot."""
        base, lead = buffer.owner
        return PublishedGroup(read.experts, _LazyPlanes(read, base, lead))

    def begin_layer(self, mlp: ExpertMlp, chunks: Sequence[ChunkInput]) -> LayerComputation:
        """Stock operations or our kernels, as :func:`choose` says."""
        rows = sum(c.indices.size for c in chunks)
        used = len(np.unique(np.concatenate([c.indices.reshape(-1) for c in chunks])))
        choice = self._choose(mlp, chunks[0].x.dtype, rows / max(1, used))
        self.choices[mlp.layer.name] = choice
        if choice.path == "stock":
            return MlxLayerComputation(mlp, chunks)
        return MlxLayerComputation(mlp, chunks, partial(self._fused, mlp))

    def _choose(self, mlp: ExpertMlp, dtype: mx.Dtype, rows_per_expert: float) -> Choice:
        layer = mlp.layer
        if layer.index not in self._activations:
            self._activations[layer.index] = kernel_activation(mlp.module.activation)
        supported, reason = supports_module(
            mlp.module,
            (layer.input_dims, layer.hidden_dims),
            dtype_name(dtype),
            self._activations[layer.index],
        )
        return choose(
            forced=self._forced,
            supported=supported,
            unsupported_reason=reason,
            format_name=layer.quant[0][1].name,
            rows_per_expert=rows_per_expert,
            verified=self._verified,
        )

    def _fused(
        self,
        mlp: ExpertMlp,
        module: nn.Module,
        planes: Planes,
        x: mx.array,
        tokens: np.ndarray,
        ids: np.ndarray,
    ) -> mx.array:
        activation = self._activations[mlp.layer.index]
        return grouped_mlp_metal(
            module, planes, x, tokens, ids, activation=activation, run=self._run
        )

    def scratch_nbytes(self, mlps: Sequence[ExpertMlp]) -> int:
        """MLX's buffer cache."""
        return CACHE_LIMIT_NBYTES

    def memory(self) -> MemoryReport:
        """MLX's counters and the device's recommended working set."""
        info = mx.device_info() if self._device else {}
        limit = info.get("max_recommended_working_set_size")
        return mlx_memory(None if limit is None else int(limit))

    def close(self) -> None:
        """Empty the pool and put the limits back."""
        self._pool.clear()
        mx.set_cache_limit(self._old_cache_limit)
        if self._old_wired_limit is not None:
            mx.set_wired_limit(self._old_wired_limit)

    def _raise_wired_limit(self) -> int | None:
        """Wire up to the recommended working set; never more, several processes may run."""
        recommended = mx.device_info().get("max_recommended_working_set_size")
        if recommended is None:
            return None
        try:
            return mx.set_wired_limit(int(recommended))
        except ValueError as error:
            log.warning("the wired limit stays as it is: %s", error)
            return None


class _LazyPlanes(dict[tuple[str, str], Any]):
    """Planes made at first use: publishing may come before the bytes have arrived."""

    def __init__(self, read: GroupRead, base: mx.array, lead: int) -> None:
        super().__init__()
        self._make = lambda: plane_arrays(read, base, lead)

    def __missing__(self, key: tuple[str, str]) -> mx.array:
        self._fill()
        if not super().__contains__(key):
            raise KeyError(key)
        return super().__getitem__(key)

    def get(self, key: tuple[str, str], default: Any = None) -> Any:
        """As dict.get, after filling."""
        self._fill()
        return super().get(key, default)

    def _fill(self) -> None:
        if not self:
            self.update(self._make())
