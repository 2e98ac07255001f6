"""Loads the draft model of speculative decoding, and says when there can be none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_stream.backends.base import Backend
from mlx_stream.budget import MemoryBudget
from mlx_stream.decode.options import DecodePlan
from mlx_stream.decode.speculative import Drafter, check_trimmable
from mlx_stream.errors import CapabilityError
from mlx_stream.loader import load_draft_model


def check_can_draft(model: nn.Module, plan: DecodePlan) -> None:
    """Whether this model, on this path, can verify several tokens and forget some of them.

    Raises:
        CapabilityError: it cannot.
    """
    check_trimmable("model", make_prompt_cache(model))
    if plan.path == "whole-layer":
        raise CapabilityError(
            "the whole-layer path answers for the last token only",
            expected="--decode-path auto, exact, hot or staged",
            actual="--decode-path whole-layer",
            remedy="leave out --draft-model, or the decode path",
        )
    if plan.path == "prerouted":
        raise CapabilityError(
            "predicted routing says where one token goes, not several at once",
            expected="--prerouter off with a draft model",
            actual="a Prerouter that is on",
            remedy="leave out --draft-model, or run with --prerouter off",
        )


def open_drafter(
    path: Path,
    tokens: int,
    backend: Backend,
    budget: MemoryBudget,
    *,
    vocab: int,
    trust_remote_code: bool,
) -> tuple[Drafter, Callable[[], None]]:
    """A drafter that proposes `tokens` a round, and the undo of what the backend changed.

    Errors as :func:`load_draft_model`.
    """
    draft = load_draft_model(
        path, backend, budget, vocab=vocab, trust_remote_code=trust_remote_code
    )
    return Drafter(draft, tokens), backend.prepare_model(draft, vocab)
