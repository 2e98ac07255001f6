"""Expert outputs that are combined where they are computed.

mlx-lm's MoE blocks reduce the experts' outputs right after the switch layer, nearly all of them as
``(y * scores[..., None]).sum(axis=-2)``. Handing such a block a real ``y`` costs ``[T, K, D]``
floats for the whole prompt when a layer arrives in groups. :class:`DeferredExpertOutput` stands in
for ``y``: it lets the block say the scores, and only then asks for the weighted sum ``[T, D]``.
Anything else that is done to it turns it into the real array.

Whether a block can be served so is found out and checked at load time (see combine_probe).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import mlx.core as mx

Resolve = Callable[[mx.array | None], mx.array]


class DeferredExpertOutput:
    """Stands for ``y = experts(x, indices)`` of shape ``[..., K, D]``.

    Args:
        shape: the shape that the real array would have.
        dtype: its dtype.
        resolve: called once; with scores ``[..., K]`` it returns ``[..., D]``, with None the
            real ``[..., K, D]``.
    """

    def __init__(self, shape: tuple[int, ...], dtype: mx.Dtype, resolve: Resolve) -> None:
        self.shape = shape
        self.dtype = dtype
        self._resolve = resolve
        self._real: mx.array | None = None

    @property
    def ndim(self) -> int:
        """Number of axes of the real array."""
        return len(self.shape)

    def materialize(self) -> mx.array:
        """The real ``[..., K, D]`` array."""
        if self._real is None:
            self._real = self._resolve(None)
        return self._real

    def __mul__(self, other: Any) -> Any:
        scores = _as_scores(other, self.shape)
        if scores is None:
            return self.materialize() * other
        return _Weighted(self, other, scores)

    def __rmul__(self, other: Any) -> Any:
        return self.__mul__(other)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.materialize(), name)

    def __getitem__(self, key: Any) -> mx.array:
        return self.materialize()[key]

    def __add__(self, other: Any) -> mx.array:
        return self.materialize() + other

    def __radd__(self, other: Any) -> mx.array:
        return other + self.materialize()


class _Weighted:
    """``y * scores[..., None]``, waiting for the sum over K."""

    def __init__(self, output: DeferredExpertOutput, factor: mx.array, scores: mx.array) -> None:
        self._output = output
        self._factor = factor
        self._scores = scores
        self.shape = output.shape
        self.ndim = output.ndim
        self.dtype = _promote(output.dtype, scores.dtype)

    def materialize(self) -> mx.array:
        return self._output.materialize() * self._factor

    def sum(self, axis: Any = None, keepdims: bool = False, **kwargs: Any) -> mx.array:
        if kwargs or keepdims or axis not in (-2, self.ndim - 2):
            return self.materialize().sum(axis=axis, keepdims=keepdims, **kwargs)
        return self._output._resolve(self._scores).astype(self.dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.materialize(), name)

    def __add__(self, other: Any) -> mx.array:
        return self.materialize() + other

    def __mul__(self, other: Any) -> mx.array:
        return self.materialize() * other


@cache
def _promote(a: mx.Dtype, b: mx.Dtype) -> mx.Dtype:
    return (mx.zeros(0, dtype=a) * mx.zeros(0, dtype=b)).dtype


def _as_scores(other: Any, shape: tuple[int, ...]) -> mx.array | None:
    """``scores [..., K]`` when `other` is ``scores[..., None]``, else None."""
    if isinstance(other, mx.array) and tuple(other.shape) == (*shape[:-1], 1):
        return other.squeeze(-1)
    return None
