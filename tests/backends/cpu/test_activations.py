"""Numpy twins of the expert activations against mlx-lm's modules."""

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.models import activations as lm_activations
from mlx_lm.models import deepseek_v41, gemma4_text, kimi_k3, muse_spark, step3p5
from mlx_lm.models.switch_layers import SwiGLU

from mlx_stream.backends.cpu.activations import BLOCK, resolve_activation

GLU = [
    SwiGLU(),
    muse_spark.PreciseSwiGLU(),
    step3p5.ClampedSwiGLU(7.0),
    deepseek_v41.DeepseekV41SwiGLU(10.0),
    deepseek_v41.DeepseekV41SwiGLU(0.0),
    lm_activations.SwigluOAI(),
    lm_activations.SwigluOAI(1.5, 4.0),
    kimi_k3.SiTU(),
    kimi_k3.SiTU(2.0, 30.0),
    gemma4_text.GeGLU(),
]
MLP = [nn.GELU(), nn.GELU("precise"), nn.GELU("fast"), nn.SiLU(), nn.ReLU(), nn.ReLU2()]


def sample(shape, spread, seed):
    return (spread * np.random.default_rng(seed).standard_normal(shape)).astype(np.float32)


@pytest.mark.parametrize("spread", [0.5, 5.0, 100.0])
@pytest.mark.parametrize("module", [*GLU, *MLP], ids=lambda module: type(module).__name__)
def test_twin_agrees(module, spread):
    twin = resolve_activation(module)
    assert twin is not None
    arity = 2 if any(module is glu for glu in GLU) else 1  # modules are dicts: == is no identity
    shape = (5, BLOCK // 4 + 3)  # more than one block, the last one partial
    inputs = [sample(shape, spread, seed) for seed in range(arity)]
    expected = np.array(module(*(mx.array(array) for array in inputs)))
    actual = twin(*inputs)
    size = np.abs(np.prod(inputs, axis=0))
    assert np.all(np.abs(actual - expected) <= 1e-5 * np.maximum(np.abs(expected), 0.1 * size))
    for target in inputs:  # the output may be any of the inputs
        copies = [array.copy() for array in inputs]
        place = copies[[array is target for array in inputs].index(True)]
        assert twin(*copies, out=place) is place
        np.testing.assert_array_equal(place, actual)


def test_no_warnings_at_the_extremes():
    extremes = np.array([-3e38, -1e4, -100, -0.0, 0.0, 100, 1e4], np.float32)
    with np.errstate(all="raise", under="ignore"):
        result = resolve_activation(SwiGLU())(np.ones_like(extremes), extremes)
    np.testing.assert_array_equal(result[-2:], [100, 1e4])
    assert not np.isnan(result).any()


def test_strided_inputs_and_empty():
    twin = resolve_activation(SwiGLU())
    up, gate = sample((6, 40), 1, 0), sample((6, 40), 1, 1)
    np.testing.assert_array_equal(twin(up[:, ::2], gate[:, ::2]), twin(up, gate)[:, ::2])
    out = np.zeros((40, 6), np.float32)
    twin(up, gate, out=out.T)
    np.testing.assert_array_equal(out.T, twin(up, gate))
    assert twin(up[:0], gate[:0]).shape == (0, 40)


def test_unknown_class_has_no_twin():
    assert resolve_activation(nn.Tanh()) is None


def test_a_class_whose_formula_changed_has_no_twin():
    class SwiGLU(nn.Module):
        def __call__(self, x, gate):
            return nn.silu(gate) * (x + 1)

    assert resolve_activation(SwiGLU()) is None
