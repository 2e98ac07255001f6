"""Prompt cache files of an open engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from mlx_stream.adapting import AUTO, Adapter
from mlx_stream.engine import Engine
from mlx_stream.errors import PromptFileError
from mlx_stream.kv.prompt_files import (
    ModelIdentity,
    PromptFile,
    load_prompt_file,
    save_prompt_file,
)
from mlx_stream.prefill.cache_views import cache_offset
from mlx_stream.run_hooks import identify


def model_identity(engine: Engine, adapter: str | None = None) -> ModelIdentity:
    """What a prompt cache of this engine's model, with one of its adapters, is marked with."""
    fingerprint = engine.adapters.fingerprint(adapter)
    return identify(engine.model, engine.index, engine._shape.top_k, fingerprint)


def save(
    engine: Engine,
    path: Path | str,
    cache: list[Any],
    tokens: Sequence[int],
    messages: list[dict[str, str]] | None = None,
) -> Path:
    """Write a prompt cache with the tokens it holds; returns the file's path.

    Raises:
        PromptFileError: tokens and cache disagree, or it cannot be written.
    """
    held = cache_offset(cache)
    if held and held != len(tokens):
        raise PromptFileError(
            "the prompt cache does not hold these tokens",
            file=path,
            expected=f"{held} tokens, as the cache says",
            actual=f"{len(tokens)} tokens",
            remedy="pass every token that was prefilled or generated, in order",
        )
    return save_prompt_file(
        path,
        cache,
        model_identity(engine, engine.adapters.of(cache)),
        tokens=[int(t) for t in tokens],
        messages=messages,
        model=str(engine.path),
    )


def load(engine: Engine, path: Path | str, adapter: Adapter = AUTO) -> PromptFile:
    """Read a prompt cache, checked against the engine's model and an adapter.

    Raises:
        PromptFileError: damaged, larger than the memory budget, or of another model or adapter.
    """
    name = engine.adapters.choose(adapter)
    file = load_prompt_file(
        path,
        model_identity(engine, name),
        fresh=make_prompt_cache(engine.model),
        probed=engine.kv.probed(),
        max_nbytes=engine.budget.total,
    )
    engine.adapters.mark(file.cache, name)
    return file
