"""The governor on simulated machines: pressure, recovery, probes that pay and those that do not."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from mlx_stream.decode.governor import Governor, GovernorTuning, default_reserve

MB = 10**6
GB = 10**9
PLENTY = 100 * GB
TUNING = GovernorTuning()
TRIAL = TUNING.window + TUNING.fill  # tokens at most between two steps


class Machine:
    """Memory shared with other programs, a cache that fills, and a model of what a token costs.

    Args:
        cost: ``bytes in the cache -> (compute seconds, stall seconds)`` of a token.
        fill: bytes that the cache can take in for each token.
        noise: standard deviation of the wall time, as a share.
        slot: bytes of an expert; the cache holds whole ones.
        lag: tokens until given back memory shows up as free.
    """

    def __init__(
        self,
        governor: Governor,
        cost: Callable[[int], tuple[float, float]],
        *,
        total: int = PLENTY,
        fill: int = 200 * MB,
        noise: float = 0.0,
        slot: int = MB,
        lag: int = 0,
        seed: int = 0,
    ) -> None:
        self.governor, self.cost, self.total = governor, cost, total
        self.fill, self.noise, self.slot, self.lag = fill, noise, slot, lag
        self.others = 0
        self.cache = 0
        self.random = random.Random(seed)
        self.targets: list[int] = []
        self.caches: list[int] = []

    def free(self) -> int:
        shown = max([self.cache, *self.caches[-self.lag :]]) if self.lag else self.cache
        return self.total - self.others - shown

    def run(self, tokens: int) -> list[int]:
        """Decode; returns the target after each token."""
        for _ in range(tokens):
            compute, stall = self.cost(self.cache)
            factor = max(0.3, 1 + self.noise * self.random.gauss(0, 1))
            target = self.governor.observe(
                self.free(), (compute + stall) * factor, stall * factor, self.cache
            )
            most = target // self.slot * self.slot
            self.caches.append(self.cache)
            self.cache = min(most, self.cache + self.fill)
            self.targets.append(target)
        return self.targets[-tokens:]


def pays(cache: int) -> tuple[float, float]:
    """The more cache, the fewer reads, up to 8 GB."""
    return 0.05, 0.10 * max(0.0, 1 - cache / (8 * GB))


def backfires(limit: int, slowdown: float = 1.5) -> Callable[[int], tuple[float, float]]:
    """As `pays`, but beyond `limit` everything gets slower."""

    def cost(cache: int) -> tuple[float, float]:
        compute, stall = pays(cache)
        return (compute * slowdown, stall * slowdown) if cache > limit else (compute, stall)

    return cost


def all_there(cache: int) -> tuple[float, float]:
    return 0.05, 0.0


def governor(**options) -> Governor:
    values = {"minimum": 100 * MB, "maximum": 16 * GB, "start": GB, "reserve": GB} | options
    return Governor(**values)


# --- rules for every sequence


@pytest.mark.parametrize("seed", range(20))
def test_bounds_hold_whatever_comes(seed):
    rng = random.Random(seed)
    g = governor(maximum=4 * GB)
    for _ in range(2000):
        free = rng.choice([0, GB - 1, GB, int(1.1 * GB), int(1.25 * GB), 2 * GB, PLENTY])
        wall = rng.choice([0.0, 1e-9, 0.1, 5.0])
        current = rng.choice([None, 0, g.target // 2, g.target, 2 * g.target])
        target = g.observe(free, wall, wall * rng.random(), current)
        assert g.minimum <= target <= g.maximum
        assert isinstance(target, int)
        if free < g.reserve:
            assert target <= g.level


def test_the_same_observations_give_the_same_targets():
    runs = [Machine(governor(), backfires(3 * GB), noise=0.2, seed=7).run(800) for _ in range(2)]
    assert runs[0] == runs[1]


def test_the_start_is_clamped():
    assert governor(start=1).target == 100 * MB
    assert governor(start=PLENTY).target == 16 * GB


@pytest.mark.parametrize("bad", [{"minimum": -1}, {"minimum": 17 * GB}, {"reserve": -1}])
def test_bounds_that_cannot_be(bad):
    with pytest.raises(ValueError, match="minimum"):
        governor(**bad)


def test_the_default_reserve():
    assert default_reserve(8 * GB) == GB
    assert default_reserve(64 * GB) == 64 * GB // 20


# --- pressure


def test_it_shrinks_at_once_by_what_is_missing():
    g = governor(start=4 * GB)
    assert g.observe(GB, 0.1, 0.0, 4 * GB) == 4 * GB
    assert g.observe(GB - 300 * MB, 0.1, 0.0, 4 * GB) == 4 * GB - 300 * MB


def test_what_the_cache_does_not_hold_cannot_be_given_back():
    g = governor(start=4 * GB)
    assert g.observe(GB - 300 * MB, 0.1, 0.0, 2 * GB) == 2 * GB - 300 * MB


def test_never_below_the_minimum():
    g = governor(start=4 * GB)
    for _ in range(100):
        target = g.observe(0, 0.1, 0.1, g.target)
    assert target == g.minimum


def test_memory_that_shows_up_late_is_not_asked_for_twice():
    for lag in range(TUNING.settle + 1):
        g = governor(start=4 * GB)
        m = Machine(g, all_there, total=8 * GB, lag=lag, fill=PLENTY)
        m.run(20)
        m.others = 3 * GB + 300 * MB  # 300 MB less than the reserve is left
        assert set(m.run(20)) == {4 * GB - 300 * MB}, lag


def test_pressure_that_stays_is_answered_again():
    """Another program takes what was given back."""
    g = governor(start=4 * GB)
    targets = [g.observe(GB - 100 * MB, 0.1, 0.0, g.target) for _ in range(3 * TUNING.settle + 3)]
    assert targets[0] == 4 * GB - 100 * MB
    assert targets[TUNING.settle] == targets[0]
    assert targets[TUNING.settle + 1] == 4 * GB - 200 * MB
    assert targets[-1] == 4 * GB - 300 * MB


def test_pressure_that_grows_is_answered_at_once():
    g = governor(start=4 * GB)
    assert g.observe(GB - 100 * MB, 0.1, 0.0, g.target) == 4 * GB - 100 * MB
    assert g.observe(GB - 250 * MB, 0.1, 0.0, g.target) == 4 * GB - 250 * MB


def test_pressure_ends_a_trial_below_where_it_began():
    g = governor()
    m = Machine(g, pays)
    m.run(TRIAL)
    assert g.target > g.level == GB
    m.others = PLENTY - GB
    assert m.run(1)[0] < GB


# --- recovery


def squeezed(**options) -> Machine:
    """A machine that is free again after pressure took half of the cache."""
    m = Machine(governor(start=4 * GB, **options), all_there, total=8 * GB, fill=PLENTY)
    m.run(10)
    m.others = 5 * GB
    m.run(10)
    assert m.governor.target == 2 * GB
    m.others = 0
    return m


def test_it_grows_back_slowly_and_not_beyond():
    m = squeezed()
    assert set(m.run(TUNING.recover_after - 1)) == {2 * GB}
    assert m.run(1) == [int(2.4 * GB)]  # a tenth of the 4 GB that it had
    assert set(m.run(TUNING.recover_after - 1)) == {int(2.4 * GB)}
    assert m.run(1) == [int(2.8 * GB)]
    m.run(20 * TUNING.recover_after)
    assert m.governor.target == 4 * GB


def test_memory_just_above_the_reserve_is_not_free():
    m = squeezed()
    m.others = 8 * GB - 2 * GB - m.governor.reserve - m.governor.hysteresis + 1
    assert set(m.run(200)) == {2 * GB}


def test_each_token_without_free_memory_starts_the_wait_again():
    m = squeezed()
    for _ in range(10):
        m.others = 0
        m.run(TUNING.recover_after - 1)
        m.others = 5 * GB
        m.run(1)
    assert m.governor.target == 2 * GB


def test_it_grows_back_only_into_what_is_free():
    """No see-saw: a squeeze by another program that stays ends in one size."""
    m = squeezed()
    m.others = int(4.2 * GB)  # room for 2.55 GB of cache above reserve and hysteresis
    m.run(20 * TUNING.recover_after)
    targets = m.run(500)
    assert len(set(targets)) == 1
    assert 2.5 * GB <= targets[0] <= 2.56 * GB
    assert m.free() >= m.governor.reserve + m.governor.hysteresis


# --- the probe


def test_it_does_not_take_what_is_free_at_once():
    g = governor()
    m = Machine(g, pays)
    targets = m.run(TRIAL)
    assert targets[0] == GB
    assert max(targets) == int(1.25 * GB)


def test_it_grows_while_it_pays_and_stops_when_reads_cost_nothing():
    m = Machine(governor(), pays)
    m.run(1500)
    assert 0.9 * 8 * GB < m.governor.target < 1.3 * 8 * GB
    assert not m.governor.holding
    assert len(set(m.run(500))) == 1


def test_it_stops_at_the_maximum():
    m = Machine(governor(maximum=2 * GB), pays)
    m.run(1000)
    assert m.governor.target == m.governor.level == 2 * GB


def test_it_stops_before_the_reserve():
    m = Machine(governor(), pays, total=4 * GB)
    m.run(1000)
    assert m.free() >= m.governor.reserve + m.governor.hysteresis
    assert 2.7 * GB < m.governor.target <= 2.75 * GB
    assert m.targets == sorted(m.targets)  # and was never squeezed on the way


def test_without_stalls_it_stays():
    m = Machine(governor(), all_there)
    assert set(m.run(1000)) == {GB}


@pytest.mark.parametrize("before", range(500, 500 + TUNING.window))
def test_later_stalls_are_a_reason_to_grow(before):
    m = Machine(governor(), all_there)
    m.run(before)
    m.cost = pays
    m.run(500)
    assert m.governor.target > 1.5 * GB


def test_a_step_that_makes_tokens_slower_is_taken_back_for_good():
    m = Machine(governor(), backfires(2 * GB))
    m.run(600)
    assert max(m.targets) > 2 * GB
    assert m.governor.holding
    assert 1.5 * GB < m.governor.target <= 2 * GB
    assert set(m.run(1000)) == {m.governor.target}


def test_slower_by_less_than_the_tolerance_is_not_slower():
    def cost(cache: int) -> tuple[float, float]:
        return (0.0515 if cache > 1.1 * GB else 0.05), 0.01

    m = Machine(governor(maximum=int(1.25 * GB)), cost)
    m.run(500)
    assert m.governor.target == int(1.25 * GB)


def test_one_slow_window_is_not_enough():
    m = Machine(governor(maximum=int(1.25 * GB)), pays)
    while m.governor.target == GB:
        m.run(1)
    good, m.cost = m.cost, lambda cache: (0.5, 0.1)  # the first window of the trial
    m.run(TUNING.window + 3)
    m.cost = good
    m.run(2 * TRIAL)
    assert not m.governor.holding
    assert m.governor.level == int(1.25 * GB)


def test_outliers_do_not_decide():
    """A token in ten takes twenty times as long: medians do not see it."""
    calls = iter(range(10**6))

    def cost(cache: int) -> tuple[float, float]:
        compute, stall = pays(cache)
        return (compute * 20 if next(calls) % 10 == 0 else compute), stall

    m = Machine(governor(), cost)
    m.run(2000)
    assert not m.governor.holding
    assert m.governor.target > 6 * GB


@pytest.mark.parametrize("noise", [0.05, 0.10, 0.20])
def test_noise_rarely_stops_what_pays(noise):
    final = []
    for seed in range(40):
        m = Machine(governor(), pays, noise=noise, seed=seed)
        m.run(1500)
        final.append(m.governor.target)
    assert sum(t > 4 * GB for t in final) >= (36 if noise < 0.2 else 28)


@pytest.mark.parametrize("noise", [0.05, 0.10, 0.20])
def test_noise_does_not_hide_what_backfires(noise):
    for seed in range(40):
        m = Machine(governor(), backfires(2 * GB), noise=noise, seed=seed)
        m.run(1500)
        assert m.governor.target <= 2 * GB, seed


def test_a_cache_that_fills_slowly_is_given_time():
    """Measured before it is full, a step would look useless; it must not look harmful either."""
    m = Machine(governor(), pays, fill=10 * MB)
    m.run(2500)
    assert not m.governor.holding
    assert m.governor.target > 6 * GB


def test_without_the_current_size_it_waits_as_long_as_a_fill_may_take():
    g = governor()
    targets = [g.observe(PLENTY, 0.1, 0.05) for _ in range(2 * TRIAL)]
    assert targets.index(int(1.25 * GB)) == TRIAL - 1
    assert targets.count(int(1.25 * GB)) == TRIAL


# --- a new prompt


def test_a_new_prompt_may_try_again():
    m = Machine(governor(), backfires(2 * GB))
    m.run(600)
    settled = m.governor.target
    assert m.governor.holding
    assert m.governor.restart() == settled
    m.cost = pays
    m.run(600)
    assert m.governor.target > 2 * GB


def test_a_new_prompt_takes_a_trial_back():
    m = Machine(governor(), pays)
    m.run(TRIAL)
    assert m.governor.target == int(1.25 * GB)
    assert m.governor.restart() == GB


def test_a_new_prompt_may_leave_less_room():
    g = governor(start=4 * GB)
    assert g.restart(2 * GB) == 2 * GB
    assert g.level == 2 * GB
    assert g.restart(1) == g.minimum
    g.restart(16 * GB)
    m = Machine(g, pays)
    m.run(2500)
    assert g.target > 4 * GB


def test_two_squeezes_in_one_trial_lose_nothing_of_the_level():
    m = Machine(governor(start=4 * GB, maximum=4 * GB), pays, total=8 * GB, fill=PLENTY)
    m.run(10)
    for _ in range(3):
        m.others = 5 * GB
        m.run(20)
        m.others = 0
        m.run(10)
    m.run(30 * TUNING.recover_after)
    assert m.governor.target == m.governor.level == 4 * GB
