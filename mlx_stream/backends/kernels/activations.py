"""The expert activations that the kernels compute: which mlx-lm module is which code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mlx_stream.backends.cpu.activations import resolve_activation


@dataclass(frozen=True)
class KernelActivation:
    """`code` is the Activation of ``metal/activations.h``; a and b are its constants."""

    code: int
    gated: bool
    a: float = 0.0
    b: float = 0.0


SWIGLU = KernelActivation(0, gated=True)
GEGLU_TANH = KernelActivation(4, gated=True)
GEGLU_ERF = KernelActivation(5, gated=True)
GELU_TANH = KernelActivation(16, gated=False)
GELU_ERF = KernelActivation(17, gated=False)
GELU_SIGMOID = KernelActivation(18, gated=False)
SILU = KernelActivation(19, gated=False)
RELU = KernelActivation(20, gated=False)
RELU_SQUARED = KernelActivation(21, gated=False)


def swiglu_oai(alpha: float, limit: float) -> KernelActivation:
    """gpt-oss: the gate clamped from above, 1 added to the clamped linear part."""
    return KernelActivation(1, gated=True, a=alpha, b=limit)


def clamp_before(limit: float) -> KernelActivation:
    """DeepSeek: both parts clamped before SiLU; a limit of zero means none."""
    return KernelActivation(2, gated=True, b=limit) if limit > 0 else SWIGLU


def clamp_after(limit: float) -> KernelActivation:
    """Step: SiLU's result is clamped."""
    return KernelActivation(3, gated=True, b=limit)


def situ(beta: float, linear_beta: float | None) -> KernelActivation:
    """Kimi: tanh-limited gate and, if given, linear part."""
    return KernelActivation(6, gated=True, a=beta, b=linear_beta or 0.0)


_GELUS = {"none": GELU_ERF, "precise": GELU_TANH, "tanh": GELU_TANH, "fast": GELU_SIGMOID}
_BY_CLASS: dict[str, Callable[[Any], KernelActivation]] = {
    "SwiGLU": lambda _: SWIGLU,
    "PreciseSwiGLU": lambda _: SWIGLU,
    "SwigluOAI": lambda m: swiglu_oai(m._alpha, m._limit),
    "DeepseekV41SwiGLU": lambda m: clamp_before(m.limit),
    "ClampedSwiGLU": lambda m: clamp_after(m.limit),
    "SiTU": lambda m: situ(m.beta, m.linear_beta),
    "GeGLU": lambda _: GEGLU_TANH,
    "GELU": lambda m: _GELUS[m._approx],
    "SiLU": lambda _: SILU,
    "ReLU": lambda _: RELU,
    "ReLU2": lambda _: RELU_SQUARED,
}


def kernel_activation(module: Any) -> KernelActivation | None:
    """The code of an expert activation module, None if the kernels do not have it.

    The class name alone is not believed: the module must agree with the formula on a sample, as
    the numpy twin of that name does. Evaluates a few arrays, so call it once a layer.
    """
    build = _BY_CLASS.get(type(module).__name__)
    return build(module) if build is not None and resolve_activation(module) is not None else None
