"""Measures how fast a backend computes, through the product's own paths.

A small random mixture-of-experts block is made in memory and prepared as a loaded model is. So the
rates are those of the engine (dequantizing, gathering rows, weighting outputs), not of bare matrix
products.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_stream.backends.base import Backend, ChunkInput, ExpertMlp, PublishedGroup
from mlx_stream.backends.selftest import Case, filled_slots, make_bench
from mlx_stream.block_probe import block_arms
from mlx_stream.planner.machine_profile import COPY, ComputeRate, attention_format
from mlx_stream.probe_arms import FLOATS, MICRO, PACKED, Arm, BlockShape, measure_all

HEAD_VALUES = 4096  # of the attention arms: heads times head size, all sizes alike
GROUP_NBYTES = 48 << 20  # of all experts of an arm together: more than caches hold
LEAST_EXPERTS, MOST_EXPERTS, MOST_SLOTS = 4, 16, 16
FEW_ROWS = 64
COPY_NBYTES = 64 << 20

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ProbeShapes:
    """What is measured. The default takes about twenty seconds on two cores, with its set-up.

    Attributes:
        expert_formats: ``(mode, bits, group size, dtype of the floats)``.
        attention: ``(head size, queries, context)``.
    """

    blocks: tuple[BlockShape, ...] = (
        BlockShape(2048, 32, 4, 128),
        BlockShape(512, 8, 2, 64, expert_hidden=256),
    )
    expert_formats: tuple[tuple[str, int, int, mx.Dtype], ...] = (
        (*PACKED, mx.bfloat16),
        (*MICRO, mx.bfloat16),
        (*FLOATS, mx.bfloat16),
        (*FLOATS, mx.float32),
    )
    rows: tuple[int, ...] = (1, 4, 16, 64, 256)
    most_rows: int = 512
    chunk_rows: tuple[int, ...] = (1, 16, 128, 1024)
    attention: tuple[tuple[int, int, int], ...] = (
        (128, 1, 2048),
        (128, 128, 128),
        (128, 512, 512),
        (128, 256, 2048),
        (128, 128, 6144),
        (64, 1, 2048),
        (64, 128, 128),
        (64, 512, 512),
        (64, 128, 4096),
    )


DEFAULT = ProbeShapes()


def probe_compute(
    backend: Backend,
    *,
    seconds: float = 10.0,
    shapes: ProbeShapes | None = None,
    progress: Progress | None = None,
) -> list[ComputeRate]:
    """Rates of the backend, in about `seconds`, with at least a few runs of every shape.

    Args:
        shapes: None measures DEFAULT.
        progress: told how many runs are done, and of how many at least.
    """
    shapes = DEFAULT if shapes is None else shapes
    began = time.perf_counter()
    with ExitStack() as held:
        held.enter_context(backend.compute_scope())
        parts = [*_expert_parts(backend, shapes), _copy_arm(backend)]
        parts += [block_arms(backend, block, shapes.chunk_rows) for block in shapes.blocks]
        arms = [_attention_arm(backend, *shape) for shape in shapes.attention]
        for part in parts:
            arms += held.enter_context(part)
        left = seconds - (time.perf_counter() - began)
        return measure_all(arms, left, progress)


# --- experts


def _expert_parts(backend: Backend, shapes: ProbeShapes) -> Iterator[Any]:
    for number, block in enumerate(shapes.blocks):
        for place, (mode, bits, group, floats) in enumerate(shapes.expert_formats):
            if number and mode not in ("affine", "none"):
                continue  # small experts: what differs is known from these
            rows = shapes.rows
            if number == place == 0 and shapes.most_rows > max(rows):
                rows = (*rows, shapes.most_rows)
            case = Case(mode, bits, group, dims=block.hidden, hidden=block.expert_hidden)
            yield expert_arms(backend, case, floats, rows)


@contextmanager
def expert_arms(
    backend: Backend, case: Case, floats: mx.Dtype, rows: tuple[int, ...]
) -> Iterator[list[Arm]]:
    """One read group of experts, computed for chunks of several lengths."""
    bits = case.bits * 1.125 if case.bits else 8 * floats.size
    each = 3 * case.dims * case.hidden * bits / 8
    experts = max(LEAST_EXPERTS, min(MOST_EXPERTS, int(GROUP_NBYTES / 8 // each)))
    count = max(1, min(MOST_SLOTS, int(GROUP_NBYTES // (experts * each))))
    bench = make_bench(replace(case, experts=experts, tokens=1, top_k=1), floats)
    with filled_slots(backend, bench, [range(experts)] * count) as slots:
        yield [_expert_arm(backend, bench.mlp, slots, case, n) for n in rows]


def _expert_arm(
    backend: Backend, mlp: ExpertMlp, slots: Sequence[PublishedGroup], case: Case, rows: int
) -> Arm:
    """A layer for each slot: weights come from memory, not from a cache that the last run filled.

    Where there are many rows an expert, the weights no longer matter and one slot is enough.
    """
    layer = mlp.layer
    experts, slots = layer.num_experts, slots if rows <= FEW_ROWS else slots[:1]
    dtype = backend.compute_dtype or mx.bfloat16
    x = mx.random.normal((rows, case.dims), key=mx.random.key(1)).astype(dtype)
    ids = np.tile(np.arange(experts, dtype=np.uint32), (rows, 1))
    scores = mx.full((rows, experts), 1 / experts, dtype)
    mx.eval(x, scores)

    def run() -> None:
        for slot in slots:
            layer_run = backend.begin_layer(mlp, [ChunkInput(x, ids, scores)])
            layer_run.add([slot]).wait()
            mx.eval(layer_run.outputs())

    name = layer.quant[0][1].name
    rate = ComputeRate("experts", name, rows, (case.dims, case.hidden), 1.0)
    return Arm(rate, 6.0 * case.dims * case.hidden * experts * rows * len(slots), run)


# --- attention and copies


def _attention_arm(backend: Backend, head_dim: int, queries: int, context: int) -> Arm:
    heads = max(1, HEAD_VALUES // head_dim)
    kv_heads = max(1, heads // 8)
    dtype = backend.compute_dtype or mx.bfloat16

    def random(count: int, tokens: int) -> mx.array:
        return mx.random.normal((1, count, tokens, head_dim), key=mx.random.key(2)).astype(dtype)

    q, k, v = random(heads, queries), random(kv_heads, context), random(kv_heads, context)
    mx.eval(q, k, v)

    def run() -> None:
        mask = "causal" if queries > 1 else None
        scale = head_dim**-0.5
        mx.eval(mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask))

    pairs = queries * (context - queries) + queries * (queries + 1) / 2
    name = attention_format(queries, head_dim)
    rate = ComputeRate("attention", name, queries, (context,), 1.0)
    return Arm(rate, 4.0 * heads * head_dim * pairs, run)


@contextmanager
def _copy_arm(backend: Backend) -> Iterator[list[Arm]]:
    """Copies into fresh memory, as experts are kept for decoding; work in bytes."""
    source = np.ones(COPY_NBYTES, np.uint8)

    def run() -> None:
        buffer = backend.allocate(COPY_NBYTES, 1)
        buffer.array[:] = source
        backend.free(buffer)

    yield [Arm(ComputeRate("overhead", COPY, 1, (COPY_NBYTES,), 1.0), float(COPY_NBYTES), run)]
