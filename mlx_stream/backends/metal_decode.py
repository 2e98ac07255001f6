"""Decoding on the metal backend: a few tokens' experts, fused, from cache slots wherever they lie.

The kernels address all experts of a launch in one piece of memory, through a slot table. So records
whose slots share memory share a launch, in any order and with any gaps, and every other piece of
memory has a launch of its own. The plain-ops twin is `mlx_ops.MlxLayerComputation`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
import numpy as np

from mlx_stream.backends.base import ABSENT as NOT_RESIDENT
from mlx_stream.backends.base import ChunkInput, ExpertMlp, Fence, PublishedGroup, ResidentSlots
from mlx_stream.backends.grouping import check_expert_ids
from mlx_stream.backends.kernels.activations import KernelActivation
from mlx_stream.backends.kernels.decode import (
    ALIGNMENT,
    PARTS,
    PROJECTIONS,
    DecodeLayer,
    decode_mlp_metal,
    slot_table,
)
from mlx_stream.backends.kernels.grouped import Runner, supports_module
from mlx_stream.backends.kernels.launch import dtype_name
from mlx_stream.backends.kernels.weight_formats import matrix_from
from mlx_stream.backends.mlx_ops import Combine, EvalFence, gathered_mlp, rows_of
from mlx_stream.storage.expert_index import ExpertLayer

Places = dict[tuple[str, str], int]  # byte of each tensor of an expert

LARGEST_MEMORY = 1 << 34  # bytes that a slot table reaches: words counted in 32 bits
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def decode_layer(
    mlp: ExpertMlp, dtype: mx.Dtype, activation: KernelActivation | None
) -> tuple[DecodeLayer | None, str]:
    """What the decode kernels are compiled for, or None and why they cannot compute this layer."""
    layer, module = mlp.layer, mlp.module
    dims = (layer.input_dims, layer.hidden_dims)
    supported, reason = supports_module(module, dims, dtype_name(dtype), activation)
    if not supported or activation is None:
        return None, reason
    # nvfp4's tensor scale is read as float32 whatever the other floats are.
    stored = {t.dtype for t in layer.tensors if t.key[1] != "global_scale"}.intersection(_FLOATS)
    if len(stored) > 1:
        return None, f"expert tensors of several float types, {' and '.join(sorted(stored))}"
    inner, outer = (
        matrix_from(module[name], layer.tensor((name, "weight")).shape, _parts(layer, name))
        for name in (("fc1", "fc2") if layer.kind == "mlp" else ("gate_proj", "down_proj"))
    )
    if inner is None or outer is None:
        raise AssertionError("supports_module has seen these formats")
    floats = _FLOATS[stored.pop()] if stored else dtype_name(dtype)
    return DecodeLayer(inner, outer, activation, floats), "supported"


def _parts(layer: ExpertLayer, name: str) -> set[str]:
    return {part for projection, part in (t.key for t in layer.tensors) if projection == name}


class Addressed(Protocol):
    """Weights of a group whose memory the kernels can be given; `SlotPlanes` are, stacked or not.

    Attributes:
        base: uint8 memory, perhaps of other groups too.
        lead: a byte of `base` that is aligned in memory.
    """

    base: mx.array
    lead: int

    def places(self, position: int) -> Places:
        """Byte of `base` where each tensor of the group's expert number `position` starts."""


@dataclass(frozen=True)
class Stack:
    """Experts whose slots share memory: byte places count from the first word of `words`."""

    words: mx.array
    places: dict[int, Places]


def stacks(groups: Sequence[PublishedGroup]) -> list[Stack]:
    """The groups' experts by the memory they are in, without a copy."""
    by_memory: dict[tuple[int, int], list[PublishedGroup]] = {}
    for group in groups:
        # Where memory does not start aligned, its first words are left out.
        key = (id(group.weights.base), group.weights.lead % ALIGNMENT)
        by_memory.setdefault(key, []).append(group)
    return [
        Stack(_words(shared[0].weights.base, first), _relative(shared, first))
        for (_, first), shared in by_memory.items()
    ]


def _words(base: mx.array, first: int) -> mx.array:
    words = base.view(mx.uint32)
    return words if first == 0 else words[first // 4 :]


def _relative(groups: Sequence[PublishedGroup], first: int) -> dict[int, Places]:
    return {
        expert: {key: at - first for key, at in places.items()}
        for group in groups
        for expert, places in group_places(group).items()
    }


def group_places(group: PublishedGroup) -> dict[int, Places]:
    """Byte of the group's memory where each tensor of each of its experts starts."""
    return {expert: group.weights.places(i) for i, expert in enumerate(group.experts)}


def unreadable(group: PublishedGroup) -> str | None:
    """Why the kernels cannot read a group where it lies, or None."""
    weights: Addressed = group.weights
    if not hasattr(weights, "places"):
        return "the memory of a record's planes is not known"
    starts = [at for places in group_places(group).values() for at in places.values()]
    if weights.lead % 4 or any((at - weights.lead) % ALIGNMENT for at in starts):
        # Reads that need alignment leave images of the file in a slot.
        return f"a record's tensors are not at multiples of {ALIGNMENT} bytes"
    if max(starts) >= LARGEST_MEMORY:
        return f"a record lies beyond {LARGEST_MEMORY >> 30} GiB of its memory"
    return None


def unreadable_slots(slots: ResidentSlots) -> str | None:
    """As `unreadable`, for stacked slots."""
    sizes = [plane.nbytes // plane.shape[0] for plane in slots.planes.values()]
    if any(n % ALIGNMENT for n in (*sizes, *slots.starts.values())):
        return f"a slot's tensors are not at multiples of {ALIGNMENT} bytes"
    if slots.memory.nbytes > LARGEST_MEMORY:
        return f"stacked slots of more than {LARGEST_MEMORY >> 30} GiB"
    return None


def resident_table(slots: ResidentSlots) -> np.ndarray:
    """``[E, 3, 5]`` of `slot_table`, for every expert that is in a slot."""
    table = slot_table(len(slots.host_map), {})
    experts = np.flatnonzero(slots.host_map != NOT_RESIDENT)
    places = slots.host_map[experts].astype(np.int64)
    for (projection, part), start in slots.starts.items():
        plane = slots.planes[projection, part]
        column = PROJECTIONS[projection], PARTS.index(part)
        table[experts, *column] = (start + places * (plane.nbytes // plane.shape[0])) // 4
    return table


class MetalDecodeComputation:
    """See :class:`mlx_stream.backends.base.LayerComputation`; one chunk of a few tokens.

    Args:
        layer: of `decode_layer`.
        run: who launches the kernels.
        combine: sums the rows of chunks with scores when the experts came in several launches.
        refuse: told why, when records have to be computed by stock operations.
    """

    def __init__(
        self,
        mlp: ExpertMlp,
        chunk: ChunkInput,
        layer: DecodeLayer,
        *,
        run: Runner,
        combine: Combine,
        refuse: Callable[[str], None],
    ) -> None:
        check_expert_ids(chunk.indices, mlp.layer.num_experts, mlp.layer.name)
        self._mlp, self._chunk, self._layer = mlp, chunk, layer
        self._run, self._combine, self._refuse = run, combine, refuse
        self._parts: list[tuple[np.ndarray, mx.array]] = []  # flat rows [R], values [R, D]
        self._whole: mx.array | None = None  # [T, D]: one launch did the sum as well

    def add(self, groups: Sequence[PublishedGroup]) -> Fence:
        """Compute these records' rows; work may still run when this returns."""
        reasons = [unreadable(group) for group in groups]
        computed = [
            self._add_plain(group, reason)
            for group, reason in zip(groups, reasons, strict=True)
            if reason is not None
        ]
        readable = [g for g, reason in zip(groups, reasons, strict=True) if reason is None]
        computed += [self._add_stack(stack) for stack in stacks(readable)]
        touched = [y for y in computed if y is not None]
        mx.async_eval(touched)
        return EvalFence(touched)

    def outputs(self) -> list[mx.array]:
        """``[T, D]`` or ``[T, K, D]``; every routed expert must have been added."""
        if self._whole is not None:
            return [self._whole]
        chunk = self._chunk
        rows = np.concatenate([rows for rows, _ in self._parts])
        order = np.argsort(rows)
        complete = np.array_equal(rows[order], np.arange(chunk.indices.size))
        assert complete, "an expert of this layer was never added, or added twice"
        values = self._parts[0][1]
        if len(self._parts) > 1:
            values = mx.concatenate([part for _, part in self._parts])
        if chunk.scores is not None:
            y = self._combine(values, rows, chunk.scores, None, chunk.x.dtype)
            return [y.astype(chunk.x.dtype)]
        if (order != np.arange(len(order))).any():
            values = values[mx.array(order)]
        return [values.reshape(*chunk.indices.shape, -1)]

    def _add_stack(self, stack: Stack) -> mx.array | None:
        experts = list(stack.places)
        local = np.full(self._mlp.layer.num_experts, -1, dtype=np.int32)
        local[experts] = np.arange(len(experts), dtype=np.int32)
        ids = local[self._chunk.indices].reshape(-1)
        rows = np.flatnonzero(ids >= 0)
        if not rows.size:
            return None
        ids = ids[rows]
        table = slot_table(len(experts), {i: stack.places[e] for i, e in enumerate(experts)})
        x, scores, (tokens, k) = self._chunk.x, None, self._chunk.indices.shape
        if len(rows) == tokens * k:
            ids, scores = ids.reshape(tokens, k), self._chunk.scores
        elif tokens == 1:
            ids = ids[None]
        else:
            x, ids = x[mx.array(rows // k)], ids[:, None]
        y = decode_mlp_metal(
            self._layer, x, mx.array(ids), stack.words, mx.array(table), scores, run=self._run
        )
        if scores is not None:
            self._whole = y
            return y
        return self._keep(rows, y.reshape(len(rows), -1))

    def _add_plain(self, group: PublishedGroup, reason: str) -> mx.array | None:
        self._refuse(reason)
        rows, ids = rows_of(group, self._chunk.indices, self._mlp.layer.num_experts)
        if not rows.size:
            return None
        tokens = rows // self._chunk.indices.shape[1]
        y = gathered_mlp(self._mlp.module, group.weights, self._chunk.x, tokens, ids)
        return self._keep(rows, y.astype(self._chunk.x.dtype))

    def _keep(self, rows: np.ndarray, values: mx.array) -> mx.array:
        self._parts.append((rows, values))
        return values
