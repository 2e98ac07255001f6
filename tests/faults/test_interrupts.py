"""Ctrl-C in the middle of a layer: everything is put back, and the next prompt is right."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

import mlx_stream
from mlx_stream.backends.cpu.backend import CpuLayerComputation
from mlx_stream.hub import demo_path
from tests.cli.runner import GENERATE, TIMEOUT, environment
from tests.support.checkpoints import random_tokens, stock_greedy, stock_model
from tests.support.faults import (
    assert_same_contents,
    cache_contents,
    install_fault,
    nothing_left,
)

ROOMY = "1GB"
SIGNAL_TO_EXIT_SECONDS = 5.0  # about 1 on an idle machine


class _After:
    """Raises KeyboardInterrupt at its n-th call, once."""

    def __init__(self, calls: int) -> None:
        self.left = calls

    def __call__(self, *_: object, **__: object) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def _from_progress(monkeypatch, when: int) -> Callable | None:
    return _After(when)


def _from_experts(monkeypatch, when: int) -> Callable | None:
    stop, real = _After(when), CpuLayerComputation.add

    def add(self, groups):
        fence = real(self, groups)
        stop()
        return fence

    monkeypatch.setattr(CpuLayerComputation, "add", add)
    return None


def _from_worker(monkeypatch, when: int) -> Callable | None:
    stop, real = _After(when), CpuLayerComputation._store

    def store(self, *args):
        stop()
        real(self, *args)

    monkeypatch.setattr(CpuLayerComputation, "_store", store)
    return None


@pytest.mark.parametrize("when", [1, 3])
@pytest.mark.parametrize("source", [_from_progress, _from_experts, _from_worker])
def test_prefill_interrupted(intact, prompt, answer, monkeypatch, source, when):
    tail = random_tokens(100, 40, seed=8)  # more than a short turn, which has no layers to report
    expected = stock_greedy(stock_model(intact), prompt + tail, 5)
    with nothing_left(), mlx_stream.load(intact, memory_budget=ROOMY, chunk_tokens=16) as runtime:
        cache = runtime.prefill(prompt).cache
        before, used = cache_contents(cache), runtime.engine.budget.used
        progress = source(monkeypatch, when)
        with pytest.raises(KeyboardInterrupt):
            runtime.prefill(tail, cache, progress=progress)
        assert_same_contents(cache, before)
        assert runtime.engine.budget.owner("prefill") == 0
        assert runtime.engine.budget.used <= runtime.memory_budget
        assert used
        got = [r.token for r in runtime.stream_generate(tail, 5, prompt_cache=cache)]
        assert got == expected
        assert [r.token for r in runtime.stream_generate(prompt, len(answer))] == answer


def test_interrupted_while_waiting_for_the_disk(intact, prompt, answer, monkeypatch):
    """A real SIGINT while the compute thread waits for reads that take long."""
    slow = [0.0]
    install_fault(monkeypatch, lambda *_: time.sleep(slow[0]))
    with nothing_left(), mlx_stream.load(intact, memory_budget=ROOMY) as runtime:
        slow[0] = 0.5
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt), _CtrlC(0.25):
            runtime.prefill(prompt)
        assert time.monotonic() - started < SIGNAL_TO_EXIT_SECONDS
        slow[0] = 0.0
        assert [r.token for r in runtime.stream_generate(prompt, len(answer))] == answer


def test_decode_interrupted(intact, prompt, answer, monkeypatch):
    with nothing_left(), mlx_stream.load(intact, memory_budget=ROOMY) as runtime:
        cache = runtime.prefill(prompt[:-1]).cache
        tokens = runtime.stream_generate(prompt[-1:], len(answer), prompt_cache=cache)
        got = [next(tokens).token for _ in range(2)]
        with monkeypatch.context() as patch:
            _from_experts(patch, 3)
            with pytest.raises(KeyboardInterrupt):
                next(tokens)
        rest = runtime.stream_generate(got[-1:], len(answer) - 2, prompt_cache=cache)
        assert got + [r.token for r in rest] == answer


class _CtrlC:
    """Sends this process a SIGINT some seconds from now; leave the block to call it off."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        self._previous = signal.signal(
            signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT)
        )
        signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._previous)


def test_ctrl_c_at_any_moment_of_a_prefill(intact, prompt):
    """Forty signals spread over the prefill: each leaves everything as it was."""
    tail = random_tokens(100, 20, seed=8)
    expected = stock_greedy(stock_model(intact), prompt + tail, 5)
    with nothing_left(), mlx_stream.load(intact, memory_budget=ROOMY, chunk_tokens=16) as runtime:
        cache = runtime.prefill(prompt).cache
        before, interrupted = cache_contents(cache), 0
        started = time.monotonic()
        runtime.prefill(tail, runtime.prefill(prompt).cache)
        seconds = (time.monotonic() - started) / 2
        for n in range(40):
            try:
                with _CtrlC(seconds * (n + 0.5) / 40):
                    runtime.prefill(tail, cache)
            except KeyboardInterrupt:
                interrupted += 1
                assert_same_contents(cache, before)
            else:  # it was quicker this time
                cache = runtime.prefill(prompt).cache
        assert interrupted >= 10
        got = [r.token for r in runtime.stream_generate(tail, 5, prompt_cache=cache)]
        assert got == expected


def test_ctrl_c_at_any_moment_of_decode(intact, prompt, answer):
    """The runtime answers rightly after each; no slot of the expert cache is lost."""
    with nothing_left(), mlx_stream.load(intact, memory_budget=ROOMY) as runtime:
        started = time.monotonic()
        list(runtime.stream_generate(prompt, 40))
        seconds = time.monotonic() - started
        for n in range(20):
            with contextlib.suppress(KeyboardInterrupt), _CtrlC(seconds * (n + 0.5) / 20):
                list(runtime.stream_generate(prompt, 40))
            assert [r.token for r in runtime.stream_generate(prompt, 3)] == answer[:3]
        records = runtime.engine.decoder.cache
        assert records._slots == len(records) + len(records._free)


def test_generator_dropped_half_way(intact, prompt, answer):
    with nothing_left(), mlx_stream.load(intact, memory_budget=ROOMY) as runtime:
        tokens = runtime.stream_generate(prompt, len(answer))
        next(tokens)
        tokens.close()
        assert [r.token for r in runtime.stream_generate(prompt, len(answer))] == answer


@pytest.mark.parametrize("delay", [0.0, 0.4])
def test_ctrl_c_on_the_command_line(tmp_path, delay):
    """During the prefill of a long prompt: exit code 130, soon, and nothing in the folder."""
    text = tmp_path / "long.txt"
    text.write_text((demo_path() / "heldout.txt").read_text(encoding="utf-8") * 2)
    work = tmp_path / "work"
    work.mkdir()
    process = subprocess.Popen(
        [*GENERATE, "--prompt-file", str(text), "--max-tokens", "500", "--receipt", "receipt.json"],
        cwd=work,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        first = process.stderr.readline()  # printed when the model is loaded
        assert first.startswith("Runtime("), first + process.stderr.read()
        time.sleep(delay)
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=TIMEOUT)
        seconds = time.monotonic() - started
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert err.strip() == "interrupted"
    assert out == ""
    assert seconds < SIGNAL_TO_EXIT_SECONDS
    assert list(work.iterdir()) == []


def test_ctrl_c_while_tokens_come(intact, tmp_path):
    """What was printed stays; no receipt of half an answer."""
    options = ("--model", str(intact), "--prompt", "1 2 3", "--max-tokens", "-1")
    process = subprocess.Popen(
        [*GENERATE, *options, "--verbose", "false", "--receipt", "receipt.json"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        process.stdout.read(20)
        started = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert err.strip() == "interrupted"
    assert time.monotonic() - started < SIGNAL_TO_EXIT_SECONDS
    assert list(tmp_path.iterdir()) == []
