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
from mlx_stream.prerouter.tracks import Prediction


class PreroutedExecutor:
    """One step after the other; :meth:`begin` each. Compute thread only.

    Args:
        owners: expert layers whose input is collected.
        consumers: expert layers that a prediction routes, in the order of its rows.
        teacher: collect the real router's experts, also where a prediction routed.

    Attributes:
        x: layer -> lazy ``[1, D]``, of the owners that ran.
        ids: layer -> lazy ``[1, K]``, their experts.
        real: layer -> lazy ``[1, K]``, the real router's experts, of predicted layers.
    """

    def __init__(
        self,
        exact: ExactExecutor,
        owners: tuple[int, ...],
        consumers: tuple[int, ...],
        *,
        teacher: bool,
    ) -> None:
        self._exact = exact
        self._owners = frozenset(owners)
        self._rows: Mapping[int, int] = {layer: n for n, layer in enumerate(consumers)}
        self._teacher = teacher
        self._prediction: Prediction | None = None
        self.x: dict[int, mx.array] = {}
        self.ids: dict[int, mx.array] = {}
        self.real: dict[int, mx.array] = {}

    def begin(self, prediction: Prediction | None) -> None:
        """Of the step that comes; None routes every layer by itself."""
        self._prediction = prediction
        for collected in (self.x, self.ids, self.real):
            collected.clear()

    def __call__(self, experts: StreamedExperts, x: mx.array, indices: mx.array) -> Any:
        layer = experts.mlp.layer.index
        row = self._rows.get(layer) if self._prediction is not None else None
        own = indices.reshape(-1, indices.shape[-1])
        used = own
        if row is not None and self._prediction is not None:
            self.real[layer] = own
            if not self._teacher:
                used = self._prediction.device_ids[row][None]
        if layer in self._owners:
            self.x[layer] = x.reshape(-1, x.shape[-1])
            self.ids[layer] = used
        if row is None:
            return self._exact(experts, x, indices)
        return self._predicted(experts, x, row)

    def _predicted(self, experts: StreamedExperts, x: mx.array, row: int) -> DeferredExpertOutput:
        """Stands for the experts' outputs until the block says that it wants their weighted sum."""
        assert self._prediction is not None
        ids: np.ndarray = self._prediction.ids[row][None]
        weights = self._prediction.weights[row]
        y = self._exact.given(experts, x, ids)

        def resolve(scores: mx.array | None) -> mx.array:
            if scores is None:
                raise CapabilityError(
                    "the block does not only sum its experts' weighted outputs",
                    tensor=experts.mlp.layer.name,
                    expected="what it did when the model was opened",
                    actual="it looked at single outputs",
                    remedy="run with --prerouter off, and report this model family",
                )
            return (y * weights.astype(scores.dtype)[:, None]).sum(axis=-2)

        return DeferredExpertOutput(tuple(y.shape), y.dtype, resolve)
