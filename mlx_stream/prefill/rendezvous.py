"""The rendezvous: every chunk of a segment meets the others at each expert layer.

Each chunk runs the unmodified mlx-lm model in its own greenlet. Where the model calls its experts
the greenlet hands ``(experts, x, indices, scores)`` to the scheduler and sleeps until its output is
there. So the model runs chunk by chunk within a layer and layer by layer over the prompt, without
a line of per-family code. All greenlets live in the compute thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import greenlet
import mlx.core as mx
import numpy as np

from mlx_stream import interrupts
from mlx_stream.errors import RendezvousError
from mlx_stream.experts.deferred import DeferredExpertOutput
from mlx_stream.experts.streamed_experts import Executor, StreamedExperts


@dataclass
class Arrival:
    """A chunk waiting at an expert layer.

    Attributes:
        experts: the layer.
        x: ``[C, D]`` evaluated MoE input.
        indices: ``[C, K]`` routed ids, on the host.
        scores: ``[C, K]`` when the weighted sum ``[C, D]`` is wanted, else None for ``[C, K, D]``.
        lead: leading axes of the module's call, restored on the output.
    """

    experts: StreamedExperts
    x: mx.array
    indices: np.ndarray
    scores: mx.array | None
    lead: tuple[int, ...]

    def shaped(self, y: mx.array) -> mx.array:
        """Output ``[C, ...]`` with the leading axes of the call."""
        return y.reshape(*self.lead, *y.shape[1:])


class _ChunkGreenlet(greenlet.greenlet):
    """Runs one chunk; its parent is the scheduler."""


class ChunkExecutor:
    """The executor during prefill: inside a chunk it yields, elsewhere it passes on."""

    def __init__(self, fallback: Executor | None) -> None:
        self._fallback = fallback

    def __call__(self, experts: StreamedExperts, x: mx.array, indices: mx.array) -> Any:
        current = greenlet.getcurrent()
        if not isinstance(current, _ChunkGreenlet):
            assert self._fallback is not None
            return self._fallback(experts, x, indices)

        def resolve(scores: mx.array | None) -> mx.array:
            return _meet(current, experts, x, indices, scores)

        if not experts.combined:
            return resolve(None)
        shape = (*indices.shape, experts.mlp.layer.input_dims)
        return DeferredExpertOutput(shape, x.dtype, resolve)


def _meet(
    current: greenlet.greenlet,
    experts: StreamedExperts,
    x: mx.array,
    indices: mx.array,
    scores: mx.array | None,
) -> mx.array:
    interrupts.check()
    lead, k = tuple(indices.shape[:-1]), indices.shape[-1]
    flat_scores = None if scores is None else scores.reshape(-1, k)
    flat_x, flat_ids = x.reshape(-1, x.shape[-1]), indices.reshape(-1, k)
    # Evaluated here, so that no lazy graph keeps another layer's arrays alive.
    mx.eval([flat_x, flat_ids] if flat_scores is None else [flat_x, flat_ids, flat_scores])
    arrival = Arrival(experts, flat_x, np.array(flat_ids, copy=True), flat_scores, lead)
    del flat_x, flat_ids, flat_scores, x, indices, scores
    return current.parent.switch(arrival)


class Rendezvous:
    """The chunks of one segment. Use as a context manager: leaving it ends every greenlet."""

    def __init__(self, bodies: Sequence[Callable[[], None]]) -> None:
        self._greenlets = [_ChunkGreenlet(body) for body in bodies]
        self._arrivals: list[Arrival | None] = [None] * len(bodies)

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, *exc: object) -> None:
        # A failed chunk must not leave the others suspended with their arrays.
        for g in self._greenlets:
            if g and not g.dead:
                g.throw(greenlet.GreenletExit)
        self._arrivals.clear()

    def start(self, on_chunk: Callable[[int], None]) -> bool:
        """Run every chunk to its first expert layer; False when there was none."""
        for i, g in enumerate(self._greenlets):
            self._arrivals[i] = g.switch()
            on_chunk(i)
        return self._meeting()

    def resume(self, outputs: list[mx.array], on_chunk: Callable[[int], None]) -> bool:
        """Give every chunk its output and run it to the next expert layer; False at the end.

        `outputs` is emptied as it is handed out.
        """
        outputs.reverse()
        for i, g in enumerate(self._greenlets):
            arrival = self._arrivals[i]
            assert arrival is not None
            y = arrival.shaped(outputs.pop())
            self._arrivals[i] = arrival = None
            self._arrivals[i] = _switch(g, y)
            del y
            on_chunk(i)
        return self._meeting()

    def arrivals(self) -> list[Arrival]:
        """One per chunk, all at the same layer."""
        return [a for a in self._arrivals if a is not None]

    def _meeting(self) -> bool:
        here = self.arrivals()
        if not here:
            return False
        names = {a.experts.mlp.layer.name for a in here}
        if len(names) != 1 or len(here) != len(self._greenlets):
            raise RendezvousError(
                "the chunks of the prompt did not meet at one expert layer",
                expected=f"{len(self._greenlets)} chunks at the same layer",
                actual=[a.experts.mlp.layer.name if a else "finished" for a in self._arrivals],
                remedy="the model skips experts for some tokens; prefill it in one chunk "
                "(chunk_tokens at least the prompt length)",
            )
        return True


def _switch(g: greenlet.greenlet, y: mx.array) -> Arrival | None:
    return g.switch(y)
