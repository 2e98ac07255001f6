"""expert_gate_up, expert_down and expert_combine against the plain-ops twin, under the checker."""

from dataclasses import dataclass, field

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.gemma4_text import GeGLU
from mlx_lm.models.step3p5 import ClampedSwiGLU
from mlx_lm.models.switch_layers import SwiGLU

from mlx_stream.backends.kernels.activations import SWIGLU, kernel_activation
from mlx_stream.backends.kernels.grouped import (
    combine_metal,
    down_launch,
    grouped_mlp_metal,
    supports,
    supports_module,
)
from mlx_stream.backends.kernels.source import load_kernel
from mlx_stream.backends.kernels.tiles import place_table
from mlx_stream.backends.kernels.weight_formats import matrix_of

from .running import (
    TOLERANCE,
    UNQUANTIZED,
    Packing,
    ShimRunner,
    as_float32,
    error,
    make_layer,
    routed_rows,
    tokens_of,
)

RAGGED = (3, 0, 1, 17)
F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16


@dataclass(frozen=True)
class Case:
    """D and F are not multiples of the tile unless the packing forces them to be."""

    packing: Packing
    dtype: mx.Dtype
    dims: tuple[int, int]
    activation: object = field(default_factory=SwiGLU)
    counts: tuple[int, ...] = RAGGED
    tile_rows: int | None = None
    mlp: bool = False
    bias: bool = False
    outer: Packing | None = None

    def __str__(self):
        mode, bits, group = self.packing
        kind = type(self.activation).__name__
        return f"{mode}{bits}g{group}-{self.dtype}-{kind}-{self.tile_rows}".replace("mlx.core.", "")


CASES = [
    Case(("affine", 4, 32), F32, (96, 160), bias=True, counts=(33, 0, 1, 40, 5), tile_rows=32),
    Case(("affine", 4, 32), F16, (32, 96), GeGLU(), tile_rows=16),
    Case(("affine", 4, 64), F32, (128, 64), SwigluOAI(), bias=True, tile_rows=16),
    Case(("affine", 4, 64), BF16, (64, 192), counts=(70, 0, 1, 64, 2), tile_rows=64),
    Case(("affine", 4, 128), F32, (128, 256), counts=(65, 1, 0, 9), tile_rows=64),
    Case(("affine", 4, 128), F16, (256, 128)),
    Case(("affine", 8, 32), F32, (32, 96), ClampedSwiGLU(0.7), counts=(20, 0, 1, 35), tile_rows=32),
    Case(("affine", 8, 32), BF16, (96, 32), nn.ReLU2(), mlp=True, counts=(20, 1), tile_rows=32),
    Case(("affine", 8, 64), F32, (64, 128), nn.SiLU(), mlp=True, bias=True),
    Case(("affine", 8, 64), F16, (64, 64), tile_rows=64),
    Case(("affine", 8, 128), F32, (128, 128), GeGLU(), tile_rows=16),
    Case(("mxfp4", 4, 32), F32, (96, 32), SwigluOAI(1.702, 0.6), bias=True, tile_rows=32),
    Case(("mxfp4", 4, 32), F16, (64, 96), SwigluOAI(), bias=True, counts=(66, 3), tile_rows=64),
    Case(("mxfp4", 4, 32), BF16, (96, 96), SwigluOAI(), bias=True),
    Case(("mxfp8", 8, 32), F32, (96, 64), nn.GELU(), mlp=True, tile_rows=64),
    Case(("mxfp8", 8, 32), F16, (32, 32), counts=(1, 1, 1, 0, 0, 1), tile_rows=16),
    Case(("mxfp8", 8, 32), BF16, (64, 32), tile_rows=32, counts=(33, 0, 1)),
    Case(("nvfp4", 4, 16), F16, (16, 48), tile_rows=64),
    Case(("nvfp4", 4, 16), F32, (48, 80), GeGLU(), counts=(17, 0, 1, 30), tile_rows=32),
    Case(("nvfp4", 4, 16), BF16, (80, 48), bias=True),
    Case(UNQUANTIZED, F32, (37, 29), bias=True, counts=(33, 0, 1, 4), tile_rows=32),
    Case(UNQUANTIZED, F32, (60, 44), nn.GELU(approx="precise"), mlp=True, bias=True),
    Case(UNQUANTIZED, F16, (70, 130), counts=(90, 1), tile_rows=64),
    Case(UNQUANTIZED, BF16, (52, 21), GeGLU(), tile_rows=16),
    Case(("affine", 4, 32), F32, (96, 64), outer=("affine", 8, 64)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_twin(case):
    layer = make_layer(
        case.packing,
        len(case.counts),
        case.dims,
        case.activation,
        case.dtype,
        mlp=case.mlp,
        bias=case.bias,
        outer=case.outer,
    )
    x = tokens_of(12, case.dims[0], case.dtype)
    rows, ids = routed_rows(case.counts, tokens=12)
    run = ShimRunner(seed=len(ids))
    y = grouped_mlp_metal(
        layer.module, layer.planes, x, rows, ids, tile_rows=case.tile_rows, run=run
    )
    assert y.dtype == case.dtype
    assert run.findings == []
    assert error(y, layer.twin(x, rows, ids)) <= TOLERANCE[case.dtype]


@pytest.mark.parametrize("tile_rows", [16, 32, 64])
def test_shapes_at_random(tile_rows):
    """Odd sizes of everything; shapes are not compiled in, so many cost little."""
    rng, run = np.random.default_rng(tile_rows), ShimRunner()
    for _ in range(8):
        dims = tuple(rng.integers(8, 100, 2).tolist())
        counts = rng.integers(0, 2.5 * tile_rows, 5) * rng.integers(0, 2, 5)
        counts = [*counts.tolist(), 1]
        layer = make_layer(UNQUANTIZED, len(counts), dims, SwiGLU(), F32, bias=True)
        x = tokens_of(12, dims[0], F32)
        rows, ids = routed_rows(counts, tokens=12)
        y = grouped_mlp_metal(
            layer.module, layer.planes, x, rows, ids, tile_rows=tile_rows, run=run
        )
        assert run.findings == [], (dims, counts)
        assert error(y, layer.twin(x, rows, ids)) <= TOLERANCE[F32], (dims, counts)


def test_the_same_bits_in_any_order_of_threads():
    layer = make_layer(("affine", 4, 32), 4, (96, 64), SwiGLU(), BF16)
    x = tokens_of(12, 96, BF16)
    rows, ids = routed_rows(RAGGED, tokens=12)
    results = [
        as_float32(
            grouped_mlp_metal(layer.module, layer.planes, x, rows, ids, run=ShimRunner(seed=seed))
        )
        for seed in range(3)
    ]
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


ROUTINGS = [
    # experts, top_k, tokens, packing, dims
    (4, 1, 9, ("mxfp4", 4, 32), (32, 64)),
    (16, 2, 20, ("affine", 4, 32), (32, 32)),
    (128, 8, 6, ("affine", 4, 32), (32, 32)),
    (512, 10, 5, ("nvfp4", 4, 16), (32, 16)),
]


@pytest.mark.parametrize(
    ("experts", "top_k", "tokens", "packing", "dims"), ROUTINGS, ids=lambda v: str(v)
)
def test_routing_is_unsorted_and_combined(experts, top_k, tokens, packing, dims):
    """From the router's choice to [T, K, D], directly in place, and to the weighted sum [T, D]."""
    layer = make_layer(packing, experts, dims, SwiGLU(), F32)
    x, run = tokens_of(tokens, dims[0], F32), ShimRunner(seed=experts)
    choices, scores = routing(experts, top_k, tokens)
    order = np.argsort(choices.reshape(-1), kind="stable")
    ids = choices.reshape(-1)[order]

    placed = grouped_mlp_metal(
        layer.module, layer.planes, x, order // top_k, ids, places=order, run=run
    )
    expected = np.zeros((tokens * top_k, dims[0]), np.float32)
    expected[order] = as_float32(layer.twin(x, order // top_k, ids))
    assert error(placed, mx.array(expected)) <= TOLERANCE[F32]

    table = np.arange(tokens * top_k).reshape(tokens, top_k)
    combined = combine_metal(placed, table, mx.array(scores), run=run)
    weighted = (expected.reshape(tokens, top_k, -1) * scores[..., None]).sum(axis=1)
    assert error(combined, mx.array(weighted)) <= TOLERANCE[F32]
    assert run.findings == []


def test_layer_in_groups_adds_up():
    """Two read groups of a layer, each with part of every token's experts, in float32 sums."""
    tokens, top_k, dims = 7, 3, (64, 32)
    layer = make_layer(("affine", 4, 32), 8, dims, SwiGLU(), BF16)
    x, run = tokens_of(tokens, dims[0], BF16), ShimRunner()
    choices, scores = routing(8, top_k, tokens)
    total = None
    for group in (range(3), range(3, 8)):
        flat = np.flatnonzero(np.isin(choices.reshape(-1), group))
        flat = flat[np.argsort(choices.reshape(-1)[flat], kind="stable")]
        ids = choices.reshape(-1)[flat] - group.start
        planes = {key: plane[group.start : group.stop] for key, plane in layer.planes.items()}
        y = grouped_mlp_metal(layer.module, planes, x, flat // top_k, ids, run=run)
        table = place_table(flat, tokens, top_k)
        assert (table < 0).any(), "the case must have choices of the other group"
        total = combine_metal(y, table, mx.array(scores), total, dtype=F32, run=run)
    everything = np.arange(tokens * top_k)
    order = np.argsort(choices.reshape(-1), kind="stable")
    rows = as_float32(layer.twin(x, order // top_k, choices.reshape(-1)[order]))
    expected = np.zeros((tokens, dims[0]), np.float32)
    np.add.at(expected, everything[order] // top_k, rows * scores.reshape(-1)[order, None])
    assert total.dtype == F32
    assert error(total, mx.array(expected)) <= TOLERANCE[BF16]
    assert run.findings == []


def routing(experts, top_k, tokens):
    """Distinct experts of each token, and scores; the first token's row is reversed."""
    rng = np.random.default_rng(experts)
    choices = np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int32)
    return choices, rng.random((tokens, top_k), dtype=np.float32)


def test_no_rows_needs_no_launch():
    layer = make_layer(("affine", 4, 32), 4, (32, 32), SwiGLU(), F32)
    empty = np.zeros(0, np.int32)
    y = grouped_mlp_metal(layer.module, layer.planes, tokens_of(2, 32, F32), empty, empty, run=None)
    assert y.shape == (0, 32)


def test_scales_of_another_dtype_need_no_cast():
    """bfloat16 scales under float32 activations: read as they are stored."""
    layer = make_layer(("affine", 4, 32), 4, (32, 64), SwiGLU(), BF16, bias=True)
    x, run = tokens_of(5, 32, F32), ShimRunner()
    rows, ids = routed_rows(RAGGED, tokens=5)
    y = grouped_mlp_metal(layer.module, layer.planes, x, rows, ids, run=run)
    assert error(y, layer.twin(x, rows, ids)) <= TOLERANCE[F32]
    assert run.findings == []


def test_nvfp4_tensor_scale():
    """MLX's CPU has no tensor scale: the reference multiplies it in by its definition."""
    layer = make_layer(("nvfp4", 4, 16), 4, (32, 48), SwiGLU(), F32, bias=True)
    rng = np.random.default_rng(0)
    scale = {name: rng.uniform(2000, 3500, 4).astype(np.float32) for name in layer.names}
    planes = {**layer.planes, **{(n, "global_scale"): mx.array(s) for n, s in scale.items()}}
    x, run = tokens_of(9, 32, F32), ShimRunner()
    rows, ids = routed_rows(RAGGED, tokens=9)
    y = grouped_mlp_metal(layer.module, planes, x, rows, ids, run=run)

    factors = {name: s[ids, None] / np.float32(448 * 6) for name, s in scale.items()}
    expected = numpy_mlp(layer, as_float32(x)[rows], ids, factors)
    assert error(y, mx.array(expected)) <= TOLERANCE[F32]
    assert run.findings == []


@pytest.mark.parametrize(
    "packing",
    [("affine", 4, 64), ("affine", 8, 32), ("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)],
    ids=str,
)
def test_the_twin_is_dequantize_and_numpy(packing):
    layer = make_layer(packing, 4, (64, 128), SwiGLU(), F32, bias=True)
    x = tokens_of(9, 64, F32)
    rows, ids = routed_rows(RAGGED, tokens=9)
    one = dict.fromkeys(layer.names, np.float32(1))
    expected = numpy_mlp(layer, as_float32(x)[rows], ids, one)
    assert error(layer.twin(x, rows, ids), mx.array(expected)) <= TOLERANCE[F32]


def numpy_mlp(layer, x, ids, factors):
    """SwiGLU layer by mx.dequantize and float64 products; factors: on each product, ``[R, 1]``."""

    def project(name, inputs):
        linear = layer.module[name]
        parts = [layer.planes.get((name, part)) for part in ("weight", "scales", "biases")]
        weight = mx.dequantize(
            *parts, linear.group_size, linear.bits, mode=linear.mode, dtype=mx.float32
        )
        product = np.einsum("rk,rnk->rn", inputs, as_float32(weight)[ids].astype(np.float64))
        return product * factors[name] + as_float32(layer.planes[name, "bias"])[ids]

    gate, up = project("gate_proj", x), project("up_proj", x)
    return project("down_proj", gate / (1 + np.exp(-gate)) * up).astype(np.float32)


@pytest.mark.parametrize(
    ("packing", "dtype", "activation", "dims", "word"),
    [
        (("affine", 3, 64), "float32", SWIGLU, (64, 64), "3 bits"),
        (("affine", 4, 16), "float32", SWIGLU, (64, 64), "groups of 16"),
        (("mxfp4", 4, 64), "float32", SWIGLU, (64, 64), "mxfp4"),
        (("affine", 4, 64), "float64", SWIGLU, (64, 64), "float64"),
        (("affine", 4, 64), "float16", None, (64, 64), "activation"),
        (UNQUANTIZED, "float16", SWIGLU, (4, 64), "below 8"),
        (UNQUANTIZED, "float16", SWIGLU, (1 << 16, 1 << 16), "2^32"),
    ],
    ids=str,
)
def test_what_is_unsupported_has_a_reason(packing, dtype, activation, dims, word):
    ok, reason = supports(*packing, dtype, activation, dims)
    assert not ok
    assert word in reason


def test_a_module_is_supported_or_says_why():
    swiglu = SwiGLU()
    layer = make_layer(("affine", 4, 32), 4, (32, 32), swiglu, F32)
    code = kernel_activation(swiglu)
    assert supports_module(layer.module, (32, 32), "float16", code) == (True, "supported")
    layer.module.up_proj.bits = 8
    ok, reason = supports_module(layer.module, (32, 32), "float16", code)
    assert (ok, reason) == (False, "gate and up projections are quantized differently")
    mlp = make_layer(UNQUANTIZED, 4, (32, 32), nn.ReLU2(), F32, mlp=True)
    assert not supports_module(mlp.module, (32, 32), "float16", code)[0]


def test_every_code_of_every_format_is_exact():
    """x is the identity, so y is the transposed weight: bit-equal to mx.dequantize."""
    rng = np.random.default_rng(0)
    for packing in [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)]:
        mode, bits, group = packing
        layer = make_layer(packing, 1, (64, 64), nn.ReLU(), F32, mlp=True)
        weight = rng.permutation(np.arange(64 * 64 * bits // 8) % 256).astype(np.uint8)
        # Scales: all that are finite, small enough to keep products in float32's normal range.
        scales = (
            (np.arange(64 * 64 // group) % 126) if mode == "nvfp4" else rng.integers(90, 160, 128)
        )
        if mode == "mxfp8":  # 0x7f and 0xff are NaN
            weight[weight % 128 == 127] = 1
        layer.planes["fc2", "weight"] = mx.array(weight.view(np.uint32).reshape(1, 64, -1))
        layer.planes["fc2", "scales"] = mx.array(scales.astype(np.uint8).reshape(1, 64, -1))
        y = down_only(layer, mx.eye(64))
        expected = mx.dequantize(
            layer.planes["fc2", "weight"][0],
            layer.planes["fc2", "scales"][0],
            group_size=group,
            bits=bits,
            mode=mode,
            dtype=mx.float32,
        )
        np.testing.assert_array_equal(as_float32(y).T, as_float32(expected))


def down_only(layer, h):
    """expert_down alone on rows of one expert."""
    run = ShimRunner()
    tiles = mx.array(np.array([[0, 0, h.shape[0]]], np.int32))
    launch = down_launch(
        matrix_of(layer.module.fc2, layer.planes, "fc2"), "float32", h.shape[0], 1, 64, placed=False
    )
    weight, scales = layer.planes["fc2", "weight"], layer.planes["fc2", "scales"]
    unused = mx.zeros((2,))
    source = load_kernel("expert_down", "metal")
    (y,) = run(source, launch, [h, tiles, tiles, weight, scales, scales, unused, unused])
    assert run.findings == []
    return y
