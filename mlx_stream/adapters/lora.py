"""``y = W(x) + s ((x A^T) B^T)`` beside a linear layer, for the adapter in force.

The base layer is not touched: with no adapter in force the output is its output. Why adapters are
not merged: most of a small delta is lost when the sum is quantized again (tests/adapters has the
numbers).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn


@dataclass
class InForce:
    """Which adapter is in force in one model; its linear layers all look here."""

    name: str | None = None


class LowRankPath:
    """One adapter's way around one linear layer.

    Args:
        down, up: linear maps by their `weight` A ``[r, in]`` and B ``[out, r]``, in `dtype`.
    """

    def __init__(self, down: nn.Module, up: nn.Module, scale: float, dtype: mx.Dtype) -> None:
        self._down, self._up = down, up
        self._a, self._b = down.weight.T, up.weight.T
        self._scale, self._dtype = scale, dtype

    def add_to(self, y: mx.array, x: mx.array) -> mx.array:
        """``y + s ((x A^T) B^T)`` in y's dtype; x: [..., in], y: [..., out]. One row stays lazy."""
        x = x.astype(self._dtype)
        if x.size == x.shape[-1] and y.dtype == self._dtype:
            return mx.addmm(y, self._scaled(x @ self._a), self._b)
        return y + self._up(self._scaled(self._down(x))).astype(y.dtype)

    def _scaled(self, low: mx.array) -> mx.array:
        return low if self._scale == 1.0 else self._scale * low


class AdaptedLinear(nn.Module):
    """A linear layer with the paths of several adapters; the original is its child `inner`.

    The original's weights are not readable on it: a model that used them without calling the layer
    would silently run without its adapter.
    """

    def __init__(self, inner: nn.Module, in_force: InForce) -> None:
        super().__init__()
        self.inner = inner
        self._in_force = in_force
        self._paths = _Paths()

    @property
    def paths(self) -> dict[str, LowRankPath]:
        """By the adapter's name. Not part of the module tree: parameters are the base's."""
        return self._paths.by_name

    def __call__(self, x: mx.array, *args: Any) -> mx.array:
        """x: [..., in] -> [..., out]."""
        y = self.inner(x, *args)
        path = self._paths.by_name.get(self._in_force.name) if self._in_force.name else None
        return y if path is None else path.add_to(y, x)


class _Paths:
    """Hides a dictionary from mlx, which would take it for children."""

    def __init__(self) -> None:
        self.by_name: dict[str, LowRankPath] = {}
