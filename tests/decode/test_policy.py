"""Eviction policies against plain reference models, under any order of cache operations."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_stream.decode.lfu_policy import LfuPolicy
from mlx_stream.decode.policy import (
    DEFAULT_POLICY,
    POLICIES,
    S3FifoPolicy,
    make_policy,
)

FAST = settings(max_examples=150, deadline=None)
LAYERS, EXPERTS = 3, 6
KEYS = [(layer, expert) for layer in range(0, 2 * LAYERS, 2) for expert in range(EXPERTS)]

use = st.tuples(st.just("use"), st.sampled_from(KEYS), st.sets(st.sampled_from(KEYS), max_size=6))
seed = st.tuples(st.just("seed"), st.sampled_from(KEYS), st.floats(0.01, 50))
drop = st.tuples(st.just("drop"), st.sampled_from(KEYS))
resize = st.tuples(st.just("resize"), st.integers(1, len(KEYS)))
tick = st.tuples(st.just("tick"))
operations = st.lists(st.one_of(use, use, use, seed, drop, resize, tick), max_size=80)


class Driver:
    """A cache of keys that obeys a policy and asks a reference the same questions."""

    def __init__(self, policy, reference, capacity):
        self.policy, self.reference, self.capacity = policy, reference, capacity
        self.resident = []

    def both(self, name, *args):
        getattr(self.policy, name)(*args)
        getattr(self.reference, name)(*args)

    def make_room(self, pinned):
        """False when everything is pinned."""
        while len(self.resident) >= self.capacity:
            victim = self.policy.victim(pinned)
            assert (victim is None) == all(k in pinned for k in self.resident)
            if victim is None:
                return False
            assert victim in self.resident
            assert victim not in pinned
            self.reference.agrees(victim, pinned)
            self.remove(victim)
        return True

    def remove(self, key):
        self.resident.remove(key)
        self.both("forget", key)

    def run(self, ops):
        for name, *args in ops:
            getattr(self, name)(*args)

    def use(self, key, pinned):
        if key in self.resident:
            self.both("touch", key)
        elif self.make_room(pinned):
            self.resident.append(key)
            self.both("admit", key)

    def seed(self, key, weight):
        if key not in self.resident and self.make_room(set()):
            self.resident.append(key)
            self.both("admit", key, weight)

    def drop(self, key):
        if key in self.resident:
            self.remove(key)
        else:
            self.both("forget", key)

    def resize(self, capacity):
        self.capacity = capacity
        self.both("resize", capacity)
        if len(self.resident) > capacity:
            self.capacity += 1
            self.make_room(set())
            self.capacity = capacity

    def tick(self):
        self.both("tick")


class ReferenceLru:
    def __init__(self):
        self.order = []

    def admit(self, key, weight=0.0):
        self.order.append(key)

    def touch(self, key):
        self.order.remove(key)
        self.order.append(key)

    def forget(self, key):
        if key in self.order:
            self.order.remove(key)

    def agrees(self, victim, pinned):
        assert victim == next(k for k in self.order if k not in pinned)

    def tick(self):
        pass

    def resize(self, capacity):
        pass


class ReferenceLfu:
    """Every use with its time; a count is a sum over all of them."""

    def __init__(self, half_life, trust, turn):
        self.half_life, self.trust, self.turn = half_life, trust, turn
        self.now, self.layer = 0, -1
        self.uses = {}
        self.layers, self.resident = set(), {}

    def count(self, key):
        uses = self.uses.get(key, [])
        return sum(w * 0.5 ** ((self.now - t) / self.half_life) for t, w in uses)

    def admit(self, key, weight=0.0):
        self.layers.add(key[0])
        self.resident[key] = None
        if weight > 0:
            best = max(self.count(key), weight * self.trust)
            self.uses[key] = [(self.now, best)]
        else:
            self.touch(key)

    def touch(self, key):
        self.uses.setdefault(key, []).append((self.now, 1.0))
        self.layer = key[0]

    def forget(self, key):
        self.resident.pop(key, None)

    def value(self, key):
        order = sorted(self.layers)
        after = [layer for layer in order if layer > self.layer]
        turn = after + [layer for layer in order if layer <= self.layer]
        chance = self.count(key) * (1 - 0.5 ** (1 / self.half_life))
        return chance - self.turn * turn.index(key[0]) / len(order)

    def agrees(self, victim, pinned):
        lowest = min(self.value(k) for k in self.resident if k not in pinned)
        assert self.value(victim) == pytest.approx(lowest, rel=1e-6, abs=1e-9)

    def tick(self):
        self.now += 1

    def resize(self, capacity):
        pass


class ReferenceS3Fifo:
    """Three lists, oldest first; the paper's algorithm, with pinned records stepped over."""

    def __init__(self, capacity):
        self.small, self.main, self.ghost, self.uses = [], [], [], {}
        self.resize(capacity)

    def resize(self, capacity):
        self.small_size = max(1, capacity // 10)
        self.ghost_size = max(1, capacity - self.small_size)

    def admit(self, key, weight=0.0):
        queue = self.main if key in self.ghost or weight > 0 else self.small
        self.ghost = [k for k in self.ghost if k != key]
        queue.append(key)
        self.uses[key] = 0

    def touch(self, key):
        self.uses[key] = min(3, self.uses[key] + 1)

    def forget(self, key):
        if key in self.small:
            self.small.remove(key)
            self.ghost = [*self.ghost, key][-self.ghost_size :]
        elif key in self.main:
            self.main.remove(key)

    def agrees(self, victim, pinned):
        def from_small():
            for key in list(self.small):
                if key not in pinned:
                    if self.uses[key] <= 1:
                        return key
                    self.small.remove(key)
                    self.main.append(key)
                    self.uses[key] = 0
            return None

        def from_main():
            while any(k not in pinned for k in self.main):
                for key in list(self.main):
                    if key not in pinned:
                        if not self.uses[key]:
                            return key
                        self.uses[key] -= 1
                        self.main.remove(key)
                        self.main.append(key)
            return None

        first = len(self.small) >= self.small_size
        found = (from_small() or from_main()) if first else (from_main() or from_small())
        assert victim == (found or from_main())

    def tick(self):
        pass


@FAST
@given(operations, st.integers(1, 12))
def test_lru_equals_a_list(ops, capacity):
    Driver(make_policy("lru", capacity=capacity), ReferenceLru(), capacity).run(ops)


@FAST
@given(
    operations,
    st.integers(1, 12),
    st.sampled_from([1.0, 8.0, 64.0]),
    st.sampled_from([0.0, 0.05, 0.5]),
)
def test_lfu_equals_a_sum_over_all_uses(ops, capacity, half_life, turn):
    policy = LfuPolicy(capacity, half_life=half_life, seed_trust=0.25, turn=turn)
    Driver(policy, ReferenceLfu(half_life, 0.25, turn), capacity).run(ops)


@FAST
@given(operations, st.integers(1, 30))
def test_s3fifo_equals_three_lists(ops, capacity):
    Driver(S3FifoPolicy(capacity), ReferenceS3Fifo(capacity), capacity).run(ops)


class Silent:
    """A reference without an opinion."""

    def __getattr__(self, name):
        return lambda *args: None


@pytest.mark.parametrize("name", POLICIES)
@FAST
@given(operations, st.integers(1, 12), st.data())
def test_any_policy_survives_anything(name, ops, capacity, data):
    policy = make_policy(name, capacity=capacity)
    driver = Driver(policy, Silent(), capacity)
    driver.run(ops)
    everything = set(driver.resident)
    assert policy.victim(everything) is None
    left = []
    while (victim := policy.victim(set())) is not None:
        left.append(victim)
        policy.forget(victim)
    assert sorted(left) == sorted(everything)
    policy.clear()
    policy.admit((1, 1))
    assert policy.victim(()) == (1, 1)


@pytest.mark.parametrize("name", POLICIES)
@FAST
@given(operations, st.integers(1, 12), st.sets(st.sampled_from([0, 2, 4])))
def test_records_of_spared_layers_stay(name, ops, capacity, spared):
    policy = make_policy(name, capacity=capacity)
    driver = Driver(policy, Silent(), capacity)
    driver.run(ops)
    left = set(driver.resident)
    while (victim := policy.victim(set(), spared)) is not None:
        assert victim in left
        left.discard(victim)
        policy.forget(victim)
    assert left == {key for key in driver.resident if key[0] in spared}


@pytest.mark.parametrize("name", POLICIES)
def test_an_empty_policy_has_no_victim(name):
    policy = make_policy(name, capacity=4)
    assert policy.name == name
    assert policy.victim(()) is None
    policy.forget((0, 0))
    policy.tick()
    policy.resize(1)
    assert policy.victim(()) is None


def test_the_default_is_one_of_them():
    assert DEFAULT_POLICY in POLICIES
    with pytest.raises(AssertionError, match="unknown policy"):
        make_policy("mru", capacity=1)


def test_lfu_counts_outlive_residence():
    policy = LfuPolicy(turn=0.0)
    policy.admit((0, 0))
    for _ in range(5):
        policy.touch((0, 0))
    policy.forget((0, 0))
    policy.admit((0, 1))
    policy.touch((0, 1))
    policy.admit((0, 0))
    assert policy.victim(()) == (0, 1)
    policy.clear()
    policy.admit((0, 0))
    policy.admit((0, 1))
    policy.touch((0, 1))
    assert policy.victim(()) == (0, 0), "clear forgets counts"


def test_lfu_of_two_alike_the_layer_that_has_just_run_leaves():
    policy = LfuPolicy()
    for layer in (0, 1, 2):
        policy.admit((layer, 7))
    assert policy.victim(()) == (2, 7)
    policy.touch((0, 7))
    policy.forget((0, 7))
    assert policy.victim(()) == (2, 7), "layer 1 runs next, then 2"
    policy.touch((1, 7))
    policy.touch((2, 7))
    policy.touch((1, 7))
    policy.touch((2, 7))
    assert policy.victim({(2, 7)}) == (1, 7)


def test_lfu_counts_do_not_overflow():
    policy = LfuPolicy(half_life=0.5, turn=0.0)
    policy.admit((0, 0))
    for _ in range(2000):  # 2**4000 is no float
        policy.tick()
        policy.touch((0, 0))
    policy.admit((0, 1))
    assert policy.victim(()) == (0, 1)
    for _ in range(3):
        policy.tick()
        policy.touch((0, 1))
    assert policy.victim(()) == (0, 0), "recent uses win"


def test_lfu_heaps_stay_small():
    policy = LfuPolicy()
    policy.admit((0, 0))
    policy.admit((1, 0))
    for _ in range(10_000):
        policy.touch((0, 0))
        policy.touch((1, 0))
    assert sum(map(len, policy._heaps.values())) < 500


@pytest.mark.parametrize("name", POLICIES)
def test_a_layer_call_costs_little(name):
    """48 layers of 128 experts, 8 a token; a generous bound, since other work shares the cores."""
    policy = make_policy(name, capacity=1536)
    for layer in range(48):
        for expert in range(32):
            policy.admit((layer, expert), 1.0)
    started = time.perf_counter()
    for step in range(20):
        for layer in range(48):
            keys = [(layer, (expert * 7 + step) % 32) for expert in range(6)]
            for key in keys:
                policy.touch(key)
            victim = policy.victim(set(keys))
            policy.forget(victim)
            policy.admit(victim, 1.0)
        policy.tick()
    assert (time.perf_counter() - started) / (20 * 48) < 1e-3
