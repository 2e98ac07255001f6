"""Blocked attention against MLX's own function."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_stream.backends.cpu import attention as module
from mlx_stream.backends.cpu.attention import attention_override
from mlx_stream.backends.cpu.pool import WorkerPool

ORIGINAL = mx.fast.scaled_dot_product_attention


@pytest.fixture(scope="module")
def pool():
    with WorkerPool(2) as pool:
        yield pool


@pytest.fixture(params=[(512, 1024), (48, 64)], ids=["default blocks", "small blocks"])
def _block_sizes(request, monkeypatch):
    monkeypatch.setattr(module, "SCORE_ROWS", request.param[0])
    monkeypatch.setattr(module, "KEY_BLOCK", request.param[1])


def inputs(batch=2, heads=4, kv_heads=2, queries=70, keys=200, dims=32, value_dims=24):
    mx.random.seed(0)
    q = mx.random.normal((batch, heads, queries, dims))
    k = mx.random.normal((batch, kv_heads, keys, dims))
    return q, k, mx.random.normal((batch, kv_heads, keys, value_dims))


def check(pool, arrays, mask=None, sinks=None, scale=0.3, tolerance=3e-6):
    expected = np.array(ORIGINAL(*arrays, scale=scale, mask=mask, sinks=sinks))
    with attention_override(pool):
        replaced = mx.fast.scaled_dot_product_attention
        assert replaced is not ORIGINAL
        actual = np.array(replaced(*arrays, scale=scale, mask=mask, sinks=sinks))
    np.testing.assert_allclose(actual, expected, atol=tolerance, rtol=1e-5, equal_nan=True)


@pytest.mark.usefixtures("_block_sizes")
class TestMasks:
    @pytest.mark.parametrize("shape", [(70, 70), (70, 200), (64, 64), (17, 17), (130, 131)])
    def test_causal(self, pool, shape):
        queries, keys = shape
        check(pool, inputs(queries=queries, keys=keys), "causal")

    def test_none(self, pool):
        check(pool, inputs())

    @pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 2)])
    def test_head_groups(self, pool, heads):
        check(pool, inputs(heads=heads[0], kv_heads=heads[1]), "causal")

    @pytest.mark.parametrize("shape", [(70, 200), (1, 1, 70, 200), (2, 4, 70, 200), (2, 1, 1, 200)])
    def test_boolean(self, pool, shape):
        check(pool, inputs(), mx.random.uniform(shape=shape) > 0.4)

    def test_a_row_masked_everywhere_averages_all_values(self, pool):
        mask = mx.random.uniform(shape=(70, 200)) > 0.4
        mask[3] = False
        check(pool, inputs(), mask)

    def test_sliding_window(self, pool):
        query, key = mx.arange(70)[:, None] + 130, mx.arange(200)[None]
        check(pool, inputs(), (key <= query) & (key > query - 20))

    def test_additive(self, pool):
        check(pool, inputs(), mx.random.normal((4, 70, 200)))

    def test_minus_infinity(self, pool):
        query, key = mx.arange(70)[:, None], mx.arange(200)[None]
        check(pool, inputs(), mx.where(key < query + 100, -mx.inf, 0.0))
        mask = mx.zeros((70, 200))
        mask[5] = -mx.inf
        check(pool, inputs(), mask)

    @pytest.mark.parametrize("masked", [None, "causal", "row"])
    def test_sinks(self, pool, masked):
        mask = masked
        if masked == "row":
            mask = mx.random.uniform(shape=(70, 200)) > 0.4
            mask[3] = False
        check(pool, inputs(), mask, sinks=mx.array([0.5, -3.0, 20.0, 0.0]))

    def test_large_scores(self, pool):
        q, k, v = inputs()
        check(pool, (10 * q, 3 * k, v), "causal", tolerance=3e-5)


def test_strided_inputs(pool):
    q, k, v = inputs(heads=4, kv_heads=4, keys=70, value_dims=32)
    turned = [mx.contiguous(a.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for a in (q, k, v)]
    check(pool, turned, "causal")
    check(pool, (q, k[:, ::2], v[:, ::2]), "causal")


def test_two_runs_are_bit_equal(pool):
    arrays = inputs(queries=300, keys=300)
    with attention_override(pool):
        runs = [
            np.array(mx.fast.scaled_dot_product_attention(*arrays, scale=0.2, mask="causal"))
            for _ in range(3)
        ]
    assert np.array_equal(runs[0], runs[1])
    assert np.array_equal(runs[0], runs[2])


def test_everything_else_goes_to_the_original(pool, monkeypatch):
    monkeypatch.setattr(module, "_attend", lambda *args: pytest.fail("took the numpy path"))
    q, k, v = inputs()
    half = [array.astype(mx.bfloat16) for array in (q, k, v)]
    few = [q[:, :, :4], k, v]
    more_queries = [q, k[:, :, :20], v[:, :, :20]]
    for arrays, mask in ((half, "causal"), (few, None), (more_queries, "causal")):
        expected = ORIGINAL(*arrays, scale=0.3, mask=mask)
        with attention_override(pool):
            actual = mx.fast.scaled_dot_product_attention(*arrays, scale=0.3, mask=mask)
        assert mx.array_equal(actual, expected)
    with attention_override(pool), pytest.raises(ValueError, match="mask"):
        mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask="diagonal")


def test_inside_compile(pool):
    arrays = inputs()

    @mx.compile
    def compiled(q, k, v):
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask="causal")

    with attention_override(pool):
        actual = compiled(*arrays)
    expected = ORIGINAL(*arrays, scale=0.3, mask="causal")
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_restored_after_nesting_and_errors(pool):
    with attention_override(pool):
        outer = mx.fast.scaled_dot_product_attention
        assert outer != ORIGINAL
        with attention_override(pool):
            assert mx.fast.scaled_dot_product_attention != ORIGINAL
        assert mx.fast.scaled_dot_product_attention == outer
    with pytest.raises(KeyError), attention_override(pool):
        raise KeyError
    assert mx.fast.scaled_dot_product_attention is ORIGINAL


def test_scratch_bound_holds(pool, monkeypatch):
    taken = []
    scratch = WorkerPool.scratch
    monkeypatch.setattr(
        WorkerPool, "scratch", lambda pool, nbytes: (taken.append(nbytes), scratch(pool, nbytes))[1]
    )
    check(pool, inputs(queries=300, keys=2100), "causal")
    assert 2 * max(taken) <= module.scratch_nbytes(32, 24, threads=2)
