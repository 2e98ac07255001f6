"""dequantize against mx.dequantize in float32; operands against plain matrix products."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_stream.backends.cpu.dequant import dequantize
from mlx_stream.backends.cpu.formats import e8m0_values, fp8_values
from mlx_stream.backends.cpu.operand import fill_activation, fill_weight, layout_of
from mlx_stream.storage.quant_spec import QuantSpec
from tests.backends.cpu.support import (
    AFFINE,
    DTYPE_NAMES,
    MODES,
    dequantized,
    quantized,
    raw,
    spec_id,
    unaligned,
)

FLOATS = [mx.float32, mx.bfloat16, mx.float16]


def as_stored(parts):
    dtypes = {name: DTYPE_NAMES[value.dtype] for name, value in parts.items()}
    return {name: raw(value) for name, value in parts.items()}, dtypes


def matrix(rows, columns, dtype=mx.float32, seed=0):
    mx.random.seed(seed)
    return mx.random.normal((rows, columns)).astype(dtype)


def check(parts, spec, rows, make=lambda array: array):
    expected = dequantized(parts, spec)
    stored, dtypes = as_stored(parts)
    stored = {name: make(array) for name, array in stored.items()}
    out = np.empty(expected[rows].shape, np.float32)
    dequantize(stored, dtypes, spec, out, rows)
    np.testing.assert_allclose(out, expected[rows], rtol=3e-7, atol=0, equal_nan=True)
    if spec.mode != "affine":
        np.testing.assert_array_equal(out, expected[rows])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("spec", [*AFFINE, QuantSpec("affine", 4, 64)], ids=spec_id)
def test_affine_equals_mlx(spec, dtype):
    check(quantized(matrix(7, 384, dtype), spec), spec, slice(0, 7))
    check(quantized(matrix(7, 128, dtype), spec), spec, slice(2, 5))


@pytest.mark.parametrize("spec", MODES, ids=spec_id)
def test_float_modes_equal_mlx_exactly(spec):
    check(quantized(matrix(7, 384), spec), spec, slice(0, 7))
    check(quantized(matrix(7, 32), spec), spec, slice(6, 7))


@pytest.mark.parametrize("spec", MODES, ids=spec_id)
def test_every_scale_and_code_equals_mlx(spec):
    words = spec.group_size * spec.bits // 32
    weight = np.arange(256 * words * 4, dtype=np.uint8).view(np.uint32).reshape(256, words)
    scales = np.arange(256, dtype=np.uint8).reshape(256, 1)
    parts = {"weight": mx.array(weight), "scales": mx.array(scales)}
    with np.errstate(invalid="ignore", over="ignore"):  # 0 * inf and the like, as stored
        check(parts, spec, slice(0, 256))


def test_nvfp4_tensor_scale():
    spec = QuantSpec("nvfp4", 4, 16)
    parts = quantized(matrix(5, 64), spec) | {"global_scale": mx.array(3.25)}
    expected = dequantized(parts, spec)
    stored, dtypes = as_stored(parts)
    out = np.empty((5, 64), np.float32)
    dequantize(stored, dtypes, spec, out, slice(0, 5))
    np.testing.assert_allclose(out, expected, rtol=3e-7)


@pytest.mark.parametrize("spec", [*AFFINE[::3], *MODES], ids=spec_id)
def test_unaligned_views(spec):
    check(quantized(matrix(6, 128, mx.bfloat16), spec), spec, slice(1, 5), unaligned)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("make", [lambda array: array, unaligned], ids=["aligned", "unaligned"])
def test_unquantized(dtype, make):
    weight = matrix(9, 40, dtype)
    stored, dtypes = as_stored({"weight": weight})
    out = np.empty((4, 40), np.float32)
    spec = QuantSpec("none", 32 if dtype == mx.float32 else 16, 0)
    dequantize({"weight": make(stored["weight"])}, dtypes, spec, out, slice(3, 7))
    np.testing.assert_array_equal(out, np.array(weight.astype(mx.float32))[3:7])


def test_no_rows():
    spec = QuantSpec("affine", 4, 64)
    stored, dtypes = as_stored(quantized(matrix(4, 64), spec))
    dequantize(stored, dtypes, spec, np.empty((0, 64), np.float32), slice(2, 2))


def test_unknown_mode():
    spec = QuantSpec("nf4", 4, 64)
    stored, dtypes = as_stored(quantized(matrix(4, 64), QuantSpec("affine", 4, 64)))
    with pytest.raises(ValueError, match="nf4"):
        dequantize(stored, dtypes, spec, np.empty((4, 64), np.float32), slice(0, 4))


def test_format_tables():
    assert fp8_values()[0x7E] == 448
    assert fp8_values()[1] == 2.0**-9
    assert np.isnan(fp8_values()[[0x7F, 0xFF]]).all()
    assert e8m0_values()[[0, 127, 254]].tolist() == [2.0**-127, 1.0, 2.0**127]


@settings(max_examples=60, deadline=None)
@given(
    spec=st.sampled_from([*AFFINE, *MODES]),
    rows=st.integers(1, 70),
    outputs=st.integers(1, 9),
    groups=st.integers(1, 9),
    transposed=st.booleans(),
)
def test_operands_multiply_to_the_same_product(spec, rows, outputs, groups, transposed):
    """Whatever the order of the columns, w operand @ x operand = w @ x."""
    inputs = groups * max(spec.group_size, 32)
    parts = quantized(matrix(outputs, inputs, seed=outputs), spec)
    stored, dtypes = as_stored(parts)
    layout = layout_of(spec, inputs)
    rng = np.random.default_rng(rows)
    x = rng.standard_normal((rows, inputs)).astype(np.float32).T
    shape = (layout.columns, rows)
    operand = np.empty(shape[::-1], np.float32).T if transposed else np.empty(shape, np.float32)
    fill_activation(layout, x, operand)
    w = np.empty((outputs, layout.columns), np.float32)
    scratch = np.empty(layout.weight_scratch(outputs), np.float32)
    fill_weight(layout, stored, dtypes, spec, slice(0, outputs), w, scratch)
    expected = dequantized(parts, spec).astype(np.float64) @ x
    scale = np.abs(dequantized(parts, spec)) @ np.abs(x)
    assert np.all(np.abs(w @ operand - expected) <= 4e-6 * scale)
