"""The way around one linear layer: the same sum for one row and many, and who waits for it."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlx_stream.adapters.lora import LowRankPath
from mlx_stream.backends.cpu import linear
from mlx_stream.backends.cpu.linear import BlasLinear
from mlx_stream.backends.cpu.pool import WorkerPool

INPUTS, RANK, OUTPUTS = 700, 200, 300  # one row is too much work to be lazy for its size alone


def linear_of(rows, columns, dtype):
    layer = nn.Linear(columns, rows, bias=False)
    layer.set_dtype(dtype)
    return layer


@pytest.fixture
def pool():
    with WorkerPool(2) as pool:
        yield pool


@pytest.mark.parametrize("rows", [1, 2, 40])
@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize("dtypes", [(mx.float32, mx.float32), (mx.float16, mx.float32)], ids=str)
def test_it_is_added_in_the_layers_dtype(dtypes, scale, rows):
    path_dtype, dtype = dtypes
    down, up = linear_of(RANK, INPUTS, path_dtype), linear_of(OUTPUTS, RANK, path_dtype)
    path = LowRankPath(down, up, scale, path_dtype)
    x = mx.random.normal((1, rows, INPUTS)).astype(dtype)
    y = mx.random.normal((1, rows, OUTPUTS)).astype(dtype)
    found = path.add_to(y, x)
    low = np.array(x, np.float32) @ np.array(down.weight, np.float32).T
    expected = np.array(y) + scale * low @ np.array(up.weight, np.float32).T
    assert found.dtype == dtype
    np.testing.assert_allclose(found, expected, atol=1e-4 if path_dtype == mx.float32 else 1e-2)


def test_one_row_waits_for_nothing(pool, monkeypatch):
    down, up = linear_of(RANK, INPUTS, mx.float32), linear_of(OUTPUTS, RANK, mx.float32)
    path = LowRankPath(BlasLinear(down, pool), BlasLinear(up, pool), 1.0, mx.float32)
    waits, real = [], linear.evaluated
    monkeypatch.setattr(linear, "evaluated", lambda x: waits.append(x) or real(x))
    for rows, expected in ((1, 0), (2, 1), (40, 2)):  # 2: only the first product is a large one
        waits.clear()
        x, y = mx.random.normal((rows, INPUTS)), mx.zeros((rows, OUTPUTS))
        np.testing.assert_allclose(path.add_to(y, x), up(down(x)), atol=1e-5)
        assert len(waits) == expected
