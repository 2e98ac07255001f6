"""Tiny checkpoints on disk, and stock mlx-lm run on them: the reference of every parity test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from tests.support.families import FAMILIES
from tools.make_checkpoint import Quant, make_checkpoint

Overrides = tuple[tuple[str, dict[str, Any] | bool], ...]

_cache: dict[tuple[Any, ...], Path] = {}


def build_family(
    name: str,
    out: Path,
    *,
    mode: str = "affine",
    bits: int | None = None,
    group_size: int | None = None,
    dtype: str = "float32",
    overrides: Overrides = (),
    seed: int = 0,
    shard_bytes: int = 5 << 30,
    changes: dict[str, Any] | None = None,
) -> Path:
    """Write family `name` at `out`; `changes` replaces top-level keys of its config.

    `bits` and `group_size` default to the mode's own (affine: 4 and 64).
    """
    config = FAMILIES[name].config | (changes or {})
    quant = Quant(mode, bits, group_size, overrides)
    make_checkpoint(out, config, quant=quant, dtype=dtype, seed=seed, shard_bytes=shard_bytes)
    return out


def cached_checkpoint(tmp_path_factory: pytest.TempPathFactory, name: str, **options: Any) -> Path:
    """`build_family` once a test session for the same options; the folder is read-only by rule."""
    key = (tmp_path_factory.getbasetemp(), name, repr(sorted(options.items())))
    if key not in _cache:
        out = tmp_path_factory.mktemp(name) / "checkpoint"
        _cache[key] = build_family(name, out, **options)
    return _cache[key]


def stock_model(path: Path) -> nn.Module:
    """The checkpoint as mlx-lm loads it, all in memory; 16-bit floats are cast to float32."""
    model, _ = load_model(path, strict=True)
    dtypes = {value.dtype for _, value in tree_flatten(model.parameters())}
    if dtypes & {mx.bfloat16, mx.float16}:
        model.set_dtype(mx.float32)
        mx.eval(model.parameters())
    return model


def random_tokens(model: nn.Module | int, count: int, seed: int = 0) -> list[int]:
    """Token ids for a prompt; `model` may also be the vocabulary size."""
    vocab = model if isinstance(model, int) else vocab_size(model)
    return np.random.default_rng(seed).integers(0, vocab, count).tolist()


def vocab_size(model: nn.Module) -> int:
    """Width of the logits, from whichever place the family keeps it in."""
    args = model.args
    for owner in (args, getattr(args, "text_config", None)):
        for name in ("vocab_size", "num_vocab"):
            value = owner.get(name) if isinstance(owner, dict) else getattr(owner, name, None)
            if value is not None:
                return value
    raise ValueError(f"{model.model_type}: no vocabulary size in its arguments")


def stock_prefill(
    model: nn.Module, tokens: Sequence[int], chunk: int
) -> tuple[np.ndarray, list[Any]]:
    """Logits [V] of the last token and the prompt cache, by the calls of `mlx_lm.generate_step`.

    All tokens but the last go in chunks, evaluated one by one; the last goes alone.
    """
    cache = make_prompt_cache(model)
    prompt = mx.array(list(tokens))
    for start in range(0, len(tokens) - 1, chunk):
        model(prompt[start : min(start + chunk, len(tokens) - 1)][None], cache=cache)
        mx.eval([c.state for c in cache])
    logits = model(prompt[-1:][None], cache=cache)[0, -1]
    mx.eval(logits, [c.state for c in cache])
    return np.array(logits.astype(mx.float32)), cache


def stock_greedy(
    model: nn.Module, tokens: Sequence[int], count: int, chunk: int = 2048
) -> list[int]:
    """The next `count` tokens by arg-max; no end-of-sequence stop."""
    logits, cache = stock_prefill(model, tokens, chunk)
    out = [int(logits.argmax())]
    while len(out) < count:
        step = model(mx.array([[out[-1]]]), cache=cache)[0, -1]
        out.append(int(mx.argmax(step).item()))
    return out
