"""Measures a decoder layer without its routed experts: linear layers, and all that is elementwise.

A random mlx-lm block is prepared as a loaded model is and called as a chunk of a prompt would call
it. With its matrices' outputs given and attention skipped, what is left is the elementwise cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache
from mlx_lm.models.qwen3_moe import ModelArgs, Qwen3MoeDecoderLayer

from mlx_stream.backends.base import Backend
from mlx_stream.backends.cpu.override import override
from mlx_stream.experts.deferred import DeferredExpertOutput
from mlx_stream.experts.streamed_experts import ExecutorSlot, StreamedExperts
from mlx_stream.planner.machine_profile import ELEMENTWISE, ComputeRate
from mlx_stream.planner.model_costs import elementwise_values
from mlx_stream.probe_arms import FLOATS, PACKED, Arm, BlockShape, Packing


@contextmanager
def block_arms(
    backend: Backend, shape: BlockShape, chunk_rows: Sequence[int]
) -> Iterator[list[Arm]]:
    """Linear layers of a block, packed and as floats, and what else the block takes.

    The arms must run inside the backend's compute_scope.
    """
    arms: list[Arm] = []
    with ExitStack() as held:
        for packing in (FLOATS, PACKED):
            block = _make_block(backend, shape, packing)
            held.callback(backend.prepare_model(block, 0))
            for rows in chunk_rows:
                arms += _linear_arms(backend, block, rows)
        block = _make_block(backend, shape, FLOATS)
        yield arms + [_elementwise_arm(backend, block, shape, rows) for rows in chunk_rows]


def _make_block(backend: Backend, shape: BlockShape, packing: Packing) -> Qwen3MoeDecoderLayer:
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
    mode, bits, group = packing
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


def _linear_arms(backend: Backend, block: Qwen3MoeDecoderLayer, rows: int) -> list[Arm]:
    """The query projection, and the smaller key projection."""
    found = []
    for linear in (block.self_attn.q_proj, block.self_attn.k_proj):
        packed = hasattr(linear, "bits")
        outputs, words = linear.weight.shape
        inputs = words * 32 // linear.bits if packed else words
        name = f"affine {linear.bits}-bit g{linear.group_size}" if packed else None
        rate = ComputeRate(
            "linear",
            name or f"{8 * linear.weight.itemsize}-bit floats",
            rows,
            (inputs, outputs),
            1.0,
        )
        x = _input(backend, rows, inputs)
        work = 2.0 * rows * inputs * outputs
        found.append(Arm(rate, work, lambda f=linear, x=x: mx.eval(f(x))))
    return found


class _Given(nn.Module):
    """Stands for a linear layer whose output is known."""

    def __init__(self, y: mx.array) -> None:
        super().__init__()
        self._y = y

    def __call__(self, x: mx.array) -> mx.array:
        mx.eval(x)
        return self._y


@contextmanager
def _no_attention() -> Iterator[None]:
    """Attention that costs nothing: queries for outputs."""

    def skip(original: Any) -> Any:
        def attention(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
            mx.eval(q, k, v)
            return q

        return attention

    with override(mx.fast, "scaled_dot_product_attention", skip):
        yield


def _elementwise_arm(
    backend: Backend, block: Qwen3MoeDecoderLayer, shape: BlockShape, rows: int
) -> Arm:
    """The block on a chunk of `rows` tokens, with its matrices' outputs given."""
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    given = {
        n: _Given(_input(backend, rows, n)) for n in (wide, narrow, shape.hidden, shape.experts)
    }
    x = _input(backend, rows, shape.hidden)

    def run() -> None:
        attention = block.self_attn
        attention.q_proj, attention.o_proj = given[wide], given[shape.hidden]
        attention.k_proj = attention.v_proj = given[narrow]
        block.mlp.gate = given[shape.experts]
        cache = KVCache()
        with _no_attention():
            mx.eval(block(x, "causal" if rows > 1 else None, cache), cache.state)

    values = elementwise_values(
        shape.hidden, shape.heads, shape.kv_heads, shape.head_dim, shape.experts
    )
    return Arm(
        ComputeRate("overhead", ELEMENTWISE, rows, (values,), 1.0), float(rows * values), run
    )
