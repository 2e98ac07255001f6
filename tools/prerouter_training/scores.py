"""Held-out numbers: perplexity of a student, and how well predictions meet the real routers."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch.nn import functional as fn

from tools.prerouter_training.heads import Heads, head_features, shifted
from tools.prerouter_training.model import Student, forward
from tools.prerouter_training.weights import Base
from tools.train_demo_model import WINDOW

ROWS = 4  # windows that run at once


def perplexity(
    student: Student, tokens: torch.Tensor, *, predict_from: int = 1, first: int = 1
) -> float:
    """exp of the mean loss over non-overlapping windows.

    Args:
        predict_from: tokens of a window from this one on are routed by the heads, if any.
        first: tokens of a window from this one on are scored; at least 1.
    """
    total, scored = 0.0, 0
    for ids in _windows(tokens):
        h = forward(student, ids[:, :-1], predict_from=predict_from)
        for rows, labels in zip(h[:, first - 1 :], ids[:, first:], strict=True):
            logits = (rows.to(student.base.dtype) @ student.base.embedding.T).float()
            total += float(fn.cross_entropy(logits, labels, reduction="sum"))
        scored += ids[:, first:].numel()
    return math.exp(total / scored)


def recall(
    base: Base, top_k: int, tokens: torch.Tensor, guesses: dict[str, Heads]
) -> dict[str, dict[int, float]]:
    """Share of the real router's experts that a guess names, by consumer layer.

    Features and targets are those of the base as it routes itself. ``copy`` guesses the experts
    of the token before.
    """
    owners = next(iter(guesses.values())).owners
    hits = {name: dict.fromkeys((n + 1 for n in owners), 0.0) for name in ("copy", *guesses)}
    count = 0
    for ids in _windows(tokens):
        seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def note(
            layer: int,
            x: torch.Tensor,
            logits: torch.Tensor,
            own: torch.Tensor,
            seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = seen,
        ) -> None:
            seen[layer] = (x, own)

        forward(Student(base, top_k), ids[:, :-1], probe=note)
        count += ids[:, 2:].numel() * top_k
        for owner in owners:
            real = seen[owner + 1][1][:, 1:]
            features = head_features(*seen[owner], base.shape.num_experts)
            hits["copy"][owner + 1] += _common(shifted(seen[owner + 1][1])[:, 1:], real)
            for name, heads in guesses.items():
                guess = shifted(heads.logits(owner, features).topk(top_k, dim=-1).indices)
                hits[name][owner + 1] += _common(guess[:, 1:], real)
    return {name: {n: round(h / count, 4) for n, h in by.items()} for name, by in hits.items()}


def _common(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a[..., :, None] == b[..., None, :]).sum())


def _windows(tokens: torch.Tensor) -> Iterator[torch.Tensor]:
    """``[B, <= WINDOW]``: whole windows, several at once, and then the rest alone."""
    whole = len(tokens) // WINDOW * WINDOW
    if whole:
        yield from tokens[:whole].view(-1, WINDOW).split(ROWS)
    if len(tokens) - whole >= 2:
        yield tokens[None, whole:]
