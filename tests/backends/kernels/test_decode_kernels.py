"""expert_decode_up and expert_decode_down against the plain-ops twin, under the checker."""

from dataclasses import dataclass, field, replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.gemma4_text import GeGLU
from mlx_lm.models.switch_layers import SwiGLU

from mlx_stream.backends.kernels.activations import kernel_activation
from mlx_stream.backends.kernels.decode import DecodeLayer, decode_mlp_metal, slot_table
from mlx_stream.backends.kernels.launch import dtype_name
from mlx_stream.backends.kernels.weight_formats import matrix_of

from .running import (
    TOLERANCE,
    UNQUANTIZED,
    Packing,
    ShimRunner,
    as_float32,
    error,
    make_layer,
    packed_slots,
    tokens_of,
)

F32, F16, BF16 = mx.float32, mx.float16, mx.bfloat16


@dataclass(frozen=True)
class Case:
    """`floats`: dtype of the checkpoint's floats; the activations' if None."""

    packing: Packing
    dtype: mx.Dtype
    dims: tuple[int, int]
    experts: int = 6
    top_k: int = 3
    tokens: int = 2
    activation: object = field(default_factory=SwiGLU)
    combined: bool = True
    mlp: bool = False
    bias: bool = False
    floats: mx.Dtype | None = None

    def __str__(self):
        mode, bits, group = self.packing
        return f"{mode}{bits}g{group}-{self.dtype}-E{self.experts}K{self.top_k}T{self.tokens}"


CASES = [
    Case(("affine", 4, 32), F32, (96, 288), bias=True),
    Case(("affine", 4, 64), BF16, (320, 64), experts=16, top_k=8, tokens=1),
    Case(("affine", 4, 128), F16, (128, 256), combined=False),
    Case(("affine", 4, 64), F32, (64, 64), floats=BF16, bias=True),
    Case(("affine", 8, 32), F32, (32, 96), 6, 1, 8, nn.ReLU2(), mlp=True, combined=False),
    Case(("affine", 8, 64), F16, (64, 64), top_k=1, tokens=1),
    Case(("affine", 8, 128), BF16, (128, 128), bias=True),
    Case(("mxfp4", 4, 32), F32, (96, 32), activation=SwigluOAI(), bias=True),
    Case(("mxfp4", 4, 32), BF16, (64, 96), activation=SwigluOAI(), bias=True, combined=False),
    Case(("mxfp8", 8, 32), F32, (64, 32), activation=GeGLU(), tokens=8),
    Case(("mxfp4", 4, 32), F16, (32, 288), tokens=3),
    Case(("mxfp8", 8, 32), F16, (32, 64), top_k=5),
    Case(("mxfp8", 8, 32), BF16, (288, 32), combined=False),
    Case(("nvfp4", 4, 16), BF16, (48, 16), bias=True),
    Case(("nvfp4", 4, 16), F32, (48, 80), experts=512, top_k=10),
    Case(("nvfp4", 4, 16), F16, (80, 272), activation=nn.GELU(), mlp=True),
    Case(UNQUANTIZED, F32, (37, 29), bias=True),
    Case(UNQUANTIZED, BF16, (60, 44), combined=False),
    Case(UNQUANTIZED, F16, (260, 44), floats=BF16),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_twin(case):
    run_and_compare(case, ShimRunner(seed=case.top_k))


def run_and_compare(case, run):
    layer, choices, scores = scenario(case)
    x = tokens_of(case.tokens, case.dims[0], case.dtype)
    words, places = packed_slots(layer, sorted(set(choices.reshape(-1).tolist())))
    y = decode_mlp_metal(
        decode_layer(layer, case.floats or case.dtype),
        x,
        mx.array(choices),
        words,
        mx.array(slot_table(case.experts, places)),
        mx.array(scores) if case.combined else None,
        run=run,
    )
    assert run.findings == []
    assert (
        error(y, expected(layer, x, choices, scores if case.combined else None))
        <= (TOLERANCE[case.dtype])
    )


def test_shapes_at_random():
    """Odd sizes of everything; shapes are not compiled in, so many cost little."""
    rng = np.random.default_rng(0)
    for _ in range(10):
        dims = tuple(rng.integers(8, 300, 2).tolist())
        top_k, tokens = rng.integers(1, 5), rng.integers(1, 4)
        case = Case(UNQUANTIZED, F32, dims, top_k=int(top_k), tokens=int(tokens), bias=True)
        run_and_compare(case, ShimRunner())


def scenario(case):
    layer = make_layer(
        case.packing,
        case.experts,
        case.dims,
        case.activation,
        case.floats or case.dtype,
        mlp=case.mlp,
        bias=case.bias,
    )
    rng = np.random.default_rng(case.experts)
    choices = np.stack([rng.permutation(case.experts)[: case.top_k] for _ in range(case.tokens)])
    return layer, choices.astype(np.int32), rng.random(choices.shape, dtype=np.float32)


def decode_layer(layer, floats):
    inner, outer = (
        matrix_of(layer.module[n], layer.planes, n) for n in (layer.names[0], layer.names[-1])
    )
    activation = kernel_activation(layer.module.activation)
    return DecodeLayer(inner, outer, activation, dtype_name(floats))


def expected(layer, x, choices, scores):
    """The twin's rows, un-sorted and, with scores, summed in numpy."""
    tokens, top_k = choices.shape
    order = np.argsort(choices.reshape(-1), kind="stable")
    rows = np.zeros((tokens * top_k, layer.dims[0]), np.float32)
    rows[order] = as_float32(layer.twin(x, order // top_k, choices.reshape(-1)[order]))
    rows = rows.reshape(tokens, top_k, -1)
    return mx.array(rows if scores is None else (rows * scores[..., None]).sum(axis=1))


@pytest.mark.parametrize("combined", [True, False])
def test_an_absent_expert_is_loud(combined):
    """NaN for the token that needs it, whatever the activation clamps; others are right."""
    case = Case(("mxfp4", 4, 32), F32, (32, 32), activation=SwigluOAI(), combined=combined)
    layer, _, scores = scenario(case)
    choices = np.array([[0, 1, 2], [1, 5, 0]], np.int32)
    words, places = packed_slots(layer, [0, 1, 2])
    x, run = tokens_of(2, 32, F32), ShimRunner()
    y = decode_mlp_metal(
        decode_layer(layer, F32),
        x,
        mx.array(choices),
        words,
        mx.array(slot_table(6, places)),
        mx.array(scores) if combined else None,
        run=run,
    )
    assert run.findings == []
    want = as_float32(expected(layer, x, choices, scores if combined else None))
    want[(1,) if combined else (1, 1)] = np.nan
    np.testing.assert_allclose(as_float32(y), want, rtol=1e-4, atol=1e-5)


def test_nvfp4_tensor_scale():
    """One scale for all experts' gate, up and down is the same as that many times the weights."""
    case = Case(("nvfp4", 4, 16), F32, (32, 32), activation=nn.ReLU(), mlp=True)
    layer, choices, scores = scenario(case)
    factor = np.float32(0.5)
    x, run = tokens_of(2, 32, F32), ShimRunner()
    scaled = replace(layer, planes=dict(layer.planes))
    for name in layer.names:
        scaled.planes[name, "global_scale"] = mx.full((6,), float(factor * 448 * 6))
    words, places = packed_slots(scaled, range(6))
    y = decode_mlp_metal(
        decode_layer(scaled, F32),
        x,
        mx.array(choices),
        words,
        mx.array(slot_table(6, places)),
        mx.array(scores),
        run=run,
    )
    assert run.findings == []
    want = as_float32(expected(layer, x, choices, scores)) * factor**2  # ReLU is homogeneous
    assert error(y, mx.array(want)) <= TOLERANCE[F32]
