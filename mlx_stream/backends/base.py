"""The backend facade: what MLX itself does not do.

A backend allocates staging memory, publishes a filled slot as expert weights, and runs the grouped
expert MLP over them. Everything above this module speaks only these types; everything below moves
raw bytes. All methods are called from the compute thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_stream.backends.kernels.selection import Choice
from mlx_stream.storage.expert_index import ExpertLayer
from mlx_stream.storage.read_plan import GroupRead


@dataclass
class HostBuffer:
    """Writable memory that readers fill.

    `array` is a 1-D uint8 view whose base address is aligned for cache-bypassing reads; `owner`
    keeps the memory alive. The holder of the HostBuffer owns both until it calls
    :meth:`Backend.free`.
    """

    array: np.ndarray
    owner: Any

    @property
    def nbytes(self) -> int:
        """Usable bytes."""
        return self.array.nbytes


@dataclass(frozen=True)
class ExpertMlp:
    """How one layer's experts compute: the module's truth, checked against the file.

    Attributes:
        layer: where the bytes are.
        module: the mlx-lm SwitchGLU or SwitchMLP with its expert arrays removed; its
            `activation` is used.
    """

    layer: ExpertLayer
    module: nn.Module


@dataclass(frozen=True)
class ChunkInput:
    """One chunk's tokens at an expert layer.

    Attributes:
        x: ``[C, D]`` evaluated MoE input.
        indices: ``[C, K]`` routed expert ids, on the host.
        scores: ``[C, K]`` router weights when the outputs are to be combined here, else None.
    """

    x: mx.array
    indices: np.ndarray
    scores: mx.array | None

    @property
    def combined(self) -> bool:
        """Whether the output is the weighted sum ``[C, D]`` instead of ``[C, K, D]``."""
        return self.scores is not None


@dataclass(frozen=True)
class PublishedGroup:
    """A filled slot as expert weights; valid until the slot is refilled.

    `weights` is the backend's own form: per-expert numpy views (cpu) or planes (metal).

    Attributes:
        slots: where in planes ``[S, ...]`` that hold more than this group each expert is; None if
            the planes are the group's own, its experts in order.
    """

    experts: tuple[int, ...]
    weights: Any
    slots: tuple[int, ...] | None = None


ABSENT = -1


@dataclass(frozen=True)
class ResidentSlots:
    """One layer's experts among stacked slots (see decode/planar_slots.py).

    Attributes:
        slot_map: ``[E]`` int32, the slot of every expert or ABSENT.
        host_map: the same on the host.
        planes: ``{(projection, part): [S, ...]}``.
        memory: the uint8 array that all planes lie in.
        starts: byte of `memory` at which each plane starts.
    """

    slot_map: mx.array
    host_map: np.ndarray
    planes: Mapping[tuple[str, str], mx.array]
    memory: mx.array
    starts: Mapping[tuple[str, str], int]


class Fence(Protocol):
    """Says when a slot may be refilled."""

    def passed(self) -> bool:
        """True when it is known, without waiting, that the slot is free."""

    def wait(self) -> None:
        """Return when every array that reads the slot has been evaluated."""


class NoFence:
    """For backends whose work is finished when the call returns."""

    def passed(self) -> bool:
        """Always."""
        return True

    def wait(self) -> None:
        """Nothing is pending."""


class LayerComputation(Protocol):
    """One expert layer over all chunks of a segment; groups are added in the order they arrive."""

    def add(self, groups: Sequence[PublishedGroup]) -> Fence:
        """Compute the rows routed to these experts."""

    def outputs(self) -> list[mx.array]:
        """One array per chunk, ``[C, D]`` or ``[C, K, D]``, when every group was added."""


class Backend(Protocol):
    """See the module docstring.

    Attributes:
        name: ``"cpu"``, ``"metal"`` or ``"cuda"``.
        capabilities: names of what it can do; asking for another raises CapabilityError.
        compute_dtype: dtype the model's floats are cast to; None keeps the checkpoint's.
        choices: how each expert layer was computed last, by its name; a kernel that is chosen
            apart has an entry of its own, ``"<name> combine"`` and ``"<name> decode"``.
    """

    name: str
    capabilities: frozenset[str]
    compute_dtype: mx.Dtype | None
    choices: Mapping[str, Choice]

    def allocate(self, nbytes: int, align: int) -> HostBuffer:
        """Memory for one slot; the caller has already asked the budget."""

    def free(self, buffer: HostBuffer) -> None:
        """Give a slot's memory back."""

    def trim(self) -> None:
        """Give memory of freed slots that is kept for reuse back to the system."""

    def publish(self, mlp: ExpertMlp, read: GroupRead, buffer: HostBuffer) -> PublishedGroup:
        """Expert weights over a filled buffer, without a copy."""

    def begin_layer(self, mlp: ExpertMlp, chunks: Sequence[ChunkInput]) -> LayerComputation:
        """Start an expert layer for a segment."""

    def begin_decode(self, mlp: ExpertMlp, chunk: ChunkInput) -> LayerComputation:
        """Start an expert layer for a step of decoding: a few tokens, experts from the cache.

        The groups that are added are cache records, each wherever its slot is; the same experts
        give the same outputs in whatever slots they lie and however they are shared out over calls
        of ``add``. Any number of tokens is allowed: a backend uses kernels for decoding where it
        has some, and otherwise computes the layer as any other.
        """

    def mapped_mlp(
        self, mlp: ExpertMlp, slots: ResidentSlots, x: mx.array, ids: mx.array
    ) -> mx.array:
        """Lazy ``x [T, D], ids [T, K] -> [T, K, D]`` from stacked slots; ids stay on the device."""

    def prepare_model(self, model: nn.Module, vocab_size: int) -> Callable[[], None]:
        """Adapt resident layers of a loaded model; returns the undo."""

    def compute_scope(self) -> AbstractContextManager[None]:
        """Active while the model runs."""

    def scratch_nbytes(self, mlps: Sequence[ExpertMlp]) -> int:
        """Upper bound of working memory beyond inputs, outputs and slots."""

    def memory(self) -> MemoryReport:
        """What this process holds now."""

    def close(self) -> None:
        """Release threads and memory."""


class DecodeAsLayer:
    """The part of a Backend that has no kernels for decoding: a step is a layer as any other."""

    if TYPE_CHECKING:

        def begin_layer(self, mlp: ExpertMlp, chunks: Sequence[ChunkInput]) -> LayerComputation:
            """See :meth:`Backend.begin_layer`."""

    def begin_decode(self, mlp: ExpertMlp, chunk: ChunkInput) -> LayerComputation:
        """See :meth:`Backend.begin_decode`."""
        return self.begin_layer(mlp, [chunk])


class ResidentOnMlx(DecodeAsLayer):
    """The part of a Backend whose resident layers run on MLX as they are."""

    def prepare_model(self, model: nn.Module, vocab_size: int) -> Callable[[], None]:
        """Nothing to adapt, nothing to undo."""
        return lambda: None

    def compute_scope(self) -> AbstractContextManager[None]:
        """Nothing to set up."""
        return nullcontext()


@dataclass(frozen=True)
class MemoryReport:
    """Bytes. `active` and `peak` are MLX's counters; `limit` is the device's or None."""

    active: int
    peak: int
    limit: int | None


def mlx_memory(limit: int | None = None) -> MemoryReport:
    """MLX's own counters."""
    return MemoryReport(mx.get_active_memory(), mx.get_peak_memory(), limit)
