"""The metal backend: unified memory, planes filled in place, ``gather_qmm`` as the expert path.

A numpy view of an MLX array is writable and is the GPU's own memory, so readers fill what the GPU
reads. The base array is held for the life of the buffer and never assigned to.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from weakref import ref

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_stream.backends import shared_settings
from mlx_stream.backends.base import (
    ChunkInput,
    ExpertMlp,
    HostBuffer,
    LayerComputation,
    MemoryReport,
    PublishedGroup,
    ResidentOnMlx,
    ResidentSlots,
    mlx_memory,
)
from mlx_stream.backends.kernels.activations import KernelActivation, kernel_activation
from mlx_stream.backends.kernels.decode import MAX_TOKENS, DecodeLayer, decode_mlp_metal
from mlx_stream.backends.kernels.grouped import (
    Runner,
    combine_metal,
    grouped_mlp_metal,
    supports_module,
)
from mlx_stream.backends.kernels.launch import dtype_name, run_metal
from mlx_stream.backends.kernels.selection import (
    Choice,
    choose,
    choose_kernel,
    forced_path,
    load_profile,
    machine_name,
)
from mlx_stream.backends.kernels.tiles import place_table
from mlx_stream.backends.metal_decode import (
    MetalDecodeComputation,
    decode_layer,
    resident_table,
    unreadable_slots,
)
from mlx_stream.backends.mlx_ops import (
    Combine,
    MlxLayerComputation,
    Planes,
    SlotPlanes,
    combine_ops,
)
from mlx_stream.backends.slot_ops import MappedOnMlx, slot_mlp_ops
from mlx_stream.errors import CapabilityError
from mlx_stream.storage.read_plan import GroupRead

log = logging.getLogger(__name__)

PAGE_NBYTES = 16384  # Apple Silicon; F_NOCACHE reads need no alignment, DMA likes it
CACHE_LIMIT_NBYTES = 256 << 20  # MLX's default keeps freed buffers up to 1.5x of memory


class MetalBackend(ResidentOnMlx, MappedOnMlx):
    """See the module docstring.

    Args:
        require_device: False runs the very same code on MLX's current default device, which is
            how it is tested without an Apple GPU.
        run: who launches our kernels; the tests pass a CPU shim.

    Attributes:
        choices: how each expert layer was computed last; see :class:`Backend`.

    Raises:
        CapabilityError: no Metal device.
    """

    name = "metal"
    capabilities = frozenset(
        {"staging", "grouped-mlp", "unified-memory", "planes", "stacked-slots"}
    )
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
        self._decode_layers: dict[tuple[int, mx.Dtype], tuple[DecodeLayer | None, str]] = {}
        # Weak: a table must not keep the slots' memory when they are resized.
        self._tables: dict[int, tuple[ref[ResidentSlots], mx.array]] = {}
        self.choices: dict[str, Choice] = {}
        self._pool: dict[int, list[HostBuffer]] = defaultdict(list)
        self._device = require_device
        self._restore_cache_limit = shared_settings.cache_limit.hold(CACHE_LIMIT_NBYTES)
        self._restore_wired_limit = self._raise_wired_limit() if require_device else None

    def allocate(self, nbytes: int, align: int) -> HostBuffer:
        """A buffer of the pool, or a fresh one; a fresh large Metal buffer costs ~20 ms a GB."""
        size = -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES
        if self._pool[size]:
            return self._pool[size].pop()
        if any(self._pool.values()):
            self.trim()  # free slots of another size are not in anybody's budget
        step = max(align, PAGE_NBYTES)
        base = mx.zeros((size + step,), dtype=mx.uint8)
        mx.eval(base)
        view = np.array(base, copy=False)
        lead = -view.ctypes.data % step
        return HostBuffer(view[lead : lead + size], (base, lead))

    def free(self, buffer: HostBuffer) -> None:
        """Back to the pool, until another size is wanted, :meth:`trim` or :meth:`close`."""
        self._pool[buffer.nbytes].append(buffer)

    def trim(self) -> None:
        """Pooled slots go back to the system."""
        self._pool.clear()
        mx.clear_cache()

    def publish(self, mlp: ExpertMlp, read: GroupRead, buffer: HostBuffer) -> PublishedGroup:
        """Planes ``[G, ...]`` over the slot."""
        base, lead = buffer.owner
        return PublishedGroup(read.experts, SlotPlanes(read, base, lead))

    def begin_layer(self, mlp: ExpertMlp, chunks: Sequence[ChunkInput]) -> LayerComputation:
        """Stock operations or our kernels, as :func:`choose` says."""
        rows = sum(c.indices.size for c in chunks)
        used = len(np.unique(np.concatenate([c.indices.reshape(-1) for c in chunks])))
        choice = self._choose(mlp, chunks[0].x.dtype, rows / max(1, used))
        self.choices[mlp.layer.name] = choice
        self.choices.pop(f"{mlp.layer.name} combine", None)  # a stock layer sums as stock does
        if choice.path == "stock":
            return MlxLayerComputation(mlp, chunks)
        combine = self._combine_for(mlp) if any(c.combined for c in chunks) else combine_ops
        return MlxLayerComputation(mlp, chunks, partial(self._fused, mlp), combine)

    def begin_decode(self, mlp: ExpertMlp, chunk: ChunkInput) -> LayerComputation:
        """The decode kernels or stock operations, as :func:`choose_kernel` says.

        More than a few tokens are a layer as any other: the grouped kernels read each expert once
        instead of once a token.
        """
        if not 0 < len(chunk.indices) <= MAX_TOKENS:
            return self.begin_layer(mlp, [chunk])
        layer, reason = self._decode_layer(mlp, chunk.x.dtype)
        if not self._decodes(mlp, None if layer else reason) or layer is None:
            return MlxLayerComputation(mlp, [chunk])
        combine = self._combine_for(mlp) if chunk.combined else combine_ops
        return MetalDecodeComputation(
            mlp, chunk, layer, run=self._run, combine=combine, refuse=partial(self._refuse, mlp)
        )

    def mapped_mlp(
        self, mlp: ExpertMlp, slots: ResidentSlots, x: mx.array, ids: mx.array
    ) -> mx.array:
        """The decode kernels or stock operations; the kernels give NaN for an absent expert."""
        layer, reason = self._decode_layer(mlp, x.dtype)
        unsupported = unreadable_slots(slots) if layer else reason
        if len(x) > MAX_TOKENS:
            unsupported = f"{len(x)} tokens, more than {MAX_TOKENS}"
        if not self._decodes(mlp, unsupported) or layer is None:
            return slot_mlp_ops(mlp.module, slots, x, ids)
        table, words = self._table(mlp, slots), slots.memory.view(mx.uint32)
        return decode_mlp_metal(layer, x, ids, words, table, run=self._run)

    def combine(
        self,
        values: mx.array,
        rows: np.ndarray,
        scores: mx.array,
        previous: mx.array | None,
        dtype: mx.Dtype,
    ) -> mx.array:
        """``expert_combine``, twin of :func:`combine_ops`; float32, exact over read groups."""
        table = place_table(rows, *scores.shape)
        return combine_metal(values, table, scores, previous, dtype=mx.float32, run=self._run)

    def _combine_for(self, mlp: ExpertMlp) -> Combine:
        """For a layer whose experts our kernels compute."""
        choice = self.choices[f"{mlp.layer.name} combine"] = choose_kernel(
            "combine",
            forced=self._forced,
            unsupported=None,
            measured="combine",
            verified=self._verified,
        )
        return self.combine if choice.path == "combine" else combine_ops

    def _decodes(self, mlp: ExpertMlp, unsupported: str | None) -> bool:
        """Whether the decode kernels run; recorded."""
        choice = self.choices[f"{mlp.layer.name} decode"] = choose_kernel(
            "decode",
            forced=self._forced,
            unsupported=unsupported,
            measured=f"decode {mlp.layer.quant[0][1].name}",
            verified=self._verified,
        )
        return choice.path == "decode"

    def _refuse(self, mlp: ExpertMlp, reason: str) -> None:
        """The decode computation met records that it has to give to stock operations."""
        self.choices[f"{mlp.layer.name} decode"] = Choice("stock decode", reason)

    def _table(self, mlp: ExpertMlp, slots: ResidentSlots) -> mx.array:
        """The slot table on the device, made anew when the map is another."""
        known = self._tables.get(mlp.layer.index)
        if known is None or known[0]() is not slots:
            known = ref(slots), mx.array(resident_table(slots))
            self._tables[mlp.layer.index] = known
        return known[1]

    def _decode_layer(self, mlp: ExpertMlp, dtype: mx.Dtype) -> tuple[DecodeLayer | None, str]:
        key = (mlp.layer.index, dtype)
        if key not in self._decode_layers:
            self._decode_layers[key] = decode_layer(mlp, dtype, self._activation(mlp))
        return self._decode_layers[key]

    def _activation(self, mlp: ExpertMlp) -> KernelActivation | None:
        index = mlp.layer.index
        if index not in self._activations:
            self._activations[index] = kernel_activation(mlp.module.activation)
        return self._activations[index]

    def _choose(self, mlp: ExpertMlp, dtype: mx.Dtype, rows_per_expert: float) -> Choice:
        layer = mlp.layer
        supported, reason = supports_module(
            mlp.module,
            (layer.input_dims, layer.hidden_dims),
            dtype_name(dtype),
            self._activation(mlp),
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
        self._tables.clear()
        self._restore_cache_limit()
        if self._restore_wired_limit is not None:
            self._restore_wired_limit()

    def _raise_wired_limit(self) -> Callable[[], None] | None:
        """Wire up to the recommended working set; never more, several processes may run."""
        recommended = mx.device_info().get("max_recommended_working_set_size")
        if recommended is None:
            return None
        try:
            return shared_settings.wired_limit.hold(int(recommended))
        except ValueError as error:
            log.warning("the wired limit stays as it is: %s", error)
            return None
