"""Why adapters are not merged: what is left of a delta when the sum is quantized again."""

import mlx.core as mx
import numpy as np
import pytest

BITS, GROUP = 4, 64


def merge_error(size: float) -> float:
    """Size of ``requantized(W + delta) - W - delta`` over that of the delta, of rank 16.

    W is what a 4-bit checkpoint holds; `size` is the delta's spread over that of W.
    """
    rng = np.random.default_rng(0)
    w = mx.array(rng.standard_normal((512, 512), np.float32) * 0.02)
    w = mx.dequantize(*mx.quantize(w, GROUP, BITS), GROUP, BITS)
    a, b = rng.standard_normal((16, 512), np.float32), rng.standard_normal((512, 16), np.float32)
    delta = mx.array(b @ a)
    delta = delta * (size * mx.std(w) / mx.std(delta))
    merged = mx.dequantize(*mx.quantize(w + delta, GROUP, BITS), GROUP, BITS)
    left = merged - w
    error = mx.linalg.norm(left - delta) / mx.linalg.norm(delta)
    return float(error.item())


@pytest.mark.parametrize(("size", "least"), [(0.01, 3.0), (0.03, 1.2), (0.1, 0.8)])
def test_requantizing_drowns_a_small_delta(size, least):
    """The error is as large as the delta itself, or a multiple of it."""
    assert merge_error(size) > least


def test_a_large_delta_survives():
    assert merge_error(1.0) < 0.25
