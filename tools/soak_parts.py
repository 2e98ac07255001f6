"""What the soak is made of: reference answers, reads that fail, Ctrl-C, and what must not grow.

References are greedy tokens of stock mlx-lm (float32, all in memory). Stock is slow on a CPU, so
prompts above `STOCK_TOKENS` are checked against our own exact path with everything cached.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import psutil
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler
from mlx_lm.utils import load_model

import mlx_stream.engine
from mlx_stream.runtime import Runtime
from mlx_stream.storage.reader import Reader

STOCK_TOKENS = 400
NEAR_TIE = 1e-3  # relative gap of the two best logits below which either may win


# --- what is right


@dataclass(frozen=True)
class Case:
    """A prompt and its greedy answer, up to the first near tie."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    stock: bool


def stock_model(folder: Path) -> nn.Module:
    """The checkpoint as mlx-lm loads it, in float32 where it has 16-bit floats."""
    model, _ = load_model(folder, strict=True)
    dtypes = {value.dtype for _, value in tree_flatten(model.parameters())}
    if dtypes & {mx.bfloat16, mx.float16}:
        model.set_dtype(mx.float32)
        mx.eval(model.parameters())
    return model


def nearly_tied(logits: np.ndarray) -> np.ndarray:
    """``[T, V]`` -> ``[T]``: whether rounding may decide which of the two best is chosen."""
    second, first = np.partition(logits, -2, axis=-1)[:, -2:].T
    return first - second <= NEAR_TIE * np.maximum(1.0, np.abs(first))


def stock_answer(model: nn.Module, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy tokens of stock mlx-lm, up to the first near tie."""
    cache, tokens = make_prompt_cache(model), mx.array([list(prompt)])
    answer: list[int] = []
    while len(answer) < count:
        logits = np.array(model(tokens, cache=cache)[0, -1:].astype(mx.float32))
        if nearly_tied(logits)[0]:
            break
        answer.append(int(logits.argmax()))
        tokens = mx.array([answer[-1:]])
    return answer


def exact_answer(runtime: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy tokens of a runtime of ours, up to the first near tie."""
    engine, answer = runtime.engine, []
    tokens = engine.decode(engine.prefill(prompt), prompt, sampler=greedy_sampler)
    for token, logprobs in tokens:
        if len(answer) == count or nearly_tied(np.array(logprobs)[None])[0]:
            break
        answer.append(token)
    tokens.close()
    return answer


def wrong_tokens(model: nn.Module, prompt: Sequence[int], answer: Sequence[int]) -> int:
    """Tokens of `answer` that stock would not have chosen there; near ties excepted."""
    if not answer:
        return 0
    ids = mx.array([[*prompt, *answer[:-1]]])
    logits = np.array(model(ids)[0, len(prompt) - 1 :].astype(mx.float32))
    wrong = logits.argmax(axis=-1) != np.array(answer)
    return int((wrong & ~nearly_tied(logits)).sum())


# --- what goes wrong on purpose


class RandomFaults:
    """A reader's fault hook: once armed, lets some reads pass and fails the next few."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._skip = self._times = 0
        self.injected = 0

    def arm(self, skip: int, times: int) -> None:
        """Fail `times` reads after the next `skip`; zero times disarms."""
        with self._lock:
            self._skip, self._times = skip, times

    def __call__(self, file: int, offset: int, nbytes: int) -> None:
        with self._lock:
            if not self._times:
                return
            if self._skip:
                self._skip -= 1
                return
            self._times -= 1
            self.injected += 1
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@contextmanager
def faulty_readers(faults: RandomFaults) -> Iterator[None]:
    """Engines opened inside read through `faults`."""
    real = mlx_stream.engine.Reader
    mlx_stream.engine.Reader = partial(Reader, fault=faults)  # type: ignore[misc]
    try:
        yield
    finally:
        mlx_stream.engine.Reader = real  # type: ignore[misc]


class CtrlC:
    """Sends SIGINT to this process; it raises only where the soak is ready for it."""

    def __init__(self) -> None:
        self._ready = False
        self.sent = self.raised = 0

    def _handle(self, number: int, frame: object) -> None:
        if self._ready:
            self._ready = False
            self.raised += 1
            raise KeyboardInterrupt

    @contextmanager
    def installed(self) -> Iterator[None]:
        """SIGINT is ours inside. Main thread only."""
        previous = signal.signal(signal.SIGINT, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    @contextmanager
    def after(self, seconds: float | None) -> Iterator[None]:
        """SIGINT comes that much later, unless the block is over by then."""
        if seconds is None:
            yield
            return
        timer = threading.Timer(seconds, self._send)
        self._ready = True
        timer.start()
        try:
            yield
        finally:
            self._ready = False
            timer.cancel()
            timer.join()

    def _send(self) -> None:
        self.sent += 1
        os.kill(os.getpid(), signal.SIGINT)


# --- who speaks


class Talk:
    """A conversation and what was said in it, as token ids."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.start_again()

    def start_again(self) -> None:
        """Nothing said yet."""
        self._talk = self.runtime.chat()
        self.said: list[int] = []
        self.prompt: list[int] = []

    @property
    def next_tokens(self) -> int:
        """Upper bound of the next prompt's length."""
        return len(self.said) + 32

    def send(self, message: list[int], count: int) -> Any:
        """The answer to come."""
        self.prompt = [*self.said, *message]
        return self._talk.send(message, count)

    def heard(self, answer: list[int]) -> list[int]:
        """The answer as the conversation has it; we may have missed the token of an interrupt."""
        self._talk.send([0], 1)  # ends the turn; nothing is computed before the first step
        kept = list(self._talk._said)
        if answer or len(kept) > len(self.said):
            assert kept[: len(self.prompt)] == self.prompt, "the conversation lost its prompt"
            ours, answer = answer, kept[len(self.prompt) :]
            assert answer[: len(ours)] == ours, "the conversation lost tokens"
            assert len(answer) <= len(ours) + 1, "the conversation has tokens nobody saw"
            self.said = kept
        else:
            assert kept == self.said, "a turn without an answer left a trace"
        return answer


def spoil_proposals(runtime: Runtime, rng: random.Random) -> None:
    """A draft that is the model itself is always right: make some proposals wrong."""
    drafter = runtime.engine._drafter
    propose, vocab = drafter.propose, runtime.engine._shape.vocab

    def spoiled(token: int, count: int) -> list[int]:
        return [rng.randrange(vocab) if rng.random() < 0.2 else t for t in propose(token, count)]

    drafter.propose = spoiled


# --- what must not grow


@dataclass(frozen=True)
class Sample:
    """The process while no engine is open."""

    seconds: float
    rss: int
    fds: int
    threads: int


@dataclass
class Watch:
    """Samples of the process; memory that the allocator only keeps is given back before each."""

    started: float = field(default_factory=time.monotonic)
    samples: list[Sample] = field(default_factory=list)
    peak_rss: int = 0

    def __post_init__(self) -> None:
        self._process = psutil.Process()

    def now(self) -> Sample:
        """The process as it is."""
        process = self._process
        rss, threads = process.memory_info().rss, process.num_threads()
        fds = process.num_fds() if hasattr(process, "num_fds") else 0
        self.peak_rss = max(self.peak_rss, rss)
        return Sample(time.monotonic() - self.started, rss, fds, threads)

    def rest(self) -> Sample:
        """Call it with all engines closed."""
        gc.collect()
        mx.clear_cache()
        with suppress(OSError, AttributeError):  # glibc only
            ctypes.CDLL(None).malloc_trim(0)
        self.samples.append(self.now())
        return self.samples[-1]

    def drift(self, warm_seconds: float) -> dict[str, Any]:
        """Start, after warm-up, end, and the slope of a line through all after warm-up."""
        warm = [s for s in self.samples if s.seconds >= warm_seconds] or self.samples[-1:]
        hours = np.array([s.seconds for s in warm]) / 3600
        result: dict[str, Any] = {"peak_rss_mb": self.peak_rss / 1e6, "samples": len(warm)}
        for name, unit in (("rss", 1e6), ("fds", 1), ("threads", 1)):
            values = np.array([getattr(s, name) for s in warm]) / unit
            slope = float(np.polyfit(hours, values, 1)[0]) if len(warm) > 2 else 0.0
            result[name] = {
                "start": getattr(self.samples[0], name) / unit,
                "warm": float(values[0]),
                "end": float(values[-1]),
                "per_hour": slope,
            }
        return result
