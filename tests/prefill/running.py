"""Running streamed and stock models side by side, and prompts on which they must agree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

from mlx_stream.engine import Engine, PrefillResult
from mlx_stream.errors import BudgetError
from tests.support.checkpoints import random_tokens, stock_prefill

CLEAR = 1e-3  # a top-2 gap that rounding cannot close, relative to the largest logit
NOISE = 2e-5  # far above rounding, far below what changes a routing that is not a near tie


QUANTIZATIONS = pytest.mark.parametrize(
    "options",
    [
        {"mode": "mxfp4"},
        {"mode": "mxfp8"},
        {"mode": "nvfp4"},
        {"mode": "none"},
        {"bits": 8, "group_size": 32},
        {"overrides": ((r"down_proj", {"bits": 8}), (r"layers\.2\..*switch_mlp", False))},
    ],
    ids=["mxfp4", "mxfp8", "nvfp4", "float32", "affine-8-g32", "mixed"],
)
"""Every quantization mode, and layers that differ."""


def greedy(logprobs: mx.array) -> mx.array:
    """The sampler of mlx-lm at temperature 0."""
    return mx.argmax(logprobs, axis=-1)


def relative(got: Any, expected: Any) -> float:
    """Largest difference over the largest magnitude."""
    got, expected = np.array(got), np.array(expected)
    assert got.shape == expected.shape
    return float(np.abs(got - expected).max() / np.abs(expected).max())


def decode(engine: Engine, result: PrefillResult, prompt: Sequence[int], count: int) -> list[int]:
    """The next `count` greedy tokens of a streamed prefill."""
    tokens = engine.decode(result, prompt, sampler=greedy)
    return [token for token, _ in (next(tokens) for _ in range(count))]


def generate(engine: Engine, prompt: Sequence[int], count: int) -> list[int]:
    """Prefill and `count` greedy tokens."""
    return decode(engine, engine.prefill(prompt), prompt, count)


def stock_decode(model: nn.Module, logits: Any, cache: list[Any], count: int) -> list[np.ndarray]:
    """Logits ``[V]`` of `count` greedy steps by stock mlx-lm; the first are those of the prompt."""
    rows = [np.array(logits)]
    while len(rows) < count:
        step = mx.array([[int(rows[-1].argmax())]])
        rows.append(np.array(model(step, cache=cache)[0, -1].astype(mx.float32)))
    return rows


def smallest_budget(engine: Engine, tokens: int) -> int:
    """The least budget, to 4 KiB, under which a prompt still has a plan; spends the engine."""
    low, high = 1, 8 << 20
    while high - low > 4096:
        engine.budget.total = (low + high) // 2
        try:
            engine.plan(tokens)
            high = engine.budget.total
        except BudgetError:
            low = engine.budget.total
    return high


@contextmanager
def recorded_routing() -> Iterator[list[tuple[nn.Module, np.ndarray]]]:
    """What stock switch layers are asked for: ``(module, ids [T, K])`` of every call."""
    calls: list[tuple[nn.Module, np.ndarray]] = []
    with pytest.MonkeyPatch.context() as patch:
        for cls in (SwitchGLU, SwitchMLP):

            def record(self: nn.Module, x: mx.array, indices: mx.array, _call=cls.__call__) -> Any:
                calls.append((self, np.array(indices).reshape(-1, indices.shape[-1])))
                return _call(self, x, indices)

            patch.setattr(cls, "__call__", record)
        yield calls


def routed_experts(model: nn.Module, tokens: Sequence[int]) -> list[set[int]]:
    """Ids of the experts that stock mlx-lm uses for a prompt, layer by layer."""
    with recorded_routing() as calls:
        stock_prefill(model, tokens, 16)
    switches = [m for _, m in model.named_modules() if isinstance(m, SwitchGLU | SwitchMLP)]
    used: dict[int, set[int]] = {id(m): set() for m in switches}
    for module, ids in calls:
        used[id(module)].update(ids.reshape(-1).tolist())
    order = list(dict.fromkeys(id(module) for module, _ in calls))
    return [used[key] for key in order]


@contextmanager
def _noisy_embeddings() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for cls in (nn.Embedding, nn.QuantizedEmbedding):

            def noisy(self: nn.Module, ids: mx.array, _call=cls.__call__) -> mx.array:
                y = _call(self, ids)
                return y * (1 + NOISE * mx.random.normal(y.shape, key=mx.random.key(3)))

            patch.setattr(cls, "__call__", noisy)
        yield


def settled_prompt(
    model: nn.Module, tokens: int, steps: int, chunk: int = 16
) -> tuple[list[int], list[np.ndarray]]:
    """A prompt without near ties, and stock mlx-lm's logits ``[V]`` of `steps` greedy tokens.

    No greedy step is decided by less than CLEAR, and small noise changes no routing: a correct
    implementation that rounds otherwise still gets the same tokens.
    """
    for seed in range(20):
        prompt = random_tokens(model, tokens, seed)
        with recorded_routing() as plain:
            logits, cache = stock_prefill(model, prompt, chunk)
        rows = stock_decode(model, logits, cache, steps)
        if min(_gap(row) for row in rows) < CLEAR:
            continue
        with recorded_routing() as noisy, _noisy_embeddings():
            stock_prefill(model, prompt, chunk)
        if all((_sets(a) == _sets(b)).all() for (_, a), (_, b) in zip(plain, noisy, strict=True)):
            return prompt, rows
    raise AssertionError("no prompt without near ties in 20 seeds")


def _gap(row: np.ndarray) -> float:
    second, first = np.partition(row, -2)[-2:]
    return float((first - second) / np.abs(row).max())


def _sets(ids: np.ndarray) -> np.ndarray:
    return np.sort(ids, axis=-1)
