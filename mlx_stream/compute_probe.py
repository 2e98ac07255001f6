"""Measures how fast a backend computes, through the product's own paths.

A small random mixture-of-experts block is made in memory and prepared as a loaded model is. So the
rates are those of the engine (dequantizing, gathering rows, weighting outputs), not of bare matrix
products. What the block takes beyond its linear layers and attention is the elementwise cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache
from mlx_lm.models.qwen3_moe import ModelArgs, Qwen3MoeDecoderLayer

from mlx_stream.backends.base import Backend, ChunkInput, ExpertMlp
from mlx_stream.backends.selftest import Case, filled_slots, make_bench
from mlx_stream.experts.deferred import DeferredExpertOutput
from mlx_stream.experts.streamed_experts import ExecutorSlot, StreamedExperts
from mlx_stream.planner.machine_profile import (
    COPY,
    ELEMENTWISE,
    ComputeRate,
    MachineProfile,
    attention_format,
)
from mlx_stream.planner.model_costs import elementwise_values

PACKED, FLOATS = ("affine", 4, 64), ("none", 0, 0)
MICRO = ("mxfp4", 4, 32)
HEAD_VALUES = 4096  # of the attention arms: heads times head size, all sizes alike
GROUP_NBYTES = 48 << 20  # as a read group of the plan
MAX_RUNS = 7
LEAST = 0.02  # of a block's time is elementwise, whatever the differences say
COPY_NBYTES = 64 << 20

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class BlockShape:
    """A decoder layer: hidden size, attention heads, key heads, head size, experts."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int = 128
    expert_hidden: int = 768


@dataclass(frozen=True)
class ProbeShapes:
    """What is measured. The default takes about ten seconds on two cores, with its set-up.

    Attributes:
        expert_formats: ``(mode, bits, group size, bytes of a float, rows per expert)``.
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
    chunk_rows: tuple[int, ...] = (1, 16, 128, 512, 2048)
    attention: tuple[tuple[int, int, int], ...] = (
        (128, 1, 2048),
        (128, 128, 128),
        (128, 512, 512),
        (128, 512, 2048),
        (128, 512, 6144),
        (64, 1, 2048),
        (64, 128, 128),
        (64, 512, 512),
        (64, 512, 4096),
    )


DEFAULT = ProbeShapes()


@dataclass(frozen=True)
class _Arm:
    """Something to time. `work` in the unit of the rate."""

    rate: ComputeRate
    work: float
    run: Callable[[], object]


def probe_compute(
    backend: Backend,
    *,
    seconds: float = 10.0,
    shapes: ProbeShapes = DEFAULT,
    progress: Progress | None = None,
) -> list[ComputeRate]:
    """Rates of the backend, in about `seconds` (not less than three runs of every shape).

    Args:
        progress: told how many parts are done, and of how many.
    """
    parts = [*_expert_parts(backend, shapes), _attention_arms(backend, shapes), _copy_arm(backend)]
    arms = _count(shapes)
    rates: list[ComputeRate] = []
    done, total = 0, len(parts) + len(shapes.blocks)
    for part in parts:
        with part as found:
            rates += [_measure(arm, seconds / arms) for arm in found]
        done += 1
        if progress is not None:
            progress(done, total)
    for shape in shapes.blocks:
        rates += _block_rates(backend, shape, shapes.chunk_rows, seconds / arms, rates)
        done += 1
        if progress is not None:
            progress(done, total)
    return rates


def _count(shapes: ProbeShapes) -> int:
    """Arms, for their share of the time."""
    experts = len(shapes.blocks) * len(shapes.expert_formats) * len(shapes.rows)
    return experts + len(shapes.attention) + len(shapes.blocks) * 6 * len(shapes.chunk_rows) + 1


def _measure(arm: _Arm, seconds: float) -> ComputeRate:
    """The median of at least three runs after a first one."""
    arm.run()
    times: list[float] = []
    while len(times) < 3 or (sum(times) < seconds and len(times) < MAX_RUNS):
        started = time.perf_counter()
        arm.run()
        times.append(time.perf_counter() - started)
    typical = median(times)
    spread = (max(times) - min(times)) / 2 / typical
    return replace(arm.rate, flops_per_second=arm.work / typical, spread=spread)


# --- experts


def _expert_parts(backend: Backend, shapes: ProbeShapes) -> Iterator[Any]:
    for number, block in enumerate(shapes.blocks):
        for place, (mode, bits, group, floats) in enumerate(shapes.expert_formats):
            rows = shapes.rows
            if number == place == 0 and shapes.most_rows > max(rows):
                rows = (*rows, shapes.most_rows)
            case = Case(mode, bits, group, dims=block.hidden, hidden=block.expert_hidden)
            yield _expert_arms(backend, case, floats, rows)


@contextmanager
def _expert_arms(
    backend: Backend, case: Case, floats: mx.Dtype, rows: tuple[int, ...]
) -> Iterator[list[_Arm]]:
    """One read group of experts, computed for chunks of several lengths."""
    bits = case.bits * 1.125 if case.bits else 8 * floats.size
    each = 3 * case.dims * case.hidden * bits / 8
    experts = max(2, min(8, int(GROUP_NBYTES // each)))
    bench = make_bench(replace(case, experts=experts, tokens=1, top_k=1), floats)
    with filled_slots(backend, bench, [range(experts)]) as groups:
        yield [_expert_arm(backend, bench.mlp, groups, case, count) for count in rows]


def _expert_arm(backend: Backend, mlp: ExpertMlp, groups: Any, case: Case, rows: int) -> _Arm:
    layer = mlp.layer
    experts = layer.num_experts
    dtype = backend.compute_dtype or mx.bfloat16
    x = mx.random.normal((rows, case.dims), key=mx.random.key(1)).astype(dtype)
    ids = np.tile(np.arange(experts, dtype=np.uint32), (rows, 1))
    scores = mx.full((rows, experts), 1 / experts, dtype)
    mx.eval(x, scores)

    def run() -> None:
        layer_run = backend.begin_layer(mlp, [ChunkInput(x, ids, scores)])
        layer_run.add(groups).wait()
        mx.eval(layer_run.outputs())

    name = layer.quant[0][1].name
    rate = ComputeRate("experts", name, rows, (case.dims, case.hidden), 1.0)
    return _Arm(rate, 6.0 * case.dims * case.hidden * experts * rows, run)


# --- attention and copies


@contextmanager
def _attention_arms(backend: Backend, shapes: ProbeShapes) -> Iterator[list[_Arm]]:
    with backend.compute_scope():
        yield [_attention_arm(backend, *shape) for shape in shapes.attention]


def _attention_arm(backend: Backend, head_dim: int, queries: int, context: int) -> _Arm:
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
    return _Arm(rate, 4.0 * heads * head_dim * pairs, run)


@contextmanager
def _copy_arm(backend: Backend) -> Iterator[list[_Arm]]:
    """Copies into fresh memory, as experts are kept for decoding; work in bytes."""
    source = np.ones(COPY_NBYTES, np.uint8)

    def run() -> None:
        buffer = backend.allocate(COPY_NBYTES, 1)
        buffer.array[:] = source
        backend.free(buffer)

    yield [_Arm(ComputeRate("overhead", COPY, 1, (COPY_NBYTES,), 1.0), float(COPY_NBYTES), run)]


# --- a block


def _block_rates(
    backend: Backend,
    shape: BlockShape,
    chunk_rows: tuple[int, ...],
    seconds: float,
    known: list[ComputeRate],
) -> list[ComputeRate]:
    """Linear layers of a block, packed and as floats, and what else the block takes."""
    rates = []
    for mode, bits, group in (FLOATS, PACKED):
        block = _make_block(backend, shape, mode, bits, group)
        undo = backend.prepare_model(block, 0)
        try:
            with backend.compute_scope():
                for rows in chunk_rows:
                    rates += _linear_rates(backend, block, rows, seconds)
                if mode != "none":
                    spent = [_measure(_block_arm(backend, block, shape, n), seconds) for n in chunk_rows]
        finally:
            undo()
    profile = MachineProfile(1, "", backend.name, "", "", (), (*known, *rates))
    return [*rates, *(_elementwise(profile, shape, rate) for rate in spent)]


def _make_block(
    backend: Backend, shape: BlockShape, mode: str, bits: int, group: int
) -> Qwen3MoeDecoderLayer:
    args = ModelArgs(
        model_type="qwen3_moe",
        hidden_size=shape.hidden,
        num_hidden_layers=1,
        intermediate_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_experts=shape.experts,
        num_experts_per_tok=min(8, shape.experts),
        decoder_sparse_step=1,
        mlp_only_layers=[],
        moe_intermediate_size=1,
        rms_norm_eps=1e-6,
        vocab_size=1,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rope_theta=1e6,
        tie_word_embeddings=False,
        max_position_embeddings=1 << 16,
        norm_topk_prob=True,
    )
    block = Qwen3MoeDecoderLayer(args, 0)
    slot = ExecutorSlot()
    slot.executor = _no_experts
    block.mlp.switch_mlp = StreamedExperts(None, slot)  # type: ignore[arg-type]
    block.set_dtype(backend.compute_dtype or mx.bfloat16)
    if mode != "none":
        nn.quantize(block, group, bits, mode=mode)
    mx.eval(block.parameters())
    return block


def _no_experts(experts: StreamedExperts, x: mx.array, indices: mx.array) -> DeferredExpertOutput:
    """Evaluates what a rendezvous would, and gives zeros."""

    def resolve(scores: mx.array | None) -> mx.array:
        mx.eval(x, indices, scores)
        return mx.zeros_like(x)

    return DeferredExpertOutput((*indices.shape, x.shape[-1]), x.dtype, resolve)


def _input(backend: Backend, rows: int, dims: int) -> mx.array:
    x = mx.random.normal((1, rows, dims), key=mx.random.key(3))
    x = x.astype(backend.compute_dtype or mx.bfloat16)
    mx.eval(x)
    return x


def _linear_rates(
    backend: Backend, block: Qwen3MoeDecoderLayer, rows: int, seconds: float
) -> list[ComputeRate]:
    """The query projection, and the smaller key projection."""
    found = []
    for linear in (block.self_attn.q_proj, block.self_attn.k_proj):
        packed = hasattr(linear, "bits")
        outputs, words = linear.weight.shape
        inputs = words * 32 // linear.bits if packed else words
        name = f"affine {linear.bits}-bit g{linear.group_size}" if packed else None
        rate = ComputeRate(
            "linear", name or f"{8 * linear.weight.itemsize}-bit floats", rows, (inputs, outputs), 1.0
        )
        x = _input(backend, rows, inputs)
        arm = _Arm(rate, 2.0 * rows * inputs * outputs, lambda f=linear, x=x: mx.eval(f(x)))
        found.append(_measure(arm, seconds))
    return found


def _block_arm(
    backend: Backend, block: Qwen3MoeDecoderLayer, shape: BlockShape, rows: int
) -> _Arm:
    """The whole block on a prompt of `rows` tokens; work 1, so that the rate is 1 / seconds."""
    x = _input(backend, rows, shape.hidden)

    def run() -> None:
        cache = KVCache()
        y = block(x, "causal" if rows > 1 else None, cache)
        mx.eval(y, cache.state)

    rate = ComputeRate("overhead", ELEMENTWISE, rows, (elementwise_values(
        shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.experts
    ),), 1.0)
    return _Arm(rate, 1.0, run)


def _elementwise(profile: MachineProfile, shape: BlockShape, block: ComputeRate) -> ComputeRate:
    """Values per second of what is left of the block's time."""
    rows, total = block.rows, 1 / block.flops_per_second
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    linears = [
        (shape.hidden, wide), (shape.hidden, narrow), (shape.hidden, narrow),
        (wide, shape.hidden), (shape.hidden, shape.experts),
    ]
    name = f"affine {PACKED[1]}-bit g{PACKED[2]}"
    known = sum(2.0 * rows * a * b / profile.flops("linear", rows, name, (a, b)) for a, b in linears)
    pairs = rows * (rows + 1) / 2
    speed = profile.flops("attention", rows, attention_format(rows, shape.head_dim), (rows,))
    known += 4.0 * wide * pairs / speed
    left = max(total - known, LEAST * total)
    return replace(block, flops_per_second=rows * block.size / left)
