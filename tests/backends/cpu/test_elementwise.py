"""RMSNorm and RoPE against MLX's own functions."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_stream.backends.cpu import elementwise as module
from mlx_stream.backends.cpu.elementwise import elementwise_override
from mlx_stream.backends.cpu.pool import WorkerPool

ORIGINALS = mx.fast.rms_norm, mx.fast.rope


@pytest.fixture(scope="module")
def pool():
    with WorkerPool(2) as pool:
        yield pool


@pytest.fixture(autouse=True)
def _small_calls_too(monkeypatch):
    monkeypatch.setattr(module, "MIN_ELEMENTS", 1)
    monkeypatch.setattr(module, "BLOCK_ELEMENTS", 4096)


def both(pool, call, x):
    expected = call(x)
    with elementwise_override(pool):
        actual = call(x)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("shape", [(1, 8), (3, 50, 64), (2, 7, 4, 32), (1, 2048)])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
def test_rms_norm(pool, shape, dtype):
    norm = nn.RMSNorm(shape[-1])
    norm.weight = mx.random.normal((shape[-1],)).astype(dtype)
    both(pool, norm, 3 * mx.random.normal(shape))
    both(pool, lambda x: mx.fast.rms_norm(x, None, 1e-6), mx.random.normal(shape))


@pytest.mark.parametrize("offset", [0, 300])
@pytest.mark.parametrize("dims", [32, 16])
def test_rope(pool, dims, offset):
    x = mx.random.normal((2, 70, 3, 32)).transpose(0, 2, 1, 3)
    both(pool, lambda x: nn.RoPE(dims, base=1e6, scale=0.5)(x, offset=offset), x)
    freqs = mx.random.uniform(1, 1000, (dims // 2,))

    def with_freqs(x):
        options = {"traditional": False, "base": None, "scale": 1.0, "offset": offset}
        return mx.fast.rope(x, dims, freqs=freqs, **options)

    both(pool, with_freqs, x)


def test_everything_else_goes_to_the_original(pool, monkeypatch):
    for name in ("_rms_norm", "_rope"):
        monkeypatch.setattr(module, name, lambda *args: pytest.fail("took the numpy path"))
    x = mx.random.normal((1, 2, 5, 16))
    half = x.astype(mx.bfloat16)
    both(pool, lambda x: mx.fast.rms_norm(x, None, 1e-5).astype(mx.float32), half)
    both(pool, lambda x: nn.RoPE(16, traditional=True)(x), x)
    both(pool, lambda x: nn.RoPE(16)(x, offset=mx.array([3])), x)
    monkeypatch.setattr(module, "MIN_ELEMENTS", 10**6)
    both(pool, nn.RoPE(16), x)


def test_inside_compile(pool):
    """Traced arrays have no values yet: the originals build the graph."""
    norm, rope = nn.RMSNorm(16), nn.RoPE(16)
    both(pool, mx.compile(lambda x: rope(norm(x))), mx.random.normal((1, 2, 5, 16)))


def test_restored_after_errors(pool):
    with pytest.raises(KeyError), elementwise_override(pool):
        raise KeyError
    assert (mx.fast.rms_norm, mx.fast.rope) == ORIGINALS
