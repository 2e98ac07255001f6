"""Plans and forecasts of many prompts from one look at the headers."""

import pytest

from mlx_stream.errors import BudgetError, MlxStreamError
from mlx_stream.planner.outline import open_outline
from mlx_stream.planner.plan import plan


@pytest.fixture(scope="module")
def outline(checkpoint):
    return open_outline(checkpoint("qwen3_moe"))


def test_it_is_the_plan_of_the_function(checkpoint, outline):
    budget = 1 << 30
    expected = plan(checkpoint("qwen3_moe"), 700, memory_budget=budget, chunk_tokens=64)
    assert outline.plan(700, budget=budget, chunk_tokens=64) == expected


def test_routed_bytes(outline):
    shape, index = outline.shape, outline.index
    each = {layer.expert_nbytes for layer in index.layers}
    assert outline.routed_nbytes == len(index.layers) * shape.top_k * each.pop()


@pytest.mark.parametrize("budget", [160_000_000, 200_000_000])
def test_the_longest_prompt_fits_and_a_longer_one_does_not(outline, budget):
    largest = outline.largest_prompt(budget=budget, chunk_tokens=128)
    assert largest > 0
    outline.plan(largest, budget=budget, chunk_tokens=128)
    with pytest.raises(BudgetError):
        outline.plan(largest + largest // 128 + 2, budget=budget, chunk_tokens=128)


def test_nothing_fits(outline):
    assert outline.largest_prompt(budget=1000, chunk_tokens=128) == 0


def test_an_empty_prompt(outline):
    with pytest.raises(MlxStreamError, match="empty"):
        outline.plan(0, budget=1 << 30, chunk_tokens=128)


def test_activations_of_two_bytes_need_less(checkpoint, outline):
    narrow = open_outline(checkpoint("qwen3_moe"), itemsize=2)
    wide = outline.plan(4000, budget=1 << 30, chunk_tokens=256).memory
    assert narrow.plan(4000, budget=1 << 30, chunk_tokens=256).memory.held < wide.held
