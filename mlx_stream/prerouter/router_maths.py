"""The two declared forms of router maths, written out: what a spec says, as numbers.

A model's own code routes (see selection.py); this is what its answers are compared with when a
checkpoint is opened, and what a trainer may use.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_stream.prerouter.spec import RouterMaths

Values = mx.array | np.ndarray


def select(
    logits: mx.array, maths: RouterMaths, top_k: int, bias: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """``logits [..., E] -> (expert ids [..., K], float32 weights [..., K])``, best first.

    Args:
        bias: ``[E]`` or ``[..., E]``; used when `maths` says so.
    """
    logits = logits.astype(mx.float32)
    if maths.kind == "softmax_topk":
        scores = steering = mx.softmax(logits, axis=-1, precise=True)
    else:
        scores = mx.sigmoid(logits)
        steering = scores + bias if maths.expert_bias and bias is not None else scores
        steering = _best_groups(steering, maths)
    ids = mx.argsort(-steering, axis=-1)[..., :top_k]
    weights = mx.take_along_axis(scores, ids, axis=-1)
    if maths.norm:
        weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
    return ids, weights * maths.scaling


def select_on_host(
    logits: np.ndarray, maths: RouterMaths, top_k: int
) -> tuple[np.ndarray, np.ndarray]:
    """The same of ``softmax_topk`` in numpy, in no order: ``logits [C, E]`` float32."""
    assert maths.kind == "softmax_topk", "the other kind is asked in MLX"
    ids = np.argpartition(-logits, top_k - 1, axis=-1)[:, :top_k]
    scores = np.exp(logits - logits.max(axis=-1, keepdims=True))
    weights = np.take_along_axis(scores, ids, axis=-1)
    total = weights if maths.norm else scores
    return ids, weights * (np.float32(maths.scaling) / total.sum(axis=-1, keepdims=True))


def _best_groups(scores: mx.array, maths: RouterMaths) -> mx.array:
    """Scores of experts outside the best groups become -inf."""
    if maths.topk_group == maths.n_group:
        return scores
    grouped = mx.unflatten(scores, -1, (maths.n_group, -1))
    best = mx.sort(grouped, axis=-1)[..., -2:].sum(axis=-1)  # [..., groups]
    rank = mx.argsort(mx.argsort(-best, axis=-1), axis=-1)
    kept = mx.where((rank < maths.topk_group)[..., None], grouped, -mx.inf)
    return kept.flatten(-2, -1)
