"""The CUDA backend: readers fill pinned host slots, a copy stream fills their device mirrors, and
our kernels or stock MLX operations compute from those.

Bytes go SSD -> pinned slot -> mirror -> tensor cores; a slot is free for the next read as soon as
its copy is done. The ordering rules are those of upload.py. Each host slot may have one mirror of
its size, so `memory_budget` bounds the memory on the GPU and, separately, that on the host.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from collections.abc import Sequence

import mlx.core as mx

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
from mlx_stream.backends.cuda.computation import CudaLayerComputation
from mlx_stream.backends.cuda.cudart import CtypesCudart, Cudart
from mlx_stream.backends.cuda.expert_paths import (
    DEQUANTIZED_NBYTES,
    Choice,
    ExpertPath,
    Launcher,
    choose_path,
)
from mlx_stream.backends.cuda.pinned import PAGE_NBYTES, HostAllocator, PinnedMemory, PlainMemory
from mlx_stream.backends.cuda.upload import (
    CopyUploader,
    HostSlot,
    StreamUploader,
    Uploader,
    publish,
)
from mlx_stream.backends.kernels.grouped_cuda import MIN_COMPUTE_CAPABILITY
from mlx_stream.backends.kernels.launch import run_cuda
from mlx_stream.backends.shared_settings import cache_limit
from mlx_stream.backends.slot_ops import MappedOnMlx
from mlx_stream.errors import CapabilityError
from mlx_stream.storage.read_plan import GroupRead

log = logging.getLogger(__name__)

CACHE_LIMIT_NBYTES = 256 << 20  # MLX's default keeps nearly everything it ever freed
KERNELS = ("auto", "fused", "stock")


class CudaBackend(ResidentOnMlx, MappedOnMlx):
    """See the module docstring.

    Args:
        require_device: False runs the very same code on MLX's default device, which is how it is
            tested without an NVIDIA GPU; our kernels then need a `launcher`.
        cudart: the CUDA runtime; None loads it, and without one copies go through MLX.
        kernels: ``"auto"``, ``"fused"`` or ``"stock"``; None asks ``MLX_STREAM_KERNELS``.
        launcher: runs a kernel; None is ``mx.fast.cuda_kernel``.

    Attributes:
        choices: how each expert layer was computed, by its name.

    Raises:
        CapabilityError: no CUDA device.
    """

    name = "cuda"
    compute_dtype: mx.Dtype | None = None

    def __init__(
        self,
        *,
        require_device: bool = True,
        cudart: Cudart | None = None,
        kernels: str | None = None,
        launcher: Launcher | None = None,
    ) -> None:
        if require_device and not mx.cuda.is_available():
            raise CapabilityError(
                "the cuda backend needs an NVIDIA GPU and MLX's CUDA build",
                expected="mx.cuda.is_available()",
                actual="no CUDA device",
                remedy="pip install 'mlx-stream[cuda13]' on a machine with an NVIDIA GPU, or use "
                "--backend cpu here",
            )
        self._kernels = _kernel_choice(kernels)
        self._info = dict(mx.device_info()) if require_device else {}
        self._refusal = None if launcher else _why_no_kernels(self._info, require_device)
        self._launcher = launcher or run_cuda
        self._open_runtime(cudart, require_device)
        self._pool: dict[int, list[HostBuffer]] = defaultdict(list)
        self._paths: dict[tuple[int, mx.Dtype], tuple[ExpertPath, Choice]] = {}
        self.choices: dict[str, Choice] = {}
        self._restore_cache_limit = cache_limit.hold(CACHE_LIMIT_NBYTES)

    @property
    def capabilities(self) -> frozenset[str]:
        """What this machine can do."""
        names = {"staging", "grouped-mlp", "device-slots", "dequantize"}
        if isinstance(self._uploader, StreamUploader):
            names |= {"pinned-staging", "copy-stream"}
        return frozenset(names | ({"fused-kernels"} if self._refusal is None else set()))

    def allocate(self, nbytes: int, align: int) -> HostBuffer:
        """A pooled slot, or a fresh one; freed slots of other sizes make room for it first."""
        step = max(align, PAGE_NBYTES)
        size = -(-nbytes // step) * step
        if self._pool[size]:
            return self._pool[size].pop()
        self._release_pool()
        memory, block = self._memory.take(size, step)
        return HostBuffer(memory, HostSlot(memory, block))

    def free(self, buffer: HostBuffer) -> None:
        """Back to the pool, its mirror too."""
        self._pool[buffer.nbytes].append(buffer)

    def trim(self) -> None:
        """Pooled slots go back to the system."""
        self._release_pool()

    def publish(self, mlp: ExpertMlp, read: GroupRead, buffer: HostBuffer) -> PublishedGroup:
        """A group that goes to the device when it is first computed with."""
        return PublishedGroup(read.experts, publish(read, buffer.owner))

    def begin_layer(self, mlp: ExpertMlp, chunks: Sequence[ChunkInput]) -> LayerComputation:
        """By the path chosen for the layer and the chunks' dtype."""
        key = (mlp.layer.index, chunks[0].x.dtype)
        if key not in self._paths:
            self._paths[key] = choose_path(
                mlp,
                chunks[0].x.dtype,
                kernels=self._kernels,
                refusal=self._refusal,
                launcher=self._launcher,
            )
            self.choices[mlp.layer.name] = self._paths[key][1]
        return CudaLayerComputation(mlp, chunks, self._uploader, self._paths[key], self._launcher)

    def scratch_nbytes(self, mlps: Sequence[ExpertMlp]) -> int:
        """Unpacked weights, and MLX's buffer cache."""
        largest = max(4 * m.layer.input_dims * m.layer.hidden_dims * 3 for m in mlps)
        return CACHE_LIMIT_NBYTES + max(DEQUANTIZED_NBYTES, largest)

    def memory(self) -> MemoryReport:
        """MLX's counters, which include the mirrors; pinned memory is the host's."""
        limit = self._info.get("free_memory", self._info.get("total_memory"))
        return mlx_memory(None if limit is None else int(limit))

    @property
    def pinned_nbytes(self) -> int:
        """Host memory of all slots, pooled ones too."""
        return self._memory.nbytes

    def close(self) -> None:
        """Wait for copies, then release slots and handles and put the cache limit back."""
        self._uploader.idle()
        self._release_pool()
        self._uploader.close()
        self._restore_cache_limit()

    def _open_runtime(self, cudart: Cudart | None, required: bool) -> None:
        if cudart is None and required:
            try:
                cudart = CtypesCudart()
            except CapabilityError as error:
                log.warning("slots are not pinned and MLX copies them: %s", error)
        self._memory: HostAllocator = PlainMemory() if cudart is None else PinnedMemory(cudart)
        self._uploader: Uploader = CopyUploader() if cudart is None else StreamUploader(cudart)

    def _release_pool(self) -> None:
        if any(self._pool.values()):
            self._uploader.idle()  # rule 6
        for buffers in self._pool.values():
            for buffer in buffers:
                self._memory.give(buffer.owner.block)
        self._pool.clear()


def _kernel_choice(kernels: str | None) -> str:
    chosen = kernels or os.environ.get("MLX_STREAM_KERNELS", "auto")
    if chosen not in KERNELS:
        raise CapabilityError(
            "unknown choice of kernels",
            expected=" | ".join(KERNELS),
            actual=chosen,
            remedy="unset MLX_STREAM_KERNELS",
        )
    return chosen


def _why_no_kernels(info: dict[str, str | int], device: bool) -> str | None:
    """The reason why our kernels cannot run on this device, or None."""
    if not device:
        return "no CUDA device"
    have = tuple(int(info.get(f"compute_capability_{part}", 0)) for part in ("major", "minor"))
    if have >= MIN_COMPUTE_CAPABILITY:
        return None
    need = ".".join(map(str, MIN_COMPUTE_CAPABILITY))
    return f"compute capability {'.'.join(map(str, have))}, the kernels need {need}"
