"""Steps with predicted routing: the heads of step t say how step t + 1 routes.

A step's heads run as one batch with its logits, in the same evaluation, and their choice comes back
in one read. Reads for it then begin, while the token is sampled and the next step's first layers
compute. Nothing is guessed: a predicted expert is used, and waited for if it has not come yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_stream.backends.base import ChunkInput, ExpertMlp
from mlx_stream.decode.exact import ChunkWatch, ExactExecutor
from mlx_stream.decode.prerouted import PreroutedExecutor
from mlx_stream.decode.prerouted_reads import PreroutedReads
from mlx_stream.errors import PrerouterError
from mlx_stream.experts.streamed_experts import ExecutorSlot, set_executor
from mlx_stream.prerouter.opening import OpenPrerouter
from mlx_stream.prerouter.router_maths import Values, select_on_host
from mlx_stream.prerouter.tracks import Prediction, Track, Tracks

CHECK_STEPS = 16  # every so many predicted steps the real router is asked too


class Prerouter:
    """Runs steps, and remembers for each conversation what the next one needs.

    Compute thread only.

    Args:
        mlps: all expert layers.
        cache_offset: tokens in a prompt cache.
    """

    def __init__(
        self,
        opened: OpenPrerouter,
        slot: ExecutorSlot,
        mlps: Sequence[ExpertMlp],
        exact: ExactExecutor,
        reads: PreroutedReads,
        *,
        cache_offset: Callable[[list[Any]], int],
    ) -> None:
        self.spec = opened.spec
        self._opened, self._slot, self._mlps = opened, slot, mlps
        self._exact, self._reads = exact, reads
        self._executor = PreroutedExecutor(
            exact,
            opened.owners,
            opened.consumers,
            teacher=opened.spec.feature == "teacher",
            on_host=opened.heads.on_host,
        )
        self._tracks = Tracks(cache_offset)
        self._planned: Prediction | None = None
        self._prompt_x: dict[int, mx.array] = {}
        self._prompt_ids: dict[int, np.ndarray] = {}
        self._steps = 0
        exact.ahead, exact.held = reads, reads.held

    # --- decode -----------------------------------------------------------------------------

    def __call__(
        self, model: nn.Module, tokens: mx.array, cache: list[Any]
    ) -> tuple[str, mx.array]:
        """The path taken, and evaluated logits ``[T, V]``. Several tokens are not predicted."""
        if tokens.shape[1] != 1:
            self.forget(cache)
            return "exact", self._run(model, tokens, cache, None)
        track = self._tracks.find(cache) or Track(0, None, None)
        prediction = track.prediction
        self._plan(prediction)
        logits = self._run(model, tokens, cache, track)
        self._exact.counts.predicted_layer_steps += 0 if prediction is None else len(prediction.ids)
        return ("exact" if prediction is None else "prerouted"), logits

    def forget(self, cache: list[Any]) -> None:
        """The conversation goes on in another way: its next step is a first step."""
        self._tracks.forget(cache)
        self._plan(None)

    def _run(
        self, model: nn.Module, tokens: mx.array, cache: list[Any], track: Track | None
    ) -> mx.array:
        executor, counts = self._executor, self._exact.counts
        prediction = None if track is None else track.prediction
        executor.begin(prediction)
        restore = set_executor(self._slot, executor)
        try:
            logits = model(tokens, cache=cache)[0]
            if track is None:
                mx.eval(logits)
            else:
                checked = self._checked(prediction)
                if self._opened.heads.on_host:  # its inputs are there: it runs beside the logits
                    mx.async_eval(logits, checked)
                x, current = executor.collected()
                asked = self._ask(x, current, track.previous)
                mx.eval(logits, current, asked, checked)
        except BaseException:
            executor.begin(None)  # the step may be taken again: nothing of it stays
            raise
        finally:
            restore()
        counts.syncs += 1
        self._exact.finish_step()
        if track is not None:
            self._compare(prediction)
            found = self._read_back(asked)
            self._tracks.note(cache, current, found)
            self._plan(found)
        executor.begin(None)
        return logits

    def _ask(
        self, x: Values, current: Values, previous: Values | None
    ) -> tuple[Values, Values, Values]:
        """Ids and weights ``[C, K]``, and whether all logits are numbers; lazy on a device."""
        logits = self._opened.heads.logits(x, current, previous)
        if isinstance(logits, mx.array):
            return *self._opened.selection(logits), mx.isfinite(logits).all()
        finite, maths = np.isfinite(logits).all(), self.spec.router
        if finite and maths is not None and maths.kind == "softmax_topk":  # as the model's own
            return *select_on_host(logits, maths, current.shape[-1]), finite
        ids, weights = self._opened.selection(mx.array(logits))
        return np.array(ids), np.array(weights), finite

    def _read_back(self, asked: tuple[Values, Values, Values]) -> Prediction:
        ids, weights, finite = asked
        if not finite.item():
            raise PrerouterError(
                "the Prerouter's heads computed values that are not numbers",
                expected=f"finite logits of {self.spec.name}",
                actual="NaN or infinity",
                remedy="check the heads file, or run with --prerouter off",
            )
        return Prediction(np.array(ids).astype(np.int64), ids, weights)

    def _plan(self, prediction: Prediction | None) -> None:
        """Have the experts of the next step read, now or as soon as there is room."""
        if prediction is None:
            self._reads.clear()
        elif prediction is not self._planned:
            layers = zip(self._opened.consumers, prediction.ids.tolist(), strict=True)
            self._reads.plan([(self._mlps[n], ids) for n, ids in layers])
        self._planned = prediction
        self._reads.fill()

    # --- the sampled check ------------------------------------------------------------------

    def _checked(self, prediction: Prediction | None) -> list[mx.array]:
        """The real router's choices to be evaluated with the step, in steps that are checked."""
        if prediction is None:
            return []
        self._steps += 1
        if (self._steps - 1) % CHECK_STEPS:
            self._executor.real.clear()
        return list(self._executor.real.values())

    def _compare(self, prediction: Prediction | None) -> None:
        if prediction is None:
            return
        counts = self._exact.counts
        for layer, real in self._executor.real.items():
            predicted = prediction.ids[self._opened.consumers.index(layer)]
            counts.checked_experts += len(predicted)
            counts.agreed_experts += len(np.intersect1d(predicted, np.array(real)))

    # --- prefill ----------------------------------------------------------------------------

    def begin_prefill(self, cache: list[Any]) -> ChunkWatch | None:
        """A prompt is about to run; returns who must see its layers, if anybody."""
        self.forget(cache)
        self._prompt_x.clear()
        self._prompt_ids.clear()
        return self._watch if self.watches_prompts else None

    @property
    def watches_prompts(self) -> bool:
        """Whether the end of a prompt is fed to the heads."""
        spec = self.spec
        return spec.first_prediction == "first_step" or spec.first_previous == "prompt"

    def _watch(self, mlp: ExpertMlp, chunks: Sequence[ChunkInput]) -> None:
        """Keep what the last position's head will see, and the experts of the last two."""
        layer = mlp.layer.index
        if layer not in self._opened.owners:
            return
        tail = np.concatenate([c.indices[-2:] for c in chunks[-2:]])
        if len(tail) < 2 and layer in self._prompt_ids:
            tail = np.concatenate([self._prompt_ids[layer], tail])
        self._prompt_ids[layer] = tail[-2:].copy()
        if self.spec.first_prediction == "first_step":
            last = chunks[-1].x[-1:] + 0  # not a view that keeps the chunk
            mx.eval(last)
            self._prompt_x[layer] = last

    def end_prefill(self, cache: list[Any]) -> None:
        """The prompt is in the cache: what the first step needs."""
        if not self.watches_prompts:
            return
        spec, owners = self.spec, self._opened.owners
        tails = [self._prompt_ids[n] for n in owners]
        last = mx.array(np.stack([tail[-1] for tail in tails]).astype(np.int32))
        if spec.first_prediction == "second_step":
            self._tracks.note(cache, last, None)
            return
        before = None
        if spec.first_previous == "prompt" and len(tails[0]) == 2:
            before = mx.array(np.stack([tail[0] for tail in tails]).astype(np.int32))
        asked = self._ask(mx.concatenate([self._prompt_x[n] for n in owners]), last, before)
        mx.eval(*asked)
        self._tracks.note(cache, last, self._read_back(asked))
        self._prompt_x.clear()
        self._prompt_ids.clear()
