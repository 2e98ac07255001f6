"""Runs arms: opens engines, times prompts, takes bytes from the reader's counters."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler

from mlx_stream.bench.arms import (
    CHUNK_MAJOR,
    COMPUTE_ONLY,
    DECODE,
    LAYER_MAJOR,
    READ_ONLY,
    STOCK,
    Arm,
    Setting,
    rotate,
)
from mlx_stream.bench.isolated import PreloadedRing, preload, read_only, unload
from mlx_stream.bench.results import Run
from mlx_stream.bench.stock import StockModel
from mlx_stream.config import StreamConfig
from mlx_stream.engine import Engine
from mlx_stream.errors import MlxStreamError
from mlx_stream.storage.read_probe import drop_cached
from mlx_stream.timeline import Timeline

Forecaster = Callable[[Engine, Arm], float | None]
Progress = Callable[[int, int, Arm], None]
WARM_TOKENS = 64


class Runner:
    """Runs the arms of one model.

    Args:
        prompt: token ids of the longest prompt; shorter ones are its beginnings.
        forecast: seconds that the plan promises for an arm.
    """

    def __init__(self, path: Path, prompt: Sequence[int], forecast: Forecaster) -> None:
        self._path = path
        self._prompt = np.asarray(prompt)
        self._forecast = forecast
        self._engine: Engine | None = None
        self._setting: Setting | None = None
        self._stock: StockModel | None = None

    def run(self, arms: Sequence[Arm], rounds: int, progress: Progress) -> Iterator[Run]:
        """Every arm once a round; a run that cannot be done is left out with its reason."""
        order = [arm for arms_ in rotate(arms, rounds) for arm in arms_]
        for done, arm in enumerate(order):
            progress(done, len(order), arm)
            yield self._run(arm)

    def timeline(self, arm: Arm) -> Timeline:
        """What reads and compute did in one run of a layer-major arm."""
        engine, timeline = self._open(arm.setting, arm.chunk), Timeline()
        engine.record(timeline)
        try:
            engine.prefill(self._prompt[: arm.tokens])
        finally:
            engine.record(None)
        return timeline

    def close(self) -> None:
        """Release the engine and the stock model."""
        self._stock = None
        self.close_engine()

    def _run(self, arm: Arm) -> Run:
        engine = self._open(arm.setting, arm.chunk)
        note = _cold(engine)
        before = engine.reader.counters
        hit_rate, peak = None, 0
        if arm.order == STOCK:
            self._stock = self._stock or StockModel(self._path)
            seconds = self._stock.prefill(self._prompt[: arm.tokens], arm.chunk)
        elif arm.order == DECODE:
            seconds, hit_rate, before = self._decode(engine, arm)
        else:
            seconds, before = self._prefill(engine, arm)
            peak = engine.peak_nbytes
        after = engine.reader.counters
        return Run(
            arm=arm,
            wall_seconds=seconds,
            bytes_read=after.bytes - before.bytes,
            read_calls=after.calls - before.calls,
            expert_bytes=engine.index.nbytes,
            peak_bytes=peak,
            io_mode="-" if arm.order in (STOCK, COMPUTE_ONLY) else engine.reader.io_mode,
            backend="mlx" if arm.order == STOCK else engine.backend.name,
            forecast_seconds=self._forecast(engine, arm) if arm.order == LAYER_MAJOR else None,
            hit_rate=hit_rate,
            note=note,
        )

    def _prefill(self, engine: Engine, arm: Arm) -> tuple[float, Any]:
        ids, before = self._prompt[: arm.tokens], engine.reader.counters
        if arm.order == LAYER_MAJOR:
            return _timed(lambda: engine.prefill(ids)), before
        if arm.order == CHUNK_MAJOR:
            return _timed(lambda: self._chunk_major(engine, arm, ids)), before
        # The halves run what a streamed prompt of this length runs, reads of all experts.
        plan = replace(engine.plan(len(ids)), mode="stream")
        if arm.order == READ_ONLY:
            return read_only(engine, plan), before
        assert arm.order == COMPUTE_ONLY, arm.order
        filled = preload(engine, plan)
        try:
            before = engine.reader.counters
            return _timed(lambda: engine.run_plan(plan, ids, ring=PreloadedRing(filled))), before
        finally:
            unload(engine, filled)

    @staticmethod
    def _chunk_major(engine: Engine, arm: Arm, ids: np.ndarray) -> None:
        """Chunk by chunk through the whole model, as other engines do, by the same reader."""
        cache = make_prompt_cache(engine.model)
        for start in range(0, len(ids), arm.chunk):
            chunk = ids[start : start + arm.chunk]
            plan = replace(engine.plan(len(chunk), past_tokens=start), mode="stream")
            engine.run_granted(plan, chunk, cache)

    @staticmethod
    def _decode_tokens(engine: Engine, ids: np.ndarray, count: int) -> Iterator[int]:
        tokens = engine.decode(engine.prefill(ids), ids.tolist(), sampler=greedy_sampler)
        for _ in range(count):
            yield next(tokens)[0]
        tokens.close()

    def _decode(self, engine: Engine, arm: Arm) -> tuple[float, float, Any]:
        ids = self._prompt[: arm.tokens]
        tokens = self._decode_tokens(engine, ids, arm.new_tokens + 1)
        next(tokens)  # the prompt's own
        before = engine.reader.counters
        seconds = _timed(lambda: [None for _ in tokens])
        return seconds, engine.request_metrics.totals.hit_rate, before

    def _open(self, setting: Setting, chunk: int) -> Engine:
        """The engine of a setting, warmed up; the last one is kept."""
        if self._engine is None or self._setting != setting:
            self.close_engine()
            config = StreamConfig(
                memory_budget=setting.budget,
                chunk_tokens=chunk,
                backend=setting.backend,
                io=setting.io,
                throttle=setting.throttle,
                prerouter="off",  # what stock mlx-lm computes
            )
            self._engine, self._setting = Engine(self._path, config), setting
            self._engine.prefill(self._prompt[:WARM_TOKENS])
        engine = self._engine
        engine.config = replace(engine.config, chunk_tokens=chunk)
        return engine

    def close_engine(self) -> None:
        """Release the engine alone."""
        if self._engine is not None:
            self._engine.close()
        self._engine = self._setting = None


def _cold(engine: Engine) -> str:
    """Drop what earlier arms left in the page cache; says so where that cannot be done."""
    if not engine.reader.io_mode.startswith("buffered"):
        return ""
    dropped = [drop_cached(f.path) for f in engine.index.checkpoint.files]
    return "" if all(dropped) else "the page cache was not dropped"


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@contextmanager
def open_runner(path: Path, prompt: Sequence[int], forecast: Forecaster) -> Iterator[Runner]:
    """A runner that is closed whatever happens.

    Raises:
        MlxStreamError: the prompt is empty.
    """
    if not len(prompt):
        raise MlxStreamError("the prompt is empty", expected="tokens", actual="none")
    runner = Runner(path, prompt, forecast)
    try:
        yield runner
    finally:
        runner.close()
