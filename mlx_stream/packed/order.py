"""The order of experts in their file, learnt from routing. Pure.

Experts that are used often, and together, lie side by side, so that one read brings several of a
short prompt's experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

WINDOW = 4  # experts placed last that the next one should have been used with


def used_first(routed: Sequence[np.ndarray], num_experts: int) -> list[int]:
    """All experts, the most used first, those used with their neighbours before others.

    Args:
        routed: arrays ``[tokens, K]`` of expert ids.
    """
    rows = [np.asarray(r, dtype=np.int64) for r in routed if len(r)]
    uses = np.zeros(num_experts)
    together = np.zeros((num_experts, num_experts))
    for ids in rows:
        uses += np.bincount(ids.reshape(-1), minlength=num_experts)
        picked = np.zeros((len(ids), num_experts), dtype=np.float32)
        np.put_along_axis(picked, ids, 1.0, axis=1)
        together += picked.T @ picked
    placed: list[int] = []
    left = np.ones(num_experts, dtype=bool)
    for _ in range(num_experts):
        score = uses + together[placed[-WINDOW:]].sum(axis=0) / WINDOW
        expert = int(np.argmax(np.where(left, score, -1.0)))
        placed.append(expert)
        left[expert] = False
    return placed
