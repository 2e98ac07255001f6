"""One intact tiny checkpoint in several shards, its stock answers, and copies to damage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.checkpoints import cached_checkpoint, random_tokens, stock_greedy, stock_model
from tests.support.faults import copy_checkpoint

SHARD_BYTES = 150_000  # a handful of shards
PROMPT_TOKENS, ANSWER_TOKENS = 40, 6


@pytest.fixture(scope="session")
def intact(tmp_path_factory) -> Path:
    """A 4-layer Qwen3-MoE of 8 experts; read-only by rule."""
    return cached_checkpoint(tmp_path_factory, "qwen3_moe", shard_bytes=SHARD_BYTES)


@pytest.fixture
def copy(intact, tmp_path) -> Callable[..., Path]:
    """A function that makes a copy to damage; `index=False` leaves index.json out."""

    def make(*, index: bool = True) -> Path:
        return copy_checkpoint(intact, tmp_path / "checkpoint", index=index)

    return make


@pytest.fixture(scope="session")
def prompt(intact) -> list[int]:
    """Long enough that every expert is read."""
    return random_tokens(stock_model(intact), PROMPT_TOKENS, seed=3)


@pytest.fixture(scope="session")
def answer(intact, prompt) -> list[int]:
    """What stock mlx-lm says to the prompt."""
    return stock_greedy(stock_model(intact), prompt, ANSWER_TOKENS)
