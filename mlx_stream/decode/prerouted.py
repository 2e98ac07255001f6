"""The executor of a step whose routing is partly known before it begins.

Layers with a prediction compute the predicted experts with the predicted weights; what their own
router says is not even evaluated, unless the step is one of those that are checked. All others go
the exact path. Collects, without evaluating them, the inputs of the heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_stream.decode.exact import ExactExecutor
from mlx_stream.errors import CapabilityError
from mlx_stream.experts.deferred import DeferredExpertOutput
from mlx_stream.experts.streamed_experts import StreamedExperts
from mlx_stream.prerouter.router_maths import Values
from mlx_stream.prerouter.tracks import Prediction


class PreroutedExecutor:
    """One step after the other; :meth:`begin` each. Compute thread only.

    Args:
        owners: expert layers whose input is collected.
        consumers: expert layers that a prediction routes, in the order of its rows.
        teacher: collect the real router's experts, also where a prediction routed.
        on_host: the heads run in numpy.

    Attributes:
        real: layer -> lazy ``[..., K]``, the real router's experts, of predicted layers.
    """

    def __init__(
        self,
        exact: ExactExecutor,
        owners: tuple[int, ...],
        consumers: tuple[int, ...],
        *,
        teacher: bool,
        on_host: bool = False,
    ) -> None:
        self._exact = exact
        self._owners = owners
        self._rows: Mapping[int, int] = {layer: n for n, layer in enumerate(consumers)}
        self._teacher, self._on_host = teacher, on_host
        self._prediction: Prediction | None = None
        self._x: dict[int, mx.array] = {}
        self._ids: dict[int, Values] = {}
        self.real: dict[int, mx.array] = {}

    def begin(self, prediction: Prediction | None) -> None:
        """Of the step that comes; None routes every layer by itself."""
        self._prediction = prediction
        for collected in (self._x, self._ids, self.real):
            collected.clear()

    def collected(self) -> tuple[Values, Values]:
        """Inputs ``[H, D]`` and experts ``[H, K]`` of the owners, in their order."""
        join = np.concatenate if self._on_host else mx.concatenate
        x = join([self._x[n] for n in self._owners])
        ids = join([self._ids[n] for n in self._owners])
        return x.reshape(-1, x.shape[-1]), ids.reshape(-1, ids.shape[-1])

    def __call__(self, experts: StreamedExperts, x: mx.array, indices: mx.array) -> Any:
        layer = experts.mlp.layer.index
        row = self._rows.get(layer) if self._prediction is not None else None
        used: Values = indices
        if row is not None and self._prediction is not None:
            self.real[layer] = indices
            if not self._teacher:
                used = self._prediction.used_ids[row].reshape(indices.shape)
        if layer in self._owners:
            self._x[layer], self._ids[layer] = x, used
        if row is None:
            return self._exact(experts, x, indices)
        return self._predicted(experts, x, row)

    def _predicted(self, experts: StreamedExperts, x: mx.array, row: int) -> DeferredExpertOutput:
        """Stands for the experts' outputs until the block says that it wants their weighted sum."""
        assert self._prediction is not None
        prediction = self._prediction
        y = self._exact.given(experts, x, prediction.ids[row][None])  # [1, K, D]
        shape = (*x.shape[:-1], *y.shape[1:])

        def resolve(scores: mx.array | None) -> mx.array:
            if scores is None:
                raise CapabilityError(
                    "the block does not only sum its experts' weighted outputs",
                    tensor=experts.mlp.layer.name,
                    expected="what it did when the model was opened",
                    actual="it looked at single outputs",
                    remedy="run with --prerouter off, and report this model family",
                )
            weights = prediction.weights[row]
            if isinstance(weights, np.ndarray):
                mixed = weights @ np.array(y, copy=False)[0]
                return mx.array(mixed.reshape(*shape[:-2], -1)).astype(scores.dtype)
            mixed = (y * weights.astype(scores.dtype)[:, None]).sum(axis=-2)
            return mixed.reshape(*shape[:-2], -1)

        return DeferredExpertOutput(shape, y.dtype, resolve)
