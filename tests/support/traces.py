"""Routing traces of no model: ids drawn at random, some experts likelier than others."""

from __future__ import annotations

import numpy as np

from mlx_stream.decode.routing_trace import RoutingTrace


def random_trace(
    *,
    layers: tuple[int, ...] = (0, 2, 3),
    experts: int = 8,
    k: int = 2,
    prompt: int = 20,
    steps: int = 12,
    nbytes: int = 100,
    seed: int = 0,
) -> RoutingTrace:
    """A trace with equal layers; `layers` are their indices."""
    rng = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, experts + 1)
    orders = [rng.permutation(experts) for _ in layers]

    def draw(order: np.ndarray, tokens: int) -> np.ndarray:
        p = weights[order] / weights.sum()
        rows = [rng.choice(experts, k, replace=False, p=p) for _ in range(tokens)]
        return np.array(rows, dtype=np.int16).reshape(tokens, k)

    return RoutingTrace(
        model="random",
        layers=layers,
        num_experts=(experts,) * len(layers),
        expert_nbytes=(nbytes,) * len(layers),
        prompt=tuple(draw(order, prompt) for order in orders),
        decode=tuple(draw(order, steps) for order in orders),
        tokens=rng.integers(0, 1000, steps).astype(np.int32),
    )
