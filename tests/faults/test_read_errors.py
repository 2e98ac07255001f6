"""Disks that answer EIO: a typed error with file and offset, and the runtime goes on afterwards."""

from __future__ import annotations

import errno
import os
import threading
import time

import pytest

import mlx_stream
from mlx_stream import errors
from tests.support.checkpoints import random_tokens, stock_greedy, stock_model
from tests.support.faults import (
    FailingReads,
    assert_same_contents,
    cache_contents,
    install_fault,
    nothing_left,
    shards,
)

ROOMY = "1GB"


@pytest.fixture
def fault(monkeypatch) -> FailingReads:
    """The fault hook of every runtime that the test loads."""
    hook = FailingReads()
    install_fault(monkeypatch, hook)
    return hook


@pytest.fixture(scope="module")
def tight(intact) -> int:
    """The smallest budget: single experts as read groups, two slots, one cached expert."""
    with mlx_stream.load(intact, memory_budget=ROOMY) as runtime:
        total = runtime.plan(1).memory
        low = total.resident + total.scratch
        for budget in range(low, low + (64 << 20), 1 << 16):
            runtime.engine.budget.total = budget
            try:
                runtime.plan(40)
            except errors.BudgetError:
                continue
            return budget
    raise AssertionError("no budget fits")


def _tokens(runtime, prompt, count, **options) -> list[int]:
    return [r.token for r in runtime.stream_generate(prompt, count, **options)]


def _check_error(error, fault, folder) -> None:
    assert isinstance(error, errors.ReadError)
    # Several threads may have failed; who ends first is reported.
    named = [(str(shards(folder)[file]), f"at offset {at}") for file, at in fault.failed]
    assert any(error.file == file and place in str(error) for file, place in named)
    assert "Input/output error" in str(error)
    assert error.remedy


@pytest.mark.parametrize("skip", [0, 1, 5, 11])
def test_prefill_fails_and_the_next_prompt_works(intact, prompt, answer, fault, tight, skip):
    with nothing_left(), mlx_stream.load(intact, memory_budget=tight) as runtime:
        assert len(runtime.plan(len(prompt)).layers[0].groups) == 8
        fault.arm(skip=skip)
        with pytest.raises(errors.ReadError) as caught:
            runtime.prefill(prompt)
        _check_error(caught.value, fault, intact)
        assert runtime.last_receipt is None
        fault.disarm()
        assert _tokens(runtime, prompt, len(answer)) == answer


def test_one_bad_read_in_one_thread_fails_the_prompt(intact, prompt, answer, fault):
    """The other reads of the group succeed; none of their bytes may be used."""
    with nothing_left(), mlx_stream.load(intact, memory_budget=ROOMY) as runtime:
        fault.arm(skip=2, times=1)
        with pytest.raises(errors.ReadError) as caught:
            runtime.prefill(prompt)
        _check_error(caught.value, fault, intact)
        assert _tokens(runtime, prompt, len(answer)) == answer


def test_short_prompt_fails_and_works(intact, fault):
    """A prompt of a few tokens reads only the routed experts, after routing."""
    model = stock_model(intact)
    prompt = random_tokens(model, 3, seed=1)
    with nothing_left(), mlx_stream.load(intact, memory_budget=ROOMY) as runtime:
        assert runtime.plan(3).mode == "union"
        fault.arm(skip=4)
        with pytest.raises(errors.ReadError) as caught:
            runtime.prefill(prompt)
        _check_error(caught.value, fault, intact)
        fault.disarm()
        assert _tokens(runtime, prompt, 5) == stock_greedy(model, prompt, 5)


def test_a_users_cache_survives_a_failed_prefill(intact, prompt, fault):
    tail = random_tokens(100, 40, seed=8)
    expected = stock_greedy(stock_model(intact), prompt + tail, 5)
    with nothing_left(), mlx_stream.load(intact, memory_budget=ROOMY) as runtime:
        cache = runtime.prefill(prompt).cache
        before = cache_contents(cache)
        for skip in (0, 3, 9):
            fault.arm(skip=skip)
            with pytest.raises(errors.ReadError):
                runtime.prefill(tail, cache)
            assert_same_contents(cache, before)
        fault.disarm()
        assert _tokens(runtime, tail, 5, prompt_cache=cache) == expected


@pytest.mark.parametrize("skip", [0, 3, 7])
def test_decode_fails_and_the_cache_can_go_on(intact, prompt, answer, fault, tight, skip):
    """The step that failed is undone: feeding its token again continues the answer."""
    with nothing_left(), mlx_stream.load(intact, memory_budget=tight, predict="off") as runtime:
        cache = runtime.prefill(prompt[:-1]).cache
        tokens = runtime.stream_generate(prompt[-1:], len(answer), prompt_cache=cache)
        got = [next(tokens).token, next(tokens).token]
        fault.arm(skip=skip)
        with pytest.raises(errors.ReadError) as caught:
            got.extend(response.token for response in tokens)
        _check_error(caught.value, fault, intact)
        assert got == answer[: len(got)]
        assert {leaf.offset for leaf in cache} == {len(prompt) + len(got) - 1}
        fault.disarm()
        rest = _tokens(runtime, got[-1:], len(answer) - len(got), prompt_cache=cache)
        assert got + rest == answer


def test_decode_after_a_failed_decode(intact, prompt, answer, fault, tight):
    """Failed reads leave no half-read expert in the decode cache."""
    with nothing_left(), mlx_stream.load(intact, memory_budget=tight, predict="off") as runtime:
        for skip in range(6):
            tokens = runtime.stream_generate(prompt, len(answer))
            next(tokens)
            fault.arm(skip=skip, times=1)
            with pytest.raises(errors.ReadError):
                list(tokens)
        fault.disarm()
        assert _tokens(runtime, prompt, len(answer)) == answer


def test_closing_in_the_middle_of_reads(intact, prompt, fault):
    """close() while a generator is suspended: its next step is a typed error, not a hang."""
    with nothing_left():
        runtime = mlx_stream.load(intact, memory_budget=ROOMY)
        tokens = runtime.stream_generate(prompt, 5)
        next(tokens)
        runtime.close()
        runtime.close()
        with pytest.raises((errors.MlxStreamError, RuntimeError)):
            list(tokens)
        with pytest.raises(errors.MlxStreamError):
            runtime.prefill(prompt)


def test_nothing_writes_after_a_failed_prefill(intact, prompt, fault, monkeypatch, tight):
    """When the error arrives every other read of the prompt has ended or was dropped."""
    inside, lock = [0], threading.Lock()
    bad = threading.Event()

    def slow(file: int, offset: int, nbytes: int) -> None:
        first = not bad.is_set()
        bad.set()
        if first:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        with lock:
            inside[0] += 1
        time.sleep(0.2)
        with lock:
            inside[0] -= 1

    bad.set()
    install_fault(monkeypatch, slow)
    with nothing_left(), mlx_stream.load(intact, memory_budget=tight) as runtime:
        bad.clear()
        with pytest.raises(errors.ReadError):
            runtime.prefill(prompt)
        assert inside[0] == 0
        before = runtime.engine.reader.counters
        time.sleep(0.3)
        assert runtime.engine.reader.counters == before
