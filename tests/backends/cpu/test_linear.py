"""BlasLinear and its installation against the original layers."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlx_stream.backends.cpu import linear
from mlx_stream.backends.cpu.linear import BlasLinear, install_dense
from mlx_stream.backends.cpu.pool import WorkerPool


@pytest.fixture(scope="module")
def pool():
    with WorkerPool(2) as pool:
        yield pool


PACKINGS = [
    None,
    {"group_size": 64, "bits": 4},
    {"group_size": 32, "bits": 8},
    {"group_size": 64, "bits": 6},
    {"group_size": 32, "bits": 4, "mode": "mxfp4"},
    {"group_size": 16, "bits": 4, "mode": "nvfp4"},
]


def layer(packing, *, bias=True, dtype=mx.float32, inputs=192, outputs=300):
    mx.random.seed(3)
    linear = nn.Linear(inputs, outputs, bias=bias)
    if packing is not None:
        linear = nn.QuantizedLinear.from_linear(linear, **packing)
    linear.set_dtype(dtype)
    return linear


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
@pytest.mark.parametrize("packing", PACKINGS, ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_equals_the_original(pool, packing, bias, dtype):
    inner = layer(packing, bias=bias, dtype=dtype)
    blas = BlasLinear(inner, pool)
    for shape in ((1, 192), (2, 3, 192), (40, 192), (1, 130, 192), (600, 192)):
        x = mx.random.normal(shape)
        actual, expected = blas(x), inner(x)
        assert actual.dtype == expected.dtype
        error = mx.abs(actual - expected).max() / mx.abs(expected).max()
        assert error.item() < 2e-6


def test_lazy_and_strided_inputs(pool):
    blas = BlasLinear(layer(PACKINGS[1]), pool)
    x = mx.random.normal((192, 7, 2)).transpose(2, 1, 0)
    np.testing.assert_allclose(blas(x * 2), blas.inner(x * 2), atol=1e-5)


@pytest.mark.parametrize(
    ("packing", "dtype", "lazy"),
    [(None, mx.float32, 2), (None, mx.bfloat16, 0), (PACKINGS[1], mx.float32, 1)],
    ids=str,
)
def test_small_products_wait_for_nothing(pool, monkeypatch, packing, dtype, lazy):
    """192 x 300: two rows of a plain layer are few multiplications, three are not."""
    waits, real = [], linear.evaluated
    monkeypatch.setattr(linear, "evaluated", lambda x: waits.append(x) or real(x))
    blas = BlasLinear(layer(packing, dtype=dtype), pool)
    for rows in (1, 2, 3):
        waits.clear()
        x = mx.random.normal((rows, 192))
        np.testing.assert_allclose(blas(x), blas.inner(x), atol=1e-5)
        assert bool(waits) == (rows > lazy)


def test_other_dtypes_and_empty_inputs_go_to_the_original(pool):
    blas = BlasLinear(layer(None), pool)
    x = mx.random.normal((8, 192)).astype(mx.bfloat16)
    assert mx.array_equal(blas(x), blas.inner(x))
    assert blas(mx.zeros((0, 192))).shape == (0, 300)


def test_inside_compile(pool):
    blas = BlasLinear(layer(None), pool)
    x = mx.random.normal((8, 192))
    np.testing.assert_allclose(mx.compile(lambda x: blas(x))(x), blas.inner(x), atol=1e-5)


def test_a_replaced_parameter_is_seen(pool):
    blas = BlasLinear(layer(None), pool)
    x = mx.random.normal((8, 192))
    blas(x)
    blas.inner.weight = blas.inner.weight * 2
    np.testing.assert_allclose(blas(x), blas.inner(x), atol=1e-5)


def test_attributes_of_the_original_are_readable(pool):
    blas = BlasLinear(layer(PACKINGS[1]), pool)
    assert blas.bits == 4
    assert blas.weight is blas.inner.weight
    assert not hasattr(blas, "no_such_attribute")


class SubLinear(nn.Linear):
    """Not replaced: only the exact types are."""


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(64, 64), {"proj": nn.Linear(64, 64)}, nn.RMSNorm(64)]
        self.shared = self.layers[0]
        self.sub = SubLinear(64, 64)
        self.lm_head = nn.Linear(64, 64)

    def __call__(self, x):
        x = self.layers[2](self.layers[1]["proj"](self.layers[0](x)))
        return self.lm_head(self.sub(self.shared(x)))


def test_install_and_uninstall(pool):
    model = Model()
    x = mx.random.normal((40, 64))
    expected, arrays = model(x), dict(tree_flatten(model.parameters()))
    paths = []

    def skip(path, linear):
        paths.append(path)
        return path == "lm_head"

    uninstall = install_dense(model, pool, skip=skip)
    assert sorted(paths) == ["layers.0", "layers.1.proj", "lm_head", "shared"]
    assert type(model.layers[0]) is type(model.layers[1]["proj"]) is BlasLinear
    assert model.shared is model.layers[0]
    assert type(model.sub) is SubLinear
    assert type(model.lm_head) is nn.Linear
    np.testing.assert_allclose(model(x), expected, atol=1e-5)
    ids = {id(value) for _, value in tree_flatten(model.parameters())}
    assert ids == {id(value) for value in arrays.values()}, "every parameter stays reachable"
    again = install_dense(model, pool, skip=skip)  # nothing left to replace
    again()
    uninstall()
    assert type(model.layers[0]) is type(model.shared) is type(model.layers[1]["proj"]) is nn.Linear
    assert dict(tree_flatten(model.parameters())).keys() == arrays.keys()
    assert mx.array_equal(model(x), expected)
    uninstall()
