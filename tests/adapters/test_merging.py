"""Why adapters are not merged: what is left of a delta when the sum is quantized again."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_stream.hub import demo_path

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
    return relative_error(w, delta)


@pytest.mark.parametrize(("size", "least"), [(0.01, 3.0), (0.03, 1.2), (0.1, 0.8)])
def test_requantizing_drowns_a_small_delta(size, least):
    """The error is as large as the delta itself, or a multiple of it."""
    assert merge_error(size) > least


def test_a_large_delta_survives():
    assert merge_error(1.0) < 0.25


def test_of_the_demos_own_deltas_a_third_is_lost():
    weights = mx.load(str(demo_path() / "model.safetensors"))
    lora = mx.load(str(demo_path() / "lora.safetensors"))
    errors = []
    for path in (name.removesuffix(".lora_A") for name in lora if name.endswith(".lora_A")):
        packed = (weights[f"{path}.{part}"] for part in ("weight", "scales", "biases"))
        w = mx.dequantize(*packed, GROUP, BITS)
        a, b = (lora[f"{path}.lora_{side}"].astype(mx.float32) for side in "AB")
        errors.append(relative_error(w, 2.0 * (b @ a)))
    assert len(errors) == 24
    assert 0.2 < sorted(errors)[12] < 0.45


def relative_error(w: mx.array, delta: mx.array) -> float:
    """Of ``requantized(W + delta) - W`` against the delta."""
    merged = mx.dequantize(*mx.quantize(w + delta, GROUP, BITS), GROUP, BITS)
    return (mx.linalg.norm(merged - w - delta) / mx.linalg.norm(delta)).item()
