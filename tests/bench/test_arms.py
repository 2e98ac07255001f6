"""What a benchmark runs: every combination once, every arm first in some round."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_stream.bench.arms import (
    CHUNK_MAJOR,
    DECODE,
    LAYER_MAJOR,
    ORDERS,
    STOCK,
    Arm,
    Setting,
    rotate,
    sweep,
)
from mlx_stream.config import ConfigError

SETTINGS = (Setting(10**9), Setting(2 * 10**9, io="buffered"))


def all_arms(**changes):
    options = {
        "orders": ORDERS,
        "tokens": (100, 2000),
        "chunks": (64, 512),
        "settings": SETTINGS,
        "new_tokens": 7,
        "stock_tokens": 500,
    }
    return sweep(**(options | changes))


def test_combinations_that_differ():
    arms = all_arms(settings=SETTINGS[:1])
    by_order = {order: [a for a in arms if a.order == order] for order in ORDERS}
    assert [(a.tokens, a.chunk) for a in by_order[LAYER_MAJOR]] == [
        (100, 64),
        (100, 512),
        (2000, 64),
        (2000, 512),
    ]
    # A prompt that is one chunk has no order of its own.
    assert [(a.tokens, a.chunk) for a in by_order[CHUNK_MAJOR]] == [
        (100, 64),
        (2000, 64),
        (2000, 512),
    ]
    assert [a.tokens for a in by_order[STOCK]] == [100]
    assert [(a.tokens, a.new_tokens) for a in by_order[DECODE]] == [(100, 7), (2000, 7)]
    assert len(set(arms)) == len(arms)


@pytest.mark.parametrize("empty", ["orders", "tokens", "chunks"])
def test_nothing_to_run(empty):
    with pytest.raises(ConfigError):
        all_arms(**{empty: ()})


def test_an_unknown_order():
    with pytest.raises(ConfigError, match="unknown order"):
        all_arms(orders=("layer-major", "sideways"))


@given(st.integers(1, 12))
def test_every_round_has_every_arm_and_settings_stay_together(rounds):
    arms = all_arms()
    plan = rotate(arms, rounds)
    assert len(plan) == rounds
    for order in plan:
        assert sorted(map(str, order)) == sorted(map(str, arms))
        changes = sum(a.setting != b.setting for a, b in pairwise(order))
        assert changes == len(SETTINGS) - 1, "an engine is opened once a setting and round"


def test_every_arm_is_first_once():
    arms = [Arm(LAYER_MAJOR, n, 64, SETTINGS[0]) for n in (1, 2, 3)]
    assert [order[0].tokens for order in rotate(arms, 3)] == [1, 2, 3]
