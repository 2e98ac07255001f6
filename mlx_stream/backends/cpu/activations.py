"""Numpy twins of the expert activations of mlx-lm, checked against the module at load time.

A twin exists per class name; one that disagrees with its module on a sample (a newer mlx-lm
changed the formula) is not used. exp is the hot part, so blocks stay in cache and no temporaries
are made besides one per-call scratch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

BLOCK = 1 << 14  # elements per pass: three float32 streams stay in L2
TOLERANCE = 1e-5

Kernel = Callable[..., None]  # (inputs..., out, scratch), all flat float32 of one size
Activation = Callable[..., np.ndarray]


def resolve_activation(module: Any) -> Activation | None:
    """The numpy twin of an expert activation, or None if there is none that agrees.

    A GLU twin is called fn(up, gate, out=None), an MLP twin fn(x, out=None); float32, any shape,
    out may be an input. Touches MLX (the check), so call it where the model was loaded.
    """
    builder = _BUILDERS.get(type(module).__name__)
    if builder is None:
        return None
    kernel, arity = builder(module)
    twin = _blocked(kernel, arity)
    return twin if _agrees(twin, module, arity) else None


def _agrees(twin: Activation, module: Any, arity: int) -> bool:
    rng = np.random.default_rng(0)
    spread = np.array([[0.1], [1.0], [4.0], [30.0]])
    sample = [(spread * rng.standard_normal((4, 256))).astype(np.float32) for _ in range(arity)]
    expected = np.array(module(*(mx.array(part) for part in sample)).astype(mx.float32))
    actual = twin(*sample)
    # In the tails 1 + tanh and 1 + erf cancel, in MLX as here: errors there count against 10%
    # of the product of the inputs.
    scale = np.maximum(np.abs(expected), 0.1 * np.abs(np.prod(sample, axis=0)) + 0.01)
    return bool(np.all(np.abs(actual - expected) <= TOLERANCE * scale))


def _blocked(kernel: Kernel, arity: int) -> Activation:
    """Wrap a flat kernel: contiguous arrays of any shape, block by block."""

    def apply(*args: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        inputs, target = args[:arity], out if out is not None else np.empty_like(args[0])
        if not all(array.flags.c_contiguous for array in (*inputs, target)):
            np.copyto(target, apply(*(np.ascontiguousarray(array) for array in inputs)))
            return target
        flat = [array.reshape(-1) for array in inputs]
        flat_out = target.reshape(-1)
        scratch = np.empty((2, min(BLOCK, flat_out.size)), np.float32)
        with np.errstate(over="ignore"):  # exp(-x) = inf gives the right limit, 0
            for start in range(0, flat_out.size, BLOCK):
                part = slice(start, start + BLOCK)
                result = flat_out[part]
                kernel(*(array[part] for array in flat), result, scratch[:, : result.size])
        return target

    return apply


def _silu(x: np.ndarray, scratch: np.ndarray) -> None:
    """scratch = x * sigmoid(x)."""
    _one_plus_exp(x, -1.0, scratch)
    np.divide(x, scratch, out=scratch)


def _one_plus_exp(x: np.ndarray, factor: float, out: np.ndarray) -> None:
    """out = 1 + exp(factor * x)."""
    np.multiply(x, np.float32(factor), out=out)
    np.exp(out, out=out)
    np.add(out, np.float32(1), out=out)


def _swiglu(_: Any) -> tuple[Kernel, int]:
    def kernel(up: np.ndarray, gate: np.ndarray, out: np.ndarray, scratch: np.ndarray) -> None:
        _silu(gate, scratch[0])
        np.multiply(scratch[0], up, out=out)

    return kernel, 2


def _clamp_after_silu(module: Any) -> tuple[Kernel, int]:
    limit = np.float32(module.limit)

    def kernel(up: np.ndarray, gate: np.ndarray, out: np.ndarray, scratch: np.ndarray) -> None:
        _silu(gate, scratch[0])
        np.minimum(scratch[0], limit, out=scratch[0])
        np.clip(up, -limit, limit, out=out)
        np.multiply(out, scratch[0], out=out)

    return kernel, 2


def _clamp_before_silu(module: Any) -> tuple[Kernel, int]:
    limit = np.float32(module.limit)
    if limit <= 0:
        return _swiglu(module)

    def kernel(up: np.ndarray, gate: np.ndarray, out: np.ndarray, scratch: np.ndarray) -> None:
        np.minimum(gate, limit, out=scratch[0])
        _silu(scratch[0], scratch[1])
        np.clip(up, -limit, limit, out=out)
        np.multiply(out, scratch[1], out=out)

    return kernel, 2


def _swiglu_oai(module: Any) -> tuple[Kernel, int]:
    alpha, limit = float(module._alpha), np.float32(module._limit)

    def kernel(up: np.ndarray, gate: np.ndarray, out: np.ndarray, scratch: np.ndarray) -> None:
        np.minimum(gate, limit, out=scratch[0])
        _one_plus_exp(scratch[0], -alpha, scratch[1])
        np.divide(scratch[0], scratch[1], out=scratch[0])
        np.clip(up, -limit, limit, out=out)
        np.add(out, np.float32(1), out=out)
        np.multiply(out, scratch[0], out=out)

    return kernel, 2


def _situ(module: Any) -> tuple[Kernel, int]:
    beta, linear_beta = np.float32(module.beta), module.linear_beta

    def kernel(up: np.ndarray, gate: np.ndarray, out: np.ndarray, scratch: np.ndarray) -> None:
        _one_plus_exp(gate, -1.0, scratch[0])
        np.multiply(gate, 1 / beta, out=scratch[1])
        np.tanh(scratch[1], out=scratch[1])
        np.divide(scratch[1], scratch[0], out=scratch[0])
        np.multiply(scratch[0], beta, out=scratch[0])
        if linear_beta is None:
            np.multiply(up, scratch[0], out=out)
            return
        np.multiply(up, np.float32(1 / linear_beta), out=out)
        np.tanh(out, out=out)
        np.multiply(out, scratch[0], out=out)
        np.multiply(out, np.float32(linear_beta), out=out)

    return kernel, 2


def _gelu_tanh(x: np.ndarray, out: np.ndarray, scratch: np.ndarray) -> None:
    """out = x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) / 2. out may be x; scratch may not."""
    np.multiply(x, x, out=scratch)
    np.multiply(scratch, np.float32(0.044715), out=scratch)
    np.add(scratch, np.float32(1), out=scratch)
    np.multiply(scratch, x, out=scratch)
    np.multiply(scratch, np.float32(math.sqrt(2 / math.pi)), out=scratch)
    np.tanh(scratch, out=scratch)
    np.add(scratch, np.float32(1), out=scratch)
    np.multiply(scratch, x, out=scratch)
    np.multiply(scratch, np.float32(0.5), out=out)


def _geglu(_: Any) -> tuple[Kernel, int]:
    def kernel(up: np.ndarray, gate: np.ndarray, out: np.ndarray, scratch: np.ndarray) -> None:
        _gelu_tanh(gate, scratch[0], scratch[1])
        np.multiply(scratch[0], up, out=out)

    return kernel, 2


# Abramowitz and Stegun 7.1.26: |error of erf| <= 1.5e-7.
_ERF = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def _gelu_exact(x: np.ndarray, out: np.ndarray, scratch: np.ndarray) -> None:
    """out = x (1 + erf(x / sqrt 2)) / 2."""
    t, tail = scratch
    np.abs(x, out=t)
    np.multiply(t, np.float32(0.3275911 / math.sqrt(2)), out=t)
    np.add(t, np.float32(1), out=t)
    np.reciprocal(t, out=t)
    np.multiply(t, np.float32(_ERF[0]), out=tail)
    for coefficient in _ERF[1:]:
        np.add(tail, np.float32(coefficient), out=tail)
        np.multiply(tail, t, out=tail)
    np.multiply(x, x, out=t)
    np.multiply(t, np.float32(-0.5), out=t)
    np.exp(t, out=t)
    np.multiply(tail, t, out=tail)  # 1 - erf(|x| / sqrt 2)
    np.abs(x, out=t)
    np.multiply(tail, t, out=tail)
    np.multiply(tail, np.float32(0.5), out=tail)
    np.maximum(x, np.float32(0), out=out)  # x for x > 0, where the tail is subtracted
    np.subtract(out, tail, out=out)


def _gelu(module: Any) -> tuple[Kernel, int]:
    if module._approx == "none":
        return _gelu_exact, 1
    if module._approx == "fast":

        def fast(x: np.ndarray, out: np.ndarray, scratch: np.ndarray) -> None:
            _one_plus_exp(x, -1.702, scratch[0])
            np.divide(x, scratch[0], out=out)

        return fast, 1

    def precise(x: np.ndarray, out: np.ndarray, scratch: np.ndarray) -> None:
        _gelu_tanh(x, out, scratch[0])

    return precise, 1


def _silu_mlp(_: Any) -> tuple[Kernel, int]:
    def kernel(x: np.ndarray, out: np.ndarray, scratch: np.ndarray) -> None:
        _silu(x, scratch[0])
        np.copyto(out, scratch[0])

    return kernel, 1


def _relu(_: Any) -> tuple[Kernel, int]:
    return lambda x, out, scratch: np.maximum(x, np.float32(0), out=out), 1


def _relu2(_: Any) -> tuple[Kernel, int]:
    def kernel(x: np.ndarray, out: np.ndarray, scratch: np.ndarray) -> None:
        np.maximum(x, np.float32(0), out=out)
        np.multiply(out, out, out=out)

    return kernel, 1


_BUILDERS: dict[str, Callable[[Any], tuple[Kernel, int]]] = {
    "SwiGLU": _swiglu,
    "PreciseSwiGLU": _swiglu,
    "ClampedSwiGLU": _clamp_after_silu,
    "DeepseekV41SwiGLU": _clamp_before_silu,
    "SwigluOAI": _swiglu_oai,
    "SiTU": _situ,
    "GeGLU": _geglu,
    "GELU": _gelu,
    "SiLU": _silu_mlp,
    "ReLU": _relu,
    "ReLU2": _relu2,
}
