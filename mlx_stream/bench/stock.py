"""Stock mlx-lm on the same prompt, all in memory: the reference of the benchmark's last arm."""

from __future__ import annotations

import time
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model


class StockModel:
    """Loaded once; on a CPU in float32, as the CPU backend computes."""

    def __init__(self, path: Path) -> None:
        self._model, _ = load_model(path)
        if mx.default_device() == mx.Device(mx.cpu):
            self._model.set_dtype(mx.float32)
        mx.eval(self._model.parameters())

    def prefill(self, ids: np.ndarray, chunk: int) -> float:
        """Seconds, with the calls of ``mlx_lm.generate_step``."""
        cache, prompt = make_prompt_cache(self._model), mx.array(ids)
        started = time.perf_counter()
        for start in range(0, len(ids) - 1, chunk):
            self._model(prompt[start : min(start + chunk, len(ids) - 1)][None], cache=cache)
            mx.eval([c.state for c in cache])
        mx.eval(self._model(prompt[-1:][None], cache=cache)[0, -1])
        return time.perf_counter() - started
