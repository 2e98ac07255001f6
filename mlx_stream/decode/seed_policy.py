"""Which experts of a layer a prompt's routing recommends to decode: scores, no cache, no model.

All scores are in uses: what a counter would hold that forgets half in `HALF_LIFE` tokens. So an
eviction policy may add them to its own counts.
"""

from __future__ import annotations

import numpy as np

from mlx_stream.decode.lfu_policy import HALF_LIFE

SEED_POLICIES = ("none", "last-token", "weighted", "frequency")
DEFAULT_SEED_POLICY = "weighted"
HORIZON = 1.0 / (1.0 - 0.5 ** (1.0 / HALF_LIFE))  # tokens that such a counter sees, about 93
RECENT_TOKENS = int(8 * HALF_LIFE)  # what is older weighs less than 1/256


def seed_scores(policy: str, routed: np.ndarray, num_experts: int) -> np.ndarray:
    """``[E]`` float64: above zero is worth keeping, higher first.

    * ``none``: nothing.
    * ``last-token``: the experts of the last token, all alike.
    * ``weighted``: uses; one counts half for every `HALF_LIFE` tokens that followed it.
    * ``frequency``: uses in the whole prompt, all alike, scaled to `HORIZON` tokens.

    Args:
        routed: ``[N, K]`` ids of the layer, a row for every prompt token.
    """
    assert policy in SEED_POLICIES, f"unknown seed policy {policy!r}"
    if policy == "none" or not len(routed):
        return np.zeros(num_experts)
    if policy == "last-token":
        routed = routed[-1:]
    if policy == "frequency":
        counts = np.bincount(routed.reshape(-1), minlength=num_experts)
        return counts * min(1.0, HORIZON / len(routed))
    recent = routed[-RECENT_TOKENS:]
    weights = 0.5 ** (np.arange(len(recent) - 1, -1, -1) / HALF_LIFE)
    return np.bincount(
        recent.reshape(-1), weights=np.repeat(weights, recent.shape[1]), minlength=num_experts
    )


def best_experts(scores: np.ndarray, count: int) -> list[int]:
    """Ids of the `count` best scores above zero, best first; equal scores in id order."""
    order = np.argsort(-scores, kind="stable")[:count]
    return [int(e) for e in order if scores[e] > 0]


def layer_share(capacity: int, layer: int, layers: int) -> int:
    """Records of the cache that the layer at this position may seed; the shares add up to all."""
    return capacity * (layer + 1) // layers - capacity * layer // layers
