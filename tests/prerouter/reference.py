"""Stock mlx-lm with its routers replaced where a Prerouter would route: written out in numpy.

Independent of the runtime: it shares no code with it but the spec record. The model is all in
memory; where a prediction routes, the block's own router gets the logits that a head computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.bailing_hybrid import Gate as BailingGate

from mlx_stream.prerouter.spec import PrerouterSpec
from tests.prerouter.making import Arrays, numpy_logits
from tests.support.checkpoints import stock_prefill


class Reference:
    """Greedy decoding with predicted routing.

    Attributes:
        routed: for each decode step, ``{layer: set of experts}`` that were executed.
        predicted: for each decode step, how many layers a head routed.
    """

    def __init__(self, model: nn.Module, spec: PrerouterSpec, arrays: Arrays) -> None:
        self._model, self._spec, self._arrays = model, spec, arrays
        self._given: dict[int, np.ndarray] = {}
        self._x: dict[int, list[np.ndarray]] = {}
        self._executed: dict[int, list[list[int]]] = {}
        self._real: dict[int, list[list[int]]] = {}
        self.routed: list[dict[int, set[int]]] = []
        self.predicted: list[int] = []

    def answer(self, prompt: Sequence[int], count: int) -> list[int]:
        """The next `count` greedy tokens after a prompt."""
        self.routed, self.predicted, self._given = [], [], {}
        with self._spying():
            self._clear()
            logits, cache = stock_prefill(self._model, prompt, 16)
            previous: dict[int, list[int]] = {}
            if self._spec.first_prediction == "first_step":
                before = {n: self._feature(n, -2) for n in self._spec.active_owners}
                self._predict(before if self._spec.first_previous == "prompt" else {})
                previous = {n: self._feature(n, -1) for n in self._spec.active_owners}
            elif self._spec.first_previous == "prompt":
                previous = {n: self._feature(n, -1) for n in self._spec.active_owners}
            out = [int(logits.argmax())]
            while len(out) < count:
                self.predicted.append(len(self._given))
                self._clear()
                step = self._model(mx.array([[out[-1]]]), cache=cache)[0, -1]
                out.append(int(mx.argmax(step).item()))
                self.routed.append({n: set(rows[-1]) for n, rows in self._executed.items()})
                self._predict(previous)
                previous = {n: self._feature(n, -1) for n in self._spec.active_owners}
        return out

    def _feature(self, layer: int, position: int) -> list[int]:
        rows = self._real if self._spec.feature == "teacher" else self._executed
        return rows[layer][position]

    def _predict(self, previous: dict[int, list[int]]) -> None:
        self._given = {
            owner + 1: numpy_logits(
                self._arrays,
                owner,
                self._x[owner][-1],
                self._feature(owner, -1),
                previous.get(owner, []),
            )
            for owner in self._spec.active_owners
        }

    def _clear(self) -> None:
        for rows in (self._x, self._executed, self._real):
            rows.clear()

    @contextmanager
    def _spying(self) -> Iterator[None]:
        undo = []
        for number, layer in enumerate(self._model.model.layers):
            block = layer.mlp
            if "switch_mlp" not in block:
                continue
            gate, experts = block.gate, block.switch_mlp
            block.gate = self._router(number, gate, block)
            block.switch_mlp = self._experts(number, experts)
            undo.append((block, gate, experts))
        try:
            yield
        finally:
            for block, gate, experts in undo:
                block.gate, block.switch_mlp = gate, experts

    def _router(self, number: int, gate: Any, block: nn.Module) -> Any:
        def call(x: mx.array) -> Any:
            real = gate(x)
            ids = real[0] if isinstance(real, tuple) else _largest(real, block.top_k)
            self._real.setdefault(number, []).extend(np.array(ids)[0].tolist())
            given = self._given.get(number)
            if given is None:
                return real
            logits = mx.array(given.astype(np.float32))[None, None]
            return _choose(gate, logits) if isinstance(real, tuple) else logits

        return call

    def _experts(self, number: int, experts: Any) -> Any:
        def call(x: mx.array, ids: mx.array) -> mx.array:
            self._x.setdefault(number, []).extend(np.array(x)[0])
            self._executed.setdefault(number, []).extend(np.array(ids)[0].tolist())
            return experts(x, ids)

        return call


def _largest(logits: mx.array, k: int) -> mx.array:
    return mx.argsort(-logits, axis=-1)[..., :k]


def _choose(gate: BailingGate, logits: mx.array) -> tuple[mx.array, mx.array]:
    """Sigmoid, groups by the sum of their two best, no bias: written out."""
    scores = 1 / (1 + np.exp(-np.array(logits)[0, 0].astype(np.float64)))
    groups = scores.reshape(gate.n_group, -1)
    best = np.sort(groups, axis=1)[:, -2:].sum(axis=1)
    kept = np.argsort(-best)[: gate.topk_group]
    masked = np.full_like(groups, -1.0)
    masked[kept] = groups[kept]
    ids = np.argsort(-masked.reshape(-1))[: gate.top_k]
    weights = scores[ids]
    if gate.top_k > 1 and gate.norm_topk_prob:
        weights = weights / weights.sum()
    weights = weights * gate.routed_scaling_factor
    return mx.array(ids)[None, None], mx.array(weights.astype(np.float32))[None, None]
