"""Collects routed ids into a trace; a RoutingObserver for `Decoder.observer`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mlx_stream.decode.routing_trace import RoutingTrace, join_rows
from mlx_stream.storage.expert_index import ExpertLayer


class RoutingRecorder:
    """Called with the routing of every layer, in the order of the text.

    Decode must run the exact path: others may route a token twice.
    """

    def __init__(self, layers: Sequence[ExpertLayer]) -> None:
        self._layers = list(layers)
        self._prompt: dict[int, list[np.ndarray]] = {layer.index: [] for layer in layers}
        self._decode: dict[int, list[np.ndarray]] = {layer.index: [] for layer in layers}

    def __call__(self, layer: int, ids: np.ndarray, prefill: bool) -> None:
        """Note a call: the layer's index, ids ``[tokens, K]``, whether it belongs to the prompt."""
        rows = (self._prompt if prefill else self._decode)[layer]
        rows.append(np.array(ids, dtype=np.int16))

    def trace(self, model: str, tokens: Sequence[int]) -> RoutingTrace:
        """What was recorded.

        Args:
            model: name of the checkpoint.
            tokens: those whose decode steps ran, one row of routing each.
        """
        prompt = tuple(join_rows(rows) for rows in self._prompt.values())
        none = [p[:0] for p in prompt]  # gives K when nothing was decoded
        decode = zip(none, self._decode.values(), strict=True)
        return RoutingTrace(
            model=model,
            layers=tuple(layer.index for layer in self._layers),
            num_experts=tuple(layer.num_experts for layer in self._layers),
            expert_nbytes=tuple(layer.expert_nbytes for layer in self._layers),
            prompt=prompt,
            decode=tuple(join_rows([first, *rows]) for first, rows in decode),
            tokens=np.array(tokens, dtype=np.int32),
        )
