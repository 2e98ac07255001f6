"""Stock mlx-lm under the same KV options: what a streamed run must equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generate_step

from mlx_stream.engine import Engine
from mlx_stream.kv.options import KvOptions
from tests.prefill.running import greedy
from tests.support.checkpoints import random_tokens

GAP = (
    0.02  # of the largest log-probability: a rounding that moves a value by one quantum stays below
)


def stock_run(
    model: nn.Module,
    prompt: Sequence[int],
    count: int,
    kv: KvOptions,
    chunk: int,
    cache: list[Any] | None = None,
) -> list[np.ndarray]:
    """Log-probabilities ``[V]`` of `count` greedy steps of mlx_lm.generate_step."""
    ours = {"kv_evict", "kv_dir"} | (set() if cache is None else {"max_kv_size"})
    options = {k: v for k, v in asdict(kv).items() if k not in ours}
    steps = generate_step(
        mx.array(list(prompt)),
        model,
        max_tokens=count,
        prefill_step_size=chunk,
        prompt_cache=cache,
        **options,
    )
    return [np.array(logprobs.astype(mx.float32)) for _, logprobs in steps]


def our_run(
    engine: Engine,
    prompt: Sequence[int],
    count: int,
    kv: KvOptions,
    cache: list[Any] | None = None,
) -> tuple[list[np.ndarray], list[Any]]:
    """The same of ours, and the cache."""
    result = engine.prefill(prompt, cache, kv=kv)
    tokens = engine.decode(result, prompt, sampler=greedy)
    rows = [np.array(logprobs) for _, logprobs in (next(tokens) for _ in range(count))]
    tokens.close()
    return rows, result.cache


def clear_prompt(
    model: nn.Module, tokens: int, count: int, kv: KvOptions, chunk: int
) -> tuple[list[int], list[np.ndarray]]:
    """A prompt whose greedy answer under the options has no near ties, and stock's rows."""
    for seed in range(30):
        prompt = random_tokens(model, tokens, seed)
        rows = stock_run(model, prompt, count, kv, chunk)
        if min(_gap(row) for row in rows) > GAP:
            return prompt, rows
    raise AssertionError("no clear prompt in 30 seeds")


def _gap(row: np.ndarray) -> float:
    second, first = np.partition(row, -2)[-2:]
    return float((first - second) / np.abs(row).max())


def tokens_of(rows: Sequence[np.ndarray]) -> list[int]:
    """The greedy tokens."""
    return [int(row.argmax()) for row in rows]
