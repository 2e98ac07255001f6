"""Layers through the metal backend with its kernels on the shim, each compared with the twin."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_stream.backends.base import (
    ABSENT,
    ChunkInput,
    HostBuffer,
    LayerComputation,
    PublishedGroup,
    ResidentSlots,
)
from mlx_stream.backends.metal import MetalBackend
from mlx_stream.backends.mlx_ops import DTYPES, MlxLayerComputation, StackedPlanes
from mlx_stream.backends.selftest import Bench, Case, filled_slots, make_bench
from mlx_stream.storage.read_plan import GroupRead, Plane, plan_group

from .running import TOLERANCE, ShimRunner, as_float32, error

F32 = mx.float32
SMALL = Case("affine", 4, 32, experts=6, dims=64, hidden=32, tokens=1, top_k=4)


@dataclass
class Rig:
    """A backend whose kernels run on the shim."""

    backend: MetalBackend
    run: ShimRunner


def chunk_of(bench: Bench, weighted: bool) -> ChunkInput:
    """The bench's tokens, with random router weights if the sum is to be weighted."""
    scores = mx.random.uniform(shape=bench.ids.shape, key=mx.random.key(4))
    return ChunkInput(bench.x, bench.ids, scores.astype(bench.x.dtype) if weighted else None)


def outputs(computation: LayerComputation, calls: Sequence[Sequence[PublishedGroup]]) -> mx.array:
    """The only chunk's output after these calls of add."""
    for groups in calls:
        computation.add(groups).wait()
    (y,) = computation.outputs()
    return y


def expected(bench: Bench, chunk: ChunkInput, groups: Sequence[PublishedGroup]) -> mx.array:
    """The twin's output, in float32; for 16-bit floats numpy's, since the twin rounds each step."""
    if bench.x.dtype == F32:
        return outputs(MlxLayerComputation(bench.mlp, [chunk]), [groups])
    y = bench.reference()
    if chunk.scores is not None:
        y = (y * as_float32(chunk.scores)[..., None]).sum(axis=1)
    return mx.array(y)


def fill(image: bytes, read: Any, slot: np.ndarray) -> None:
    """As a reader would."""
    source = np.frombuffer(image, np.uint8)
    for op in read.ops:
        at = op.offset
        for offset, nbytes in op.parts:
            slot[offset : offset + nbytes] = source[at : at + nbytes]
            at += nbytes


@contextmanager
def shared_slots(
    backend: MetalBackend, bench: Bench, experts: Sequence[int], seed: int
) -> Iterator[list[PublishedGroup]]:
    """A record an expert, all in one piece of memory: shuffled, with gaps of rubbish between."""
    reads = [
        plan_group(bench.mlp.layer, [e], align=1, file_sizes=(len(bench.image),)) for e in experts
    ]
    step = reads[0].slot_nbytes + 192
    block = backend.allocate(step * (len(experts) + 1), 1)
    block.array[:] = 0xFF
    base, lead = block.owner
    groups = []
    for read, place in zip(reads, np.random.default_rng(seed).permutation(len(reads)), strict=True):
        at = step * int(place) + 64
        part = HostBuffer(block.array[at : at + read.slot_nbytes], (base, lead + at))
        fill(bench.image, read, part.array)
        groups.append(backend.publish(bench.mlp, read, part))
    yield groups
    backend.free(block)


def stacked_slots(bench: Bench, slots: Mapping[int, int], count: int) -> ResidentSlots:
    """The bench's experts in planes ``[count, ...]`` of one memory; other slots hold rubbish."""
    starts, rows = {}, 0
    for t in bench.mlp.layer.tensors:
        starts[t.key] = rows * 4096
        rows += -(-t.nbytes * count // 4096)
    base = mx.full((rows, 4096), 0xFF, dtype=mx.uint8)
    mx.eval(base)
    memory, image = np.array(base, copy=False).reshape(-1), np.frombuffer(bench.image, np.uint8)
    planes = {}
    for t in bench.mlp.layer.tensors:
        for expert, slot in slots.items():
            at, source = starts[t.key] + slot * t.nbytes, t.offset + expert * t.stride
            memory[at : at + t.nbytes] = image[source : source + t.nbytes]
        flat = base.view(DTYPES[t.dtype]).reshape(-1)[starts[t.key] // DTYPES[t.dtype].size :]
        planes[t.key] = flat[: math.prod(t.shape) * count].reshape(count, *t.shape)
    host = np.full(bench.mlp.layer.num_experts, ABSENT, dtype=np.int32)
    host[list(slots)] = list(slots.values())
    return ResidentSlots(mx.array(host), host, planes, base, starts)


def shuffled_slots(bench: Bench) -> dict[int, int]:
    """A slot of nine for each expert that the bench's tokens want."""
    used = np.unique(bench.ids).tolist()
    return dict(zip(used, np.random.default_rng(3).permutation(9).tolist(), strict=False))


def stacked_error(rig: Rig, *, known: bool = True, tokens: int = 2) -> float:
    """All records in one group, their slots in stacked planes: error to numpy's answer.

    known: whether the group says where the planes' memory is.
    """
    bench = make_bench(replace(SMALL, tokens=tokens), F32)
    chunk, slots = chunk_of(bench, weighted=True), shuffled_slots(bench)
    stacked = stacked_slots(bench, slots, 9)
    planes = [
        Plane(
            t.key,
            t.dtype,
            t.shape,
            t.nbytes,
            tuple(stacked.starts[t.key] + slot * t.nbytes for slot in slots.values()),
        )
        for t in bench.mlp.layer.tensors
    ]
    read = GroupRead(0, tuple(slots), tuple(planes), (), 0, 0, 0)
    weights = StackedPlanes(read, stacked.memory, stacked.planes) if known else stacked.planes
    group = PublishedGroup(tuple(slots), weights, tuple(slots.values()))
    want = mx.array((bench.reference() * as_float32(chunk.scores)[..., None]).sum(axis=1))
    twin = outputs(MlxLayerComputation(bench.mlp, [chunk]), [[group]])
    assert error(twin, want) <= TOLERANCE[F32]
    return error(outputs(rig.backend.begin_decode(bench.mlp, chunk), [[group]]), want)


def mapped_error(rig: Rig, case: Case = SMALL) -> float:
    """Stacked slots through a map on the device: error to numpy's answer."""
    bench = make_bench(case, F32)
    slots = stacked_slots(bench, shuffled_slots(bench), 9)
    y = rig.backend.mapped_mlp(bench.mlp, slots, bench.x, mx.array(bench.ids))
    return error(y, mx.array(bench.reference()))


def decode_error(
    rig: Rig, case: Case, *, weighted: bool = False, dtype: mx.Dtype = F32, parts: int = 1
) -> float:
    """Records in slots of their own, shuffled, over `parts` calls of add: error to the twin."""
    bench = make_bench(case, dtype)
    chunk = chunk_of(bench, weighted)
    used = np.random.default_rng(2).permutation(np.unique(bench.ids)).tolist()
    with filled_slots(rig.backend, bench, [[e] for e in used]) as records:
        calls = [records[i::parts] for i in range(parts)]
        y = outputs(rig.backend.begin_decode(bench.mlp, chunk), calls)
        want = expected(bench, chunk, records)
        assert (y.shape, y.dtype) == (want.shape, dtype)
        return error(y, want)


def shared_error(rig: Rig, *, tokens: int = 1, weighted: bool = False, seed: int = 0) -> float:
    """Records in shuffled slots of one piece of memory: error to the twin."""
    bench = make_bench(replace(SMALL, tokens=tokens), F32)
    chunk = chunk_of(bench, weighted)
    with shared_slots(rig.backend, bench, np.unique(bench.ids).tolist(), seed) as records:
        y = outputs(rig.backend.begin_decode(bench.mlp, chunk), [records])
        return error(y, expected(bench, chunk, records))


def prefill_error(rig: Rig, dtype: mx.Dtype = F32) -> float:
    """A weighted layer whose experts arrive in three groups: error to the twin."""
    bench = make_bench(replace(SMALL, tokens=40), dtype)
    chunk = chunk_of(bench, weighted=True)
    with filled_slots(rig.backend, bench, [[0, 1], [2], [3, 4, 5]]) as groups:
        y = outputs(rig.backend.begin_layer(bench.mlp, [chunk]), [[g] for g in groups])
        want = expected(bench, chunk, groups)
        assert (y.shape, y.dtype) == (want.shape, dtype)
        return error(y, want)
