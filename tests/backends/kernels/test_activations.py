"""Every activation in the kernel against mlx-lm's own module, over a wide range of inputs."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models.activations import SwigluOAI
from mlx_lm.models.deepseek_v41 import DeepseekV41SwiGLU
from mlx_lm.models.gemma4_text import GeGLU
from mlx_lm.models.kimi_k3 import SiTU
from mlx_lm.models.muse_spark import PreciseSwiGLU
from mlx_lm.models.step3p5 import ClampedSwiGLU
from mlx_lm.models.switch_layers import SwiGLU

from mlx_stream.backends.kernels.activations import GEGLU_ERF, kernel_activation
from mlx_stream.backends.kernels.grouped import gate_up_launch
from mlx_stream.backends.kernels.source import load_kernel
from mlx_stream.backends.kernels.weight_formats import Matrix, weight_format

from .running import ShimRunner, as_float32

GATED = [
    SwiGLU(),
    PreciseSwiGLU(),
    SwigluOAI(),
    SwigluOAI(1.2, 3.0),
    DeepseekV41SwiGLU(2.5),
    DeepseekV41SwiGLU(0.0),
    ClampedSwiGLU(2.5),
    GeGLU(),
    SiTU(),
    SiTU(1.5, 4.0),
]
PLAIN = [
    nn.GELU(),
    nn.GELU(approx="precise"),
    nn.GELU(approx="fast"),
    nn.SiLU(),
    nn.ReLU(),
    nn.ReLU2(),
]
ACCURACY = 1e-6  # relative to the product of the inputs, plus one


@pytest.mark.parametrize("module", GATED, ids=lambda m: type(m).__name__)
def test_gated(module):
    check(kernel_activation(module), module)


@pytest.mark.parametrize("module", PLAIN, ids=lambda m: type(m).__name__)
def test_plain(module):
    check(kernel_activation(module), lambda up, gate: module(gate))


def test_gelu_gated_by_erf():
    """No module of mlx-lm has it under a name of its own."""
    check(GEGLU_ERF, lambda up, gate: nn.gelu(gate) * up)


def test_an_unknown_formula_is_not_believed_by_its_name():
    class SwiGLU(nn.Module):
        def __call__(self, x, gate):
            return x * mx.sigmoid(gate)

    class Unheard(nn.Module):
        def __call__(self, x, gate):
            return x * gate

    assert kernel_activation(SwiGLU()) is None
    assert kernel_activation(Unheard()) is None


def check(activation, reference):
    """Identity matrices, so that gate and up are x and x reversed: the activation alone."""
    size = 64
    spread = np.array([0.01, 0.3, 1, 2, 4, 8, 20, 60, 200], np.float32)
    x = spread[:, None] * np.linspace(-1, 1, size, dtype=np.float32)
    x[:, 5] = 0
    gate, up = mx.eye(size)[None], mx.eye(size)[None, ::-1]
    matrix = Matrix(weight_format("none", 0, 0), size, size, biased=False, tensor_scaled=False)
    constants = mx.array([activation.a, activation.b], dtype=mx.float32)
    tiles = mx.array(np.array([[0, 0, 9]], np.int32))
    run = ShimRunner()
    weights = [gate, gate, gate, constants, constants, up, up, up, constants, constants]
    (h,) = run(
        load_kernel("expert_gate_up", "metal"),
        gate_up_launch(matrix, activation, "float32", 9, 1, 16),
        [mx.array(x), mx.arange(9, dtype=mx.int32), tiles, constants, *weights],
    )
    assert run.findings == []
    reversed_x = np.ascontiguousarray(x[:, ::-1])
    expected = as_float32(reference(mx.array(reversed_x), mx.array(x)))
    scale = 1 + np.abs(x) * (np.abs(reversed_x) if activation.gated else 1)
    assert np.isfinite(as_float32(h)).all()
    assert (np.abs(as_float32(h) - expected) / scale).max() <= ACCURACY
