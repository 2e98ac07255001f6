"""What a prefill leaves behind, and its receipt, from what its parts counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_stream.backends.base import Backend
from mlx_stream.prefill.layer_major import PrefillCounts
from mlx_stream.prefill.schedule import PrefillPlan
from mlx_stream.storage.reader import ReadCounters
from mlx_stream.telemetry import Receipt


@dataclass(frozen=True)
class PrefillResult:
    """What a prefill leaves behind.

    Attributes:
        logits: ``[V]`` of the last position.
        cache: an mlx-lm prompt cache; mlx-lm itself can go on from it.
        receipt: bytes and seconds, as counted.
    """

    logits: mx.array
    cache: list[Any]
    receipt: Receipt


def make_receipt(
    plan: PrefillPlan,
    counts: PrefillCounts,
    backend: Backend,
    reads: tuple[ReadCounters, ReadCounters],
    *,
    wall_seconds: float,
    peak_bytes: int,
    budget_bytes: int,
    io_mode: str,
    cached_experts: int,
    weighted_layers: int,
    resumed_layers: int = 0,
    notes: tuple[str, ...] = (),
) -> Receipt:
    """Bytes and calls are the reader's, before and after; the plan only says what was asked."""
    before, after = reads
    return Receipt(
        prompt_tokens=plan.prompt_tokens,
        segments=len(plan.segments),
        chunk_tokens=plan.chunk_tokens,
        mode=plan.mode,
        bytes_read=after.bytes - before.bytes,
        distinct_expert_bytes=counts.distinct_expert_bytes,
        read_calls=after.calls - before.calls,
        read_seconds=after.busy_seconds - before.busy_seconds,
        compute_seconds=wall_seconds - counts.stall_seconds,
        stall_seconds=counts.stall_seconds,
        wall_seconds=wall_seconds,
        peak_bytes=peak_bytes,
        budget_bytes=budget_bytes,
        io_mode=io_mode,
        backend=backend.name,
        cached_experts=cached_experts,
        weighted_layers=weighted_layers,
        kernels=kernel_counts(backend),
        kv_peak_bytes=counts.kv_peak_bytes,
        resumed_layers=resumed_layers,
        notes=plan.notes + notes,
    )


def kernel_counts(backend: Backend) -> dict[str, int]:
    """``"path: reason"`` -> expert layers computed that way."""
    return dict(Counter(f"{c.path}: {c.reason}" for c in backend.choices.values()))
