"""When predicted experts are read, and who leaves for them: counted on a cache without a disk."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from mlx_stream.backends.base import NoFence
from mlx_stream.decode.exact import ExactExecutor
from mlx_stream.decode.expert_cache import ExpertCache
from mlx_stream.decode.policy import POLICIES, make_policy
from mlx_stream.decode.prerouted_reads import AHEAD_SHARE, PreroutedReads
from mlx_stream.decode.slots import Record
from mlx_stream.decode.step_counts import StepCounts

LAYERS, EXPERTS, TOP_K, ALONE = 6, 32, 4, 2  # layers 0 and 1 route themselves
TOKENS, WARM = 160, 40


class Arrived:
    """A read that is over."""

    def done(self):
        return True

    def wait(self):
        pass

    def cancel(self):
        pass


class Slots:
    """Memory for records that nobody looks into."""

    slot_nbytes, overhead_nbytes = 1, 0

    def __init__(self):
        self.reads = []

    def take(self):
        return object()

    def drop(self, slot):
        pass

    def start_read(self, mlp, expert, slot):
        key = (mlp.layer.index, expert)
        self.reads.append(key)
        return Record(key, slot, None, Arrived(), read_nbytes=1)

    def may_read_ahead(self):
        return True

    def groups(self, mlp, records):
        return []

    def resize(self, slots, live, spare_nbytes):
        return live


class Computation:
    def add(self, groups):
        return NoFence()

    def outputs(self):
        return [None]


class Steps:
    """Runs layers one by one through the real executor."""

    def __init__(self, capacity, policy="lfu", *, ahead=True):
        layer = [SimpleNamespace(index=n, num_experts=EXPERTS, name=str(n)) for n in range(LAYERS)]
        self.mlps = [SimpleNamespace(layer=x) for x in layer]
        backend = SimpleNamespace(begin_decode=lambda *_: Computation(), capabilities=())
        self.store = Slots()
        policy = make_policy(policy, capacity=capacity)
        self.cache = ExpertCache(self.store, policy, capacity=capacity)
        self.exact = ExactExecutor(backend, self.cache, StepCounts())
        reader = SimpleNamespace(behind=nullcontext)
        self.reads = PreroutedReads(
            self.cache, reader, self.exact.counts, layers=range(LAYERS), top_k=TOP_K
        )
        if not ahead:
            self.reads.fill = lambda in_use=(), following=None: None
        self.exact.ahead, self.exact.held = self.reads, self.reads.held
        self.missed = [0] * LAYERS

    def plan(self, step):
        self.reads.plan([(self.mlps[n], step[n]) for n in range(ALONE, LAYERS)])
        self.reads.fill()

    def layer(self, n, ids):
        """Returns what was read meanwhile."""
        before, missed = len(self.store.reads), self.cache.counts.misses
        x, ids = np.zeros((1, 1)), np.array([ids])
        self.exact._run(SimpleNamespace(mlp=self.mlps[n]), x, ids, None, self.reads)
        self.exact.finish_step()
        self.missed[n] += self.cache.counts.misses - missed
        assert len(self.cache) <= self.cache.capacity
        return self.store.reads[before:]

    def run(self, steps):
        for t, step in enumerate(steps):
            if t:
                self.plan(step)
            if t == WARM:
                self.missed, self.store.reads[:] = [0] * LAYERS, []
            for n in range(LAYERS):
                self.layer(n, step[n])
            self.cache.policy.tick()
        return self


def text(seed):
    """Routing with favourites that change, and half of the experts kept from token to token."""
    rng, chance = np.random.default_rng(seed), 1 / np.arange(1, EXPERTS + 1)
    steps, last = [], [[] for _ in range(LAYERS)]
    for t in range(TOKENS):
        for n in range(LAYERS):
            order = np.random.default_rng((n, t // 60)).permutation(EXPERTS)
            kept = [e for e in last[n] if rng.random() < 0.4]
            new = rng.choice(order, EXPERTS, replace=False, p=chance / chance.sum()).tolist()
            last[n] = (kept + [e for e in new if e not in kept])[:TOP_K]
        steps.append([list(ids) for ids in last])
    return steps


@pytest.fixture(scope="module")
def texts():
    return [text(seed) for seed in range(3)]


STEP = [list(range(n, n + TOP_K)) for n in range(LAYERS)]


def keys(layer, ids):
    return [(layer, e) for e in ids]


def test_empty_slots_are_filled_at_once():
    steps = Steps(LAYERS * EXPERTS)
    steps.plan(STEP)
    assert steps.store.reads == [k for n in range(ALONE, LAYERS) for k in keys(n, STEP[n])]
    for n in range(ALONE, LAYERS):
        assert steps.layer(n, STEP[n]) == []
    assert steps.exact.counts.waits_avoided == TOP_K * (LAYERS - ALONE)


def full(capacity, **options):
    """A cache full of records of layer 5 that nobody will ask for."""
    steps = Steps(capacity, **options)
    for expert in range(20, 20 + capacity):
        steps.layer(5, [expert % EXPERTS])
    steps.store.reads.clear()
    return steps


@pytest.mark.parametrize("policy", POLICIES)
def test_a_full_cache_is_read_into_a_layer_ahead(policy):
    steps = full(12, policy=policy)
    steps.plan(STEP)
    assert steps.store.reads == []
    assert steps.layer(0, STEP[0]) == keys(0, STEP[0])
    for n in range(1, LAYERS):
        own = keys(n, STEP[n]) if n < ALONE else []
        following = keys(n + 1, STEP[n + 1]) if n + 1 < LAYERS else []
        assert steps.layer(n, STEP[n]) == own + following
    assert steps.missed[ALONE:] == [0] * (LAYERS - ALONE - 1) + [12]  # those that filled it


def test_a_large_cache_is_read_into_further_ahead():
    capacity = 3 * AHEAD_SHARE
    steps = Steps(capacity)
    for n in range(capacity):
        steps.layer(n % 2, [n // 2])
    steps.store.reads.clear()
    steps.plan(STEP)
    assert steps.store.reads == keys(2, STEP[2])[:3]
    assert steps.cache.guessed == 3


def test_planned_records_stay_and_then_spared_layers():
    """A miss takes what is neither planned nor of a layer that routes itself."""
    steps = Steps(12, "lru")
    for n in (0, 1, 2, 5):
        steps.layer(n, [0, 1, 2])
    steps.plan([[], [], [0, 1, 2], [], [], [2]])
    steps.layer(0, [7])
    kept = {*keys(0, [0, 1, 2, 7]), *keys(1, [0, 1, 2]), *keys(2, [0, 1, 2])}
    assert steps.cache.keys() == {*kept, (5, 1), (5, 2)}
    steps.layer(1, [8])  # more than these layers are granted: the oldest leaves
    assert (0, 0) not in steps.cache
    for expert in range(9, 24):
        steps.layer(1, [expert])
    assert {*keys(2, [0, 1, 2]), (5, 2)} < steps.cache.keys()
    steps.reads.clear()
    for expert in range(12):
        steps.layer(1, [expert])
    assert steps.cache.keys() == set(keys(1, range(12))), "nothing is planned or spared any more"


def test_a_cache_that_changes_gets_another_plan():
    """What a resize dropped is read again; a cache of one record keeps it for what is needed."""
    steps = Steps(LAYERS * EXPERTS)
    steps.plan(STEP)
    for capacity, ahead in ((60, 16), (1, 0), (10, 6)):
        steps.cache.resize(capacity)
        steps.store.reads.clear()
        steps.reads.fill()
        assert len(steps.store.reads) == steps.cache.guessed == ahead
        assert steps.cache.spared.limit == capacity // 2
    assert steps.layer(2, STEP[2]) == keys(3, STEP[3][2:]) + keys(4, STEP[4][:2])
    steps.cache.resize(9)
    steps.store.reads.clear()
    steps.reads.fill()
    assert steps.store.reads[0] == (3, STEP[3][0]), "layer 2 is over"


@pytest.mark.parametrize("policy", POLICIES)
def test_reading_ahead_costs_few_bytes(texts, policy):
    """Next to the same rules without reading ahead, and to no prediction at all."""
    capacity = LAYERS * EXPERTS * 12 // 100
    ahead = [Steps(capacity, policy).run(text) for text in texts]
    late = [Steps(capacity, policy, ahead=False).run(text) for text in texts]
    total = sum(len(s.store.reads) for s in ahead)
    assert total <= 1.05 * sum(len(s.store.reads) for s in late)
    plain = Steps(capacity, policy)
    plain.plan = lambda step: None
    assert len(ahead[0].store.reads) <= 1.1 * len(plain.run(texts[0]).store.reads)
    for steps in ahead:
        assert steps.missed[ALONE:] == [0] * (LAYERS - ALONE), "read before they were asked for"
    waits = sum(sum(s.missed[:ALONE]) for s in ahead)
    assert waits <= 0.4 * sum(plain.missed) * len(ahead)


@pytest.mark.parametrize("capacity", [1, 2, 3, 5, 9])
def test_the_smallest_caches_compute_everything(texts, capacity):
    steps = Steps(capacity).run(texts[0])
    assert steps.cache.counts.wasted_nbytes == 0
    assert len(steps.cache) <= capacity
