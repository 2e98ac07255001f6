"""A checkpoint's own number of experts a token, put into every MoE block of a loaded model.

mlx-lm's blocks keep it as a plain number, under one of a few names, in the block, its router or
their arguments. Every one that holds the old number is changed, and every block is then asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_stream.errors import CapabilityError
from mlx_stream.experts.streamed_experts import (
    ExecutorSlot,
    StreamedExperts,
    parent_block,
    set_executor,
)

NAMES = (
    "top_k",
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_top_k",
    "num_selected_experts",
)


class _Asked(Exception):
    """Not an error: it carries the number of experts out of a block."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count


def override_top_k(
    model: nn.Module,
    streamed: Sequence[StreamedExperts],
    slot: ExecutorSlot,
    *,
    hidden: int,
    dtype: mx.Dtype,
    top_k: int,
) -> None:
    """Every expert layer uses `top_k` experts a token from now on.

    Raises:
        CapabilityError: a layer's number cannot be changed like this, or it has fewer experts.
    """
    for experts in streamed:
        block = parent_block(model, experts)
        if block is None or top_k > experts.mlp.layer.num_experts:
            raise _cannot(experts, top_k, f"{experts.mlp.layer.num_experts} experts")
        before = _count(block, slot, hidden, dtype)
        if before == top_k:
            continue
        for owner in _owners(block):
            for name in NAMES:
                if getattr(owner, name, None) == before:
                    setattr(owner, name, top_k)
        after = _count(block, slot, hidden, dtype)
        if after != top_k:
            raise _cannot(experts, top_k, after)


def _owners(block: nn.Module) -> Iterator[Any]:
    modules = [block, *(c for c in block.children().values() if isinstance(c, nn.Module))]
    for module in modules:
        if not isinstance(module, StreamedExperts):
            yield module
            yield from filter(None, (getattr(module, n, None) for n in ("args", "config")))


def _count(block: nn.Module, slot: ExecutorSlot, hidden: int, dtype: mx.Dtype) -> int | None:
    def leave(experts: StreamedExperts, x: mx.array, indices: mx.array) -> Any:
        raise _Asked(indices.shape[-1])

    restore = set_executor(slot, leave)
    try:
        block(mx.zeros((1, 1, hidden), dtype=dtype))
    except _Asked as asked:
        return asked.count
    except (TypeError, ValueError):  # a block that takes more than the hidden state
        return None
    finally:
        restore()
    return None


def _cannot(experts: StreamedExperts, top_k: int, actual: object) -> CapabilityError:
    return CapabilityError(
        "the number of experts a token cannot be set in this model",
        tensor=experts.mlp.layer.name,
        expected=f"{top_k} experts a token, as the Prerouter's spec says",
        actual=actual,
        remedy="run with --prerouter off",
    )
