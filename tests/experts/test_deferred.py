"""DeferredExpertOutput: the weighted sum is recognised, everything else is the real array."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_stream.experts.deferred import DeferredExpertOutput

SHAPE = (2, 3, 4, 8)  # [B, C, K, D]


class Source:
    """Resolves as a prefill would, and counts how it was asked."""

    def __init__(self, dtype=mx.float32):
        self.y = mx.random.normal(SHAPE, key=mx.random.key(1)).astype(dtype)
        self.scores = mx.random.uniform(shape=SHAPE[:-1], key=mx.random.key(2)).astype(dtype)
        self.asked = []

    def resolve(self, scores):
        self.asked.append("plain" if scores is None else "weighted")
        return self.y if scores is None else (self.y * scores[..., None]).sum(axis=-2)

    def deferred(self):
        return DeferredExpertOutput(SHAPE, self.y.dtype, self.resolve)


WEIGHTED = {
    "times scores, sum -2": lambda y, s: (y * s[..., None]).sum(axis=-2),
    "positive axis": lambda y, s: (y * s[..., None]).sum(axis=2),
    "positional axis": lambda y, s: (y * s[..., None]).sum(-2),
    "expand_dims": lambda y, s: (y * mx.expand_dims(s, -1)).sum(axis=-2),
}
PLAIN = {
    "other axis": lambda y, s: (y * s[..., None]).sum(axis=-1),
    "keepdims": lambda y, s: (y * s[..., None]).sum(axis=-2, keepdims=True),
    "all axes": lambda y, s: (y * s[..., None]).sum(),
    "weighted, then more": lambda y, s: (y * s[..., None]) * 2.0,
    "weighted, then added": lambda y, s: (y * s[..., None]) + 1.0,
    "weighted mean": lambda y, s: (y * s[..., None]).mean(axis=-2),
    "scalar": lambda y, s: (y * 2.0).sum(axis=-2),
    "full array": lambda y, s: (y * mx.broadcast_to(s[..., None], y.shape)).sum(axis=-2),
    "a row for all": lambda y, s: (y * s[:1, :1, :, None]).sum(axis=-2),
    "plain sum": lambda y, s: y.sum(axis=-2),
    "indexed": lambda y, s: y[..., 0, :] * s[..., 0, None],
    "added": lambda y, s: (y + 1.0).sum(axis=-2),
    "added from the left": lambda y, s: (1.0 + y).sum(axis=-2),
    "method": lambda y, s: y.astype(mx.float32).swapaxes(-1, -2) @ s[..., None],
    "squeezed": lambda y, s: y.reshape(6, 4, 8).max(axis=1),
}


@pytest.mark.parametrize("name", WEIGHTED)
def test_the_weighted_sum_is_done_inside(name):
    source = Source()
    got = WEIGHTED[name](source.deferred(), source.scores)
    expected = WEIGHTED[name](source.y, source.scores)
    assert source.asked == ["weighted"]
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("name", PLAIN)
def test_anything_else_is_done_on_the_real_array(name):
    source = Source()
    got = PLAIN[name](source.deferred(), source.scores)
    expected = PLAIN[name](source.y, source.scores)
    assert source.asked == ["plain"]
    assert got.shape == expected.shape
    np.testing.assert_array_equal(got, expected)


def test_it_says_what_the_real_array_would_without_asking_for_it():
    source = Source(mx.bfloat16)
    y = source.deferred()
    assert (y.shape, y.ndim, y.dtype) == (SHAPE, 4, mx.bfloat16)
    weighted = y * source.scores[..., None]
    assert (weighted.shape, weighted.ndim, weighted.dtype) == (SHAPE, 4, mx.bfloat16)
    assert source.asked == []


@pytest.mark.parametrize("score_dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_dtypes_promote_as_mlx_does(score_dtype):
    source = Source(mx.bfloat16)
    scores = source.scores.astype(score_dtype)
    got = (source.deferred() * scores[..., None]).sum(axis=-2)
    assert got.dtype == (source.y * scores[..., None]).sum(axis=-2).dtype


def test_mlx_refuses_it_on_the_right_of_an_array():
    """MLX never asks the right operand, so such a block fails the probe and stays plain."""
    source = Source()
    with pytest.raises(ValueError, match="Cannot perform multiplication"):
        source.scores[..., None] * source.deferred()


def test_the_real_array_is_asked_for_once():
    source = Source()
    y = source.deferred()
    assert y.sum().shape == ()
    assert (y * 2).shape == SHAPE
    assert y.materialize() is source.y
    assert source.asked == ["plain"]
