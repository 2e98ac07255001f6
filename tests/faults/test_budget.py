"""A budget that is too small: one error before any expert byte is read, and its advice works."""

from __future__ import annotations

import re

import pytest

import mlx_stream
from mlx_stream import errors
from mlx_stream.config import parse_bytes
from tests.support.faults import FailingReads, fails, install_fault, nothing_left

LONG = 2000


@pytest.fixture
def reads(monkeypatch) -> FailingReads:
    """Counts the expert reads of every runtime; none fails."""
    hook = FailingReads()
    install_fault(monkeypatch, hook)
    return hook


def _advice(error: errors.BudgetError) -> str:
    """The budget that the error names, as a user would copy it."""
    found = re.search(r"memory_budget to ([\d.]+ [KMG]?B) or more", error.remedy)
    assert found, error.remedy
    return found.group(1)


@pytest.mark.parametrize("budget", [1, 100_000, "2MB", "20MB"])
def test_named_budget_works_at_the_first_try(intact, prompt, answer, reads, budget):
    """Whether the load or the prompt finds out, the next try succeeds."""
    error = None
    with nothing_left():
        try:
            with mlx_stream.load(intact, memory_budget=budget) as runtime:
                runtime.prefill(prompt)
        except errors.BudgetError as caught:
            error = caught.with_traceback(None)
    assert error is not None, "the budget should have been too small"
    assert reads.calls == 0
    with nothing_left(), mlx_stream.load(intact, memory_budget=_advice(error)) as runtime:
        got = [r.token for r in runtime.stream_generate(prompt, len(answer))]
    assert got == answer


def test_prompt_too_long_for_the_budget(intact, prompt, answer, reads):
    """The runtime survives, and says what the long prompt needs."""
    with mlx_stream.load(intact, memory_budget="1GB") as roomy:
        enough = roomy.plan(len(prompt)).memory
    budget = enough.total - enough.staging - enough.expert_cache + (1 << 20)
    with nothing_left(), mlx_stream.load(intact, memory_budget=budget) as runtime:
        ids = (prompt * LONG)[: LONG * 8]
        with pytest.raises(errors.BudgetError) as caught:
            runtime.prefill(ids)
        assert reads.calls == 0
        assert "kv" in str(caught.value)
        with mlx_stream.load(intact, memory_budget=_advice(caught.value)) as bigger:
            bigger.plan(len(ids))
        assert parse_bytes(_advice(caught.value)) > budget
        assert [r.token for r in runtime.stream_generate(prompt, len(answer))] == answer


def test_cache_of_an_earlier_prompt_counts(intact, prompt, reads):
    """A second prompt on a cache is refused before it reads, and the cache is untouched."""
    with mlx_stream.load(intact, memory_budget="1GB") as roomy:
        fits = roomy.plan(len(prompt)).memory
    budget = fits.total - fits.staging - fits.expert_cache + (1 << 20)
    with nothing_left(), mlx_stream.load(intact, memory_budget=budget) as runtime:
        cache = runtime.prefill(prompt).cache
        reads.calls = 0
        for leaf in cache:
            leaf.offset += 100_000  # as if a book had gone before
        with pytest.raises(errors.BudgetError):
            runtime.prefill(prompt, cache)
        assert reads.calls == 0


def test_nothing_but_the_error_is_left(intact):
    with fails(errors.BudgetError) as caught:
        mlx_stream.load(intact, memory_budget=1)
    assert str(caught.error).count("what to do:") == 1
