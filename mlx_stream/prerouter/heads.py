"""The heads themselves: all of a step in one batched computation.

``logits = W_lin x + W_fc2 gelu(W_fc1 x)`` with the exact erf GELU, where ``x`` is, in this order,
the owner layer's MoE input ``[D]``, the multi-hot of this token's experts there ``[E]`` and that
of the token before ``[E]``.

Stored in float16 as published. Computed in float16 where a GPU computes, and in float32 on the CPU
backend, whose activations are float32 too; the logits are float32 in both cases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from mlx_stream.prerouter.head_file import HeadFile
from mlx_stream.prerouter.router_maths import Values


def multi_hot(ids: mx.array, experts: int, dtype: mx.Dtype) -> mx.array:
    """``[H, K] -> [H, E]``: a one for every expert named; ids below 0 name none."""
    return (ids[..., None] == mx.arange(experts)).sum(axis=-2).astype(dtype)


class Heads:
    """The heads of several owner layers, stacked. H: their number, in the order of `owners`.

    Attributes:
        hidden: D.
        experts: E.
        nbytes: of the weights in memory.
        on_host: :meth:`logits` computes in numpy, so its inputs should be evaluated.
    """

    def __init__(self, inner: mx.array, outer: mx.array, hidden: int) -> None:
        """Take ownership of evaluated weights.

        Args:
            inner: ``[H, F, R + E]``, fc1 beside linear_init.
            outer: ``[H, R, E]``, fc2.
            hidden: D.
        """
        self._inner, self._outer = inner, outer
        self.hidden = hidden
        self.experts = outer.shape[2]
        self.nbytes = inner.nbytes + outer.nbytes
        self.on_host = inner.dtype == mx.float32
        if self.on_host:
            self._views = np.array(inner, copy=False), np.array(outer, copy=False)
            self._rows = np.arange(len(inner))[:, None]

    @classmethod
    def load(cls, file: HeadFile, owners: Sequence[int], dtype: mx.Dtype) -> Heads:
        """Read the heads of `owners` into memory.

        Raises:
            CheckpointError: as :meth:`HeadFile.read`.
        """
        width, experts, inputs = file.width, file.experts, file.inputs
        place = {owner: n for n, owner in enumerate(owners)}
        inner = mx.zeros((len(owners), inputs, width + experts), dtype=dtype)
        outer = mx.zeros((len(owners), width, experts), dtype=dtype)
        mx.eval(inner, outer)
        # Filled in place, so that no second copy exists on the way.
        first, second = np.array(inner, copy=False), np.array(outer, copy=False)
        for owner, part, values in file.read(owners):
            n = place[owner]
            target = second[n] if part == "fc2" else first[n]
            if part != "fc2":
                target = target[:, :width] if part == "fc1" else target[:, width:]
            target[...] = values.T
        return cls(inner, outer, inputs - 2 * experts)

    @staticmethod
    def planned_nbytes(file: HeadFile, heads: int, dtype: mx.Dtype) -> int:
        """Bytes that :meth:`load` will hold."""
        inner = (file.width + file.experts) * file.inputs
        return heads * (inner + file.experts * file.width) * dtype.size

    def logits(self, x: Values, current: Values, previous: Values | None) -> Values:
        """Float32 logits ``[H, E]`` of the layers after the owners, for the next token.

        Lazy on a device, numpy's on the host.

        Args:
            x: ``[H, D]`` MoE inputs of the owners.
            current, previous: ``[H, K]`` expert ids there; previous None is no token.
        """
        if self.on_host:
            return self._on_host(x, current, previous)
        dtype = self._inner.dtype
        hot = multi_hot(current, self.experts, dtype)
        before = mx.zeros_like(hot)
        if previous is not None:
            before = multi_hot(previous, self.experts, dtype)
        features = mx.concatenate([x.astype(dtype), hot, before], axis=-1)  # [H, F]
        both = (features[:, None] @ self._inner)[:, 0]  # [H, R + E]
        width = self._outer.shape[1]
        h = both[:, :width]
        h = h * (1 + mx.erf(h * 0.5**0.5)) / 2  # the exact GELU; nn.gelu is compiled at first use
        out = (h[:, None] @ self._outer)[:, 0]
        return (both[:, width:] + out).astype(mx.float32)

    def _on_host(self, x: Values, current: Values, previous: Values | None) -> np.ndarray:
        """The same in numpy: MLX's products on a CPU take ten times as long."""
        inner, outer = self._views
        features = np.zeros((len(inner), 1, inner.shape[1]), np.float32)
        features[:, 0, : self.hidden] = np.array(x, copy=False)
        for n, ids in enumerate((current, previous)):
            if ids is not None:
                features[self._rows, 0, np.array(ids) + (self.hidden + n * self.experts)] = 1
        both = np.matmul(features, inner)
        width = outer.shape[1]
        h = both[..., :width]
        tail = map(math.erf, (h * np.float32(0.5**0.5)).ravel().tolist())
        h = h * (1 + np.fromiter(tail, np.float32, h.size).reshape(h.shape)) / 2
        return (both[..., width:] + np.matmul(h, outer))[:, 0]
