"""Static hot lists: a model's most used experts, ranked per layer, learnt from routing traces."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlx_stream.decode.routing_trace import RoutingTrace
from mlx_stream.decode.seed_policy import HORIZON
from mlx_stream.errors import MlxStreamError
from mlx_stream.whole_files import write_whole

FORMAT = "mlx_stream hot list"
VERSION = 1
MAX_NBYTES = 64 << 20


class HotListError(MlxStreamError):
    """A hot list cannot be read, or belongs to another model."""


@dataclass(frozen=True)
class HotLayer:
    """Experts of one layer, best first; scores are in uses, as seed scores are."""

    index: int
    num_experts: int
    experts: tuple[int, ...]
    scores: tuple[float, ...]

    def scores_by_id(self) -> np.ndarray:
        """``[E]`` float64; zero for experts that are not listed."""
        every = np.zeros(self.num_experts)
        every[list(self.experts)] = self.scores
        return every


@dataclass(frozen=True)
class HotList:
    """What to keep when nothing is known about the prompt."""

    model: str
    layers: tuple[HotLayer, ...]

    @staticmethod
    def from_traces(traces: Sequence[RoutingTrace]) -> HotList:
        """Uses in decode per token, over all traces of one model, scaled to `HORIZON` tokens.

        Raises:
            HotListError: no traces, no decoded tokens, or traces of different models.
        """
        shapes = {(t.layers, t.num_experts) for t in traces}
        steps = sum(t.steps for t in traces)
        if len(shapes) != 1 or not steps:
            raise HotListError(
                "a hot list needs decoded tokens of one model",
                expected="traces with the same layers and experts",
                actual=f"{len(shapes)} kinds of model, {steps} decoded tokens",
                remedy="pass traces of one model, recorded with --max-tokens above 0",
            )
        ((indices, experts),) = shapes
        layers = []
        for i, (index, count) in enumerate(zip(indices, experts, strict=True)):
            ids = np.concatenate([t.decode[i].reshape(-1) for t in traces])
            uses = np.bincount(ids, minlength=count) * (HORIZON / steps)
            order = [int(e) for e in np.argsort(-uses, kind="stable") if uses[e] > 0]
            scores = tuple(round(float(uses[e]), 4) for e in order)
            layers.append(HotLayer(index, count, tuple(order), scores))
        return HotList(traces[0].model, tuple(layers))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON.

        Raises:
            HotListError: the file cannot be written.
        """
        layers = [vars(layer) for layer in self.layers]
        content = {"format": FORMAT, "version": VERSION, "model": self.model, "layers": layers}
        try:
            write_whole(Path(path), json.dumps(content) + "\n")
        except OSError as error:
            raise HotListError(
                "the hot list cannot be written",
                file=Path(path),
                actual=str(error),
                remedy="choose a writable folder",
            ) from error

    @staticmethod
    def load(path: str | os.PathLike[str]) -> HotList:
        """Read and check a list; :meth:`check_model` says whether it belongs to a model.

        Raises:
            HotListError: no such file, not a hot list, another version, or damaged.
        """
        source = Path(path)
        try:
            if source.stat().st_size > MAX_NBYTES:
                raise _damaged(source, "size", f"at most {MAX_NBYTES}", source.stat().st_size)
            content = json.loads(source.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise HotListError(
                "the hot list cannot be read",
                file=source,
                expected=f"JSON, {FORMAT!r}",
                actual=str(error),
                remedy="write it again: tools/replay_trace.py TRACE... --save-hot-list FILE",
            ) from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise _damaged(source, "format", FORMAT, str(content)[:60])
        if content.get("version") != VERSION:
            raise _damaged(source, "version", VERSION, content.get("version"))
        layers = content.get("layers")
        if not isinstance(layers, list) or not layers:
            raise _damaged(source, "layers", "a list of layers", str(layers)[:60])
        parsed = tuple(_layer(entry, source) for entry in layers)
        if len({layer.index for layer in parsed}) != len(parsed):
            raise _damaged(source, "layers", "every layer once", "a layer twice")
        return HotList(str(content.get("model")), parsed)

    def check_model(self, layers: Sequence[tuple[int, int]], file: Path | None = None) -> None:
        """The list must have these ``(layer index, experts)``, in this order.

        Raises:
            HotListError: it belongs to another model.
        """
        own = [(layer.index, layer.num_experts) for layer in self.layers]
        if own != list(layers):
            raise HotListError(
                "the hot list belongs to another model",
                file=file,
                expected=f"{len(layers)} layers (index, experts): {_short(layers)}",
                actual=f"{len(own)} layers of {self.model}: {_short(own)}",
                remedy="record a trace of this model and write its own hot list",
            )


def _layer(entry: Any, source: Path) -> HotLayer:
    if not isinstance(entry, dict):
        raise _damaged(source, "layers", "an object a layer", str(entry)[:60])
    index, count = entry.get("index"), entry.get("num_experts")
    experts, scores = entry.get("experts"), entry.get("scores")
    if not _is_count(index) or not _is_count(count):
        raise _damaged(source, "index, num_experts", "whole numbers", f"{index}, {count}")
    if not isinstance(experts, list) or not isinstance(scores, list):
        raise _damaged(source, f"layer {index}", "lists of experts and scores", "something else")
    if len(set(map(str, experts))) != len(experts) or len(scores) != len(experts):
        raise _damaged(
            source,
            f"layer {index}",
            "every expert once, with a score",
            f"{len(experts)} experts, {len(scores)} scores",
        )
    if not all(_is_count(e) and e < count for e in experts):
        raise _damaged(source, f"layer {index} experts", f"ids 0..{count - 1}", str(experts)[:60])
    if not all(type(s) in (int, float) and math.isfinite(s) and s > 0 for s in scores):
        raise _damaged(source, f"layer {index} scores", "numbers above zero", str(scores)[:60])
    if sorted(scores, reverse=True) != scores:
        raise _damaged(source, f"layer {index} scores", "best first", str(scores)[:60])
    return HotLayer(index, count, tuple(experts), tuple(map(float, scores)))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _short(layers: Sequence[tuple[int, int]]) -> str:
    return ", ".join(map(str, layers[:3])) + (", ..." if len(layers) > 3 else "")


def _damaged(source: Path, part: str, expected: object, actual: object) -> HotListError:
    return HotListError(
        "the hot list is damaged, or of another version",
        file=source,
        tensor=part,
        expected=expected,
        actual=actual,
        remedy="write it again: tools/replay_trace.py TRACE... --save-hot-list FILE",
    )
