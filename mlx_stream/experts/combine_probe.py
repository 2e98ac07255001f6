"""Find out, at load, which MoE blocks let the stream do the weighted sum.

Each block is run twice on two random tokens with a made-up expert output: once as a real array,
once as a DeferredExpertOutput. Only when the block asked for exactly one weighted sum and both runs
agree is the layer marked as combined. Any surprise leaves the layer on the plain path, which is
always right and only costs memory.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_stream.experts.deferred import DeferredExpertOutput
from mlx_stream.experts.streamed_experts import (
    ExecutorSlot,
    StreamedExperts,
    parent_block,
    set_executor,
)

log = logging.getLogger(__name__)

PROBE_TOKENS = 2


class _Probe:
    """An executor that answers with a made-up output and records how it was reduced."""

    def __init__(self, deferred: bool) -> None:
        self.deferred = deferred
        self.calls = 0
        self.resolved = 0
        self.weighted_sums = 0

    def __call__(self, experts: StreamedExperts, x: mx.array, indices: mx.array) -> Any:
        self.calls += 1
        shape = (*indices.shape, experts.mlp.layer.input_dims)
        y = mx.random.normal(shape, key=mx.random.key(7)).astype(x.dtype)
        if not self.deferred:
            return y

        def resolve(scores: mx.array | None) -> mx.array:
            self.resolved += 1
            if scores is None:
                return y
            self.weighted_sums += 1
            return (y * scores[..., None]).sum(axis=-2)

        return DeferredExpertOutput(shape, x.dtype, resolve)


def probe_combination(
    model: nn.Module,
    streamed: Sequence[StreamedExperts],
    slot: ExecutorSlot,
    *,
    hidden: int,
    dtype: mx.Dtype,
) -> int:
    """Mark the layers whose block can be served with weighted sums; returns how many.

    Args:
        hidden: width of the block's input; the experts' own may be smaller (latent experts).
        dtype: of the activations.

    One probe per block class and shape serves all its layers.
    """
    verdicts: dict[tuple[object, ...], bool] = {}
    for experts in streamed:
        block = parent_block(model, experts)
        if block is None:
            continue
        layer = experts.mlp.layer
        key = (type(block), type(experts.mlp.module), layer.num_experts, layer.input_dims)
        if key not in verdicts:
            verdicts[key] = _agrees(block, hidden, layer.num_experts, slot, dtype)
        experts.combined = verdicts[key]
    return sum(e.combined for e in streamed)


def _agrees(block: nn.Module, dims: int, experts: int, slot: ExecutorSlot, dtype: mx.Dtype) -> bool:
    x = mx.random.normal((1, PROBE_TOKENS, dims), key=mx.random.key(5)).astype(dtype)
    ids = mx.arange(PROBE_TOKENS * 2).reshape(1, PROBE_TOKENS, 2) % experts
    weights = mx.full((1, PROBE_TOKENS, 2), 0.5, dtype=dtype)
    # Blocks take the hidden state alone, or with the router's ids and weights.
    for args in ((x,), (x, ids, weights)):
        try:
            real, plain = _run(block, args, slot, deferred=False)
            deferred, probe = _run(block, args, slot, deferred=True)
        except Exception as error:
            log.debug("combine probe of %s: %s", type(block).__name__, error)
            continue
        # A block that also wants the plain outputs would meet the other chunks twice.
        if plain.calls == probe.calls == probe.resolved == probe.weighted_sums == 1:
            return bool(mx.allclose(real, deferred, rtol=1e-3, atol=1e-4))
    return False


def _run(
    block: nn.Module, args: tuple[mx.array, ...], slot: ExecutorSlot, *, deferred: bool
) -> tuple[mx.array, _Probe]:
    probe = _Probe(deferred)
    restore = set_executor(slot, probe)
    try:
        out = block(*args)
        mx.eval(out)
    finally:
        restore()
    return out, probe
