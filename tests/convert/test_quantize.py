"""Quantizing one tensor: MLX's own rounding bit for bit, and refinement that is never worse."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_stream.convert.quantize import pack_codes, quantize, unpack_codes
from mlx_stream.errors import PackError
from mlx_stream.storage.quant_spec import FIXED_MODES, QuantSpec

BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
AFFINE = [QuantSpec("affine", bits, group) for bits in BITS for group in GROUPS]
FIXED = [QuantSpec(mode, bits, group) for (bits, group), mode in FIXED_MODES.items()]
DTYPES = (mx.float32, mx.float16, mx.bfloat16)
ROWS, COLUMNS = 6, 256


def weights(kind: str, shape: tuple[int, ...] = (ROWS, COLUMNS)) -> np.ndarray:
    rng = np.random.default_rng(len(kind))
    noise = rng.standard_normal(shape)
    return {
        "gaussian": noise * 0.02,
        "heavy": rng.standard_t(2, shape) * 0.01,
        "constant": np.full(shape, 0.37) * np.arange(1, shape[-2] + 1)[:, None],
        "zero": np.zeros(shape),
        "tiny": noise * 1e-9,
        "tiniest": noise * 1e-37,
        "one_sided": 3 + np.abs(noise) * 0.01,
        "one_outlier": np.where(np.arange(shape[-1]) % 64 == 5, -4.0, noise * 0.01),
        "two_values": np.where(noise > 0, 0.5, -0.25),
    }[kind].astype(np.float32)


KINDS = (
    "gaussian",
    "heavy",
    "constant",
    "zero",
    "tiny",
    "tiniest",
    "one_sided",
    "one_outlier",
    "two_values",
)


def floats(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32))


def stream_codes(words: np.ndarray, bits: int) -> np.ndarray:
    """Codes by single bits, lowest first: slow, and nothing of the code under test."""
    raw = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")
    return raw.reshape(*words.shape[:-1], -1, bits) @ (1 << np.arange(bits))


def group_errors(w: mx.array, made, spec: QuantSpec) -> np.ndarray:
    """Squared error of each group [..., groups], in float64, from the stored arrays."""
    codes = stream_codes(np.array(made.weight), spec.bits)
    scales, biases = (
        np.repeat(floats(a), spec.group_size, -1).astype(np.float64)
        for a in (made.scales, made.biases)
    )
    squares = (floats(w) - (codes * scales + biases)) ** 2
    return squares.reshape(*w.shape[:-1], -1, spec.group_size).sum(-1)


def plain(w: mx.array, spec: QuantSpec) -> list[mx.array]:
    return mx.quantize(w, group_size=spec.group_size, bits=spec.bits, mode=spec.mode)


def same(a: mx.array, b: mx.array) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and mx.array_equal(a, b).item()


@pytest.mark.parametrize("spec", AFFINE + FIXED, ids=lambda s: s.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unrefined_is_mlx_bit_for_bit(spec, dtype):
    w = mx.array(weights("heavy", (3, ROWS, COLUMNS))).astype(dtype)
    made, expected = quantize(w, spec), plain(w, spec)
    assert same(made.weight, expected[0])
    assert same(made.scales, expected[1])
    assert (made.biases is None) == (len(expected) == 2)
    assert made.biases is None or same(made.biases, expected[2])


@pytest.mark.parametrize("spec", AFFINE, ids=lambda s: s.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_refined_is_never_worse_in_any_group(spec, dtype):
    for kind in KINDS:
        w = mx.array(weights(kind)).astype(dtype)
        before, after = quantize(w, spec), quantize(w, spec, refine=True)
        for name in ("weight", "scales", "biases"):
            old, new = getattr(before, name), getattr(after, name)
            assert (new.dtype, new.shape) == (old.dtype, old.shape)
        old, new = group_errors(w, before, spec), group_errors(w, after, spec)
        assert (new <= old).all(), kind
        if kind in ("gaussian", "heavy"):
            assert new.sum() < {"gaussian": 0.97, "heavy": 0.99}[kind] * old.sum(), kind


@pytest.mark.parametrize("spec", AFFINE, ids=lambda s: s.name)
@pytest.mark.parametrize("refine", [False, True])
def test_error_figures_are_those_of_the_stored_arrays(spec, refine):
    w = mx.array(weights("gaussian", (2, ROWS, COLUMNS))).astype(mx.bfloat16)
    made = quantize(w, spec, refine=refine)
    assert made.squared_error == pytest.approx(group_errors(w, made, spec).sum(), rel=1e-4)
    assert made.squared_norm == pytest.approx((floats(w).astype(np.float64) ** 2).sum(), rel=1e-6)


@pytest.mark.parametrize("spec", FIXED, ids=lambda s: s.name)
def test_error_figures_of_the_other_modes(spec):
    w = mx.array(weights("gaussian"))
    made = quantize(w, spec)
    back = mx.dequantize(
        made.weight, made.scales, group_size=spec.group_size, bits=spec.bits, mode=spec.mode
    )
    expected = (floats(w).astype(np.float64) - floats(back)) ** 2
    # dequantize returns bfloat16, which holds these products but for nvfp4's scales.
    assert made.squared_error == pytest.approx(expected.sum(), rel=1e-2)
    assert 0 < made.squared_error < 0.1 * made.squared_norm


@pytest.mark.parametrize("spec", AFFINE, ids=lambda s: s.name)
def test_codes_are_in_mlx_layout(spec):
    shape = (2, 3, COLUMNS)
    codes = np.random.default_rng(0).integers(0, 1 << spec.bits, shape, dtype=np.uint8)
    words = pack_codes(codes, spec.bits)
    assert words.shape == (2, 3, COLUMNS * spec.bits // 32)
    groups = (2, 3, COLUMNS // spec.group_size)
    back = mx.dequantize(
        mx.array(words),
        mx.ones(groups),
        mx.zeros(groups),
        group_size=spec.group_size,
        bits=spec.bits,
    )
    assert (np.array(back) == codes).all()
    assert (unpack_codes(words, spec.bits) == codes).all()
    assert (stream_codes(words, spec.bits) == codes).all()


def test_mlx_reads_what_was_refined():
    spec = QuantSpec("affine", 3, 32)
    w = mx.array(weights("heavy"))
    made = quantize(w, spec, refine=True)
    back = mx.dequantize(made.weight, made.scales, made.biases, group_size=32, bits=3)
    assert float(mx.square(w - back).sum()) == pytest.approx(made.squared_error, rel=1e-4)


@pytest.mark.parametrize("refine", [False, True])
def test_the_result_depends_on_nothing_but_the_group(refine):
    spec = QuantSpec("affine", 3, 64)
    w = mx.array(weights("heavy", (700, COLUMNS))).astype(mx.float16)
    whole, again = quantize(w, spec, refine=refine), quantize(w, spec, refine=refine)
    for name in ("weight", "scales", "biases"):
        assert same(getattr(whole, name), getattr(again, name))
        part = getattr(quantize(w[300:411], spec, refine=refine), name)
        assert same(getattr(whole, name)[300:411], part)
    assert whole.squared_error == again.squared_error


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("refine", [False, True])
def test_what_is_no_number_is_refused(value, refine):
    bad = weights("gaussian")
    bad[2, 3] = value
    with pytest.raises(PackError, match=f"1 of {ROWS * COLUMNS} values"):
        quantize(mx.array(bad), QuantSpec("affine", 4, 64), refine=refine)


def test_a_range_without_a_finite_scale_is_refused():
    wild = np.where(np.arange(COLUMNS) % 2, 3e38, -3e38).astype(np.float32)[None]
    with pytest.raises(PackError, match="groups have none"):
        quantize(mx.array(wild), QuantSpec("affine", 4, 64))


def test_only_affine_is_refined():
    with pytest.raises(AssertionError, match="mxfp4"):
        quantize(mx.zeros((1, 32)), QuantSpec("mxfp4", 4, 32), refine=True)
