"""Options of decode crossed with each other, prompts without near ties, and caches of any size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations, product
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_stream.engine import Engine
from tests.prefill.running import (
    CLEAR,
    NOISE,
    decode,
    recorded_routing,
)
from tests.support.checkpoints import random_tokens, stock_prefill

__all__ = ["answer", "check_slots", "covering", "hold", "records", "settled_answer", "token_set"]

Row = dict[str, Any]

_answers: dict[tuple[Any, ...], tuple[list[int], list[int]]] = {}


def covering(columns: Mapping[str, Sequence[Any]], strength: int) -> list[Row]:
    """Rows in which every combination of values of any `strength` columns occurs; greedy."""
    names = list(columns)
    missing = {
        tuple(zip(some, values, strict=True))
        for some in combinations(names, strength)
        for values in product(*(columns[name] for name in some))
    }
    rows = []
    while missing:
        row: Row = dict(min(missing, key=repr))
        for name in names:
            if name not in row:
                row[name] = max(
                    columns[name],
                    key=lambda value, name=name: (
                        _new(missing, row | {name: value}, names, strength),
                        -sum(r[name] == value for r in rows),
                    ),
                )
        rows.append({name: row[name] for name in names})
        missing.difference_update(_combinations(rows[-1], names, strength))
    return rows


def _combinations(row: Row, names: Sequence[str], strength: int) -> Iterator[tuple]:
    for some in combinations([name for name in names if name in row], strength):
        yield tuple((name, row[name]) for name in some)


def _new(missing: set[tuple], row: Row, names: Sequence[str], strength: int) -> int:
    return sum(found in missing for found in _combinations(row, names, strength))


def settled_answer(
    stock: Callable[[Path], nn.Module], path: Path, tokens: int, steps: int, skip: int = 0
) -> tuple[list[int], list[int]]:
    """A prompt, and stock mlx-lm's `steps` greedy tokens after it; `skip` gives other prompts.

    No step is decided by less than CLEAR and small noise changes no routing, of the prompt and of
    the answer: a correct implementation that rounds otherwise still gets the same tokens.
    """
    key = (path, tokens, steps, skip)
    if key not in _answers:
        _answers[key] = _settled(stock(path), tokens, steps, skip)
    return _answers[key]


def _settled(model: nn.Module, tokens: int, steps: int, skip: int) -> tuple[list[int], list[int]]:
    for seed in range(60):
        prompt = random_tokens(model, tokens, 1000 + seed)
        with recorded_routing() as plain:
            found = _clear_answer(model, prompt, steps)
        if found is None:
            continue
        with recorded_routing() as noisy, _noisy_embeddings():
            _, prompt_cache = stock_prefill(model, prompt, 16)
            for token in found[:-1]:
                mx.eval(model(mx.array([[token]]), cache=prompt_cache))
        pairs = zip(plain, noisy, strict=True)
        if any((np.sort(a) != np.sort(b)).any() for (_, a), (_, b) in pairs):
            continue
        if skip == 0:
            return prompt, found
        skip -= 1
    raise AssertionError("no prompt without near ties in 60 seeds")


def _clear_answer(model: nn.Module, prompt: Sequence[int], steps: int) -> list[int] | None:
    """Greedy tokens, or None as soon as two logits are too close."""
    logits, prompt_cache = stock_prefill(model, prompt, 16)
    found: list[int] = []
    while _gap(logits) >= CLEAR:
        found.append(int(logits.argmax()))
        if len(found) == steps:
            return found
        logits = model(mx.array([[found[-1]]]), cache=prompt_cache)[0, -1]
        logits = np.array(logits.astype(mx.float32))
    return None


def _gap(row: np.ndarray) -> float:
    second, first = np.partition(row, -2)[-2:]
    return float((first - second) / np.abs(row).max())


@contextmanager
def _noisy_embeddings() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for cls in (nn.Embedding, nn.QuantizedEmbedding):

            def noisy(self: nn.Module, ids: mx.array, _call: Any = cls.__call__) -> mx.array:
                y = _call(self, ids)
                return y * (1 + NOISE * mx.random.normal(y.shape, key=mx.random.key(3)))

            patch.setattr(cls, "__call__", noisy)
        yield


def answer(engine: Engine, prompt: Sequence[int], count: int) -> list[int]:
    """Prefill and `count` greedy tokens."""
    return decode(engine, engine.prefill(prompt), prompt, count)


def hold(engine: Engine, monkeypatch: pytest.MonkeyPatch, capacity: int) -> None:
    """The expert cache holds `capacity` records, whatever the budget has room for."""
    monkeypatch.setattr(engine.decoder, "capacity_for", lambda nbytes: capacity)
    monkeypatch.setattr(engine._allotment, "after_step", lambda step: None)


def records(engine: Engine) -> int:
    """Experts of the model."""
    return sum(layer.num_experts for layer in engine.index.layers)


def token_set(engine: Engine) -> int:
    """Records that one token routes to."""
    return len(engine.index.layers) * engine._shape.top_k


def check_slots(engine: Engine) -> None:
    """Every slot belongs to one record or is free, and none is there twice."""
    cache = engine.decoder.cache
    held = [record.slot for record in cache._records.values()] + list(cache._free)
    assert len(held) == cache._slots <= cache.capacity
    assert len({id(s) if not isinstance(s, int) else s for s in held}) == len(held)
    planar = getattr(cache.store, "_free", None)
    if planar is not None:
        everything = [*held, *planar]
        assert sorted(everything) == list(range(cache.store.slots))
