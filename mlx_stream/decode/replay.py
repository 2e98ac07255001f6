"""Replays a routing trace against a cache of so many bytes: what would decode have read?

Follows the exact path: layer by layer, a call's hits are used first, then its misses come in one by
one, and nothing that the call routed to leaves while another record can. A missing expert is always
loaded; there is no bypass. Belady's optimum obeys the same rules, with knowledge of the future.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from mlx_stream.decode.hot_list import HotList
from mlx_stream.decode.policy import POLICIES, EvictionPolicy, Key, make_policy
from mlx_stream.decode.routing_trace import RoutingTrace
from mlx_stream.decode.seed_policy import (
    DEFAULT_SEED_POLICY,
    SEED_POLICIES,
    best_experts,
    layer_share,
    seed_scores,
)

BELADY = "belady"
STREAMLX = "streamlx"
ORACLE_SEED = "oracle"
REPLAY_POLICIES = (*POLICIES, BELADY, STREAMLX)
REPLAY_SEEDS = (*SEED_POLICIES, ORACLE_SEED)
STREAMLX_CHUNK = 2048
NEVER = 1 << 60


@dataclass(frozen=True)
class ReplayResult:
    """Per decoded token: ``[T]`` int64 arrays."""

    hits: np.ndarray
    misses: np.ndarray
    nbytes: np.ndarray

    def hit_rate(self, tokens: int | None = None) -> float:
        """Hits over lookups of the first `tokens` tokens; 0 when there were none."""
        hits, misses = self.hits[:tokens].sum(), self.misses[:tokens].sum()
        return float(hits / max(1, hits + misses))

    def nbytes_per_token(self, tokens: int | None = None) -> float:
        """Bytes read per token over the first `tokens` tokens."""
        return float(self.nbytes[:tokens].sum() / max(1, len(self.nbytes[:tokens])))


def replay(
    trace: RoutingTrace,
    policy: str,
    capacity_nbytes: int,
    *,
    seed: str | HotList = DEFAULT_SEED_POLICY,
    tokens: int | None = None,
) -> ReplayResult:
    """Decode the first `tokens` tokens of a trace against a cache.

    Args:
        policy: one of `REPLAY_POLICIES`. ``streamlx`` is that engine's cache, see
            :func:`replay_per_layer_lru`; it has its own seed.
        capacity_nbytes: slots are as large as the largest expert, at least one and at most one for
            every expert.
        seed: one of `SEED_POLICIES`, a hot list, or ``oracle``: the first experts that decode will
            use.
    """
    calls = list(_calls(trace, tokens))
    if policy == STREAMLX:
        return replay_per_layer_lru(trace, capacity_nbytes, tokens=tokens)
    slots = capacity_nbytes // max(trace.expert_nbytes)
    capacity = max(1, min(sum(trace.num_experts), slots))
    chooser: EvictionPolicy
    chooser = _Furthest(calls) if policy == BELADY else make_policy(policy, capacity=capacity)
    cache = _Cache(chooser, capacity)
    for key, weight in _seeds(trace, seed, capacity, calls):
        cache.seed(key, weight)
    counts = _Counts(trace, tokens)
    for step, position, keys in calls:
        counts.add(step, position, len(keys), cache.call(keys))
        if position == len(trace.layers) - 1:
            chooser.tick()
    return counts.result()


class _Counts:
    def __init__(self, trace: RoutingTrace, tokens: int | None) -> None:
        self._sizes = trace.expert_nbytes
        self._sums = np.zeros((3, trace.steps if tokens is None else min(tokens, trace.steps)), int)

    def add(self, step: int, position: int, lookups: int, misses: int) -> None:
        self._sums[:, step] += (lookups - misses, misses, misses * self._sizes[position])

    def result(self) -> ReplayResult:
        return ReplayResult(*self._sums)


Call = tuple[int, int, list[Key]]


def _calls(trace: RoutingTrace, tokens: int | None) -> Iterator[Call]:
    """``(token, layer position, keys)`` in the order of decode; ids ascend within a call."""
    for step in range(trace.steps if tokens is None else min(tokens, trace.steps)):
        for position, (layer, ids) in enumerate(zip(trace.layers, trace.decode, strict=True)):
            yield step, position, [(layer, e) for e in sorted(set(ids[step].tolist()))]


class _Cache:
    """The expert cache without its bytes."""

    def __init__(self, policy: EvictionPolicy, capacity: int) -> None:
        self._policy = policy
        self._capacity = capacity
        self._resident: set[Key] = set()

    def seed(self, key: Key, weight: float) -> None:
        assert len(self._resident) < self._capacity, "more seeds than slots"
        self._resident.add(key)
        self._policy.admit(key, weight)

    def call(self, keys: list[Key]) -> int:
        """Use all of `keys`; returns how many were missing."""
        pinned = {key for key in keys if key in self._resident}
        missing = [key for key in keys if key not in pinned]
        for key in keys:
            if key in pinned:
                self._policy.touch(key)
        for key in missing:
            if len(self._resident) >= self._capacity:
                self._evict(pinned)
            self._resident.add(key)
            self._policy.admit(key)
            pinned.add(key)
        return len(missing)

    def _evict(self, pinned: set[Key]) -> None:
        victim = self._policy.victim(pinned)
        if victim is None:  # fewer slots than the call needs: what is there has been computed
            pinned.clear()
            victim = self._policy.victim(pinned)
        assert victim is not None, "a full cache has a victim when nothing is pinned"
        self._resident.remove(victim)
        self._policy.forget(victim)


def _seeds(
    trace: RoutingTrace, seed: str | HotList, capacity: int, calls: list[Call]
) -> Iterator[tuple[Key, float]]:
    """Seeds in the order prefill admits them: layer by layer, ids ascending."""
    if seed == ORACLE_SEED:
        order = dict.fromkeys(key for _, _, keys in calls for key in keys)
        yield from [(key, 1.0) for key in order][:capacity]
        return
    if isinstance(seed, HotList):
        seed.check_model(list(zip(trace.layers, trace.num_experts, strict=True)))
    for i, layer in enumerate(trace.layers):
        if isinstance(seed, HotList):
            scores = seed.layers[i].scores_by_id()
        else:
            scores = seed_scores(seed, trace.prompt[i], trace.num_experts[i])
        share = layer_share(capacity, i, len(trace.layers))
        for expert in sorted(best_experts(scores, share)):
            yield (layer, expert), float(scores[expert])


class _Furthest:
    """Belady: the record whose next use is furthest away leaves. Knows all calls in advance."""

    name = BELADY

    def __init__(self, calls: list[Call]) -> None:
        self._uses: dict[Key, deque[int]] = {}
        for time, (_, _, keys) in enumerate(calls):
            for key in keys:
                self._uses.setdefault(key, deque()).append(time)
        self.clear()

    def clear(self) -> None:
        self._next: dict[Key, int] = {}
        self._heap: list[tuple[int, Key]] = []

    def admit(self, key: Key, weight: float = 0.0) -> None:
        self._note(key, used=weight <= 0)

    def touch(self, key: Key) -> None:
        self._note(key, used=True)

    def forget(self, key: Key) -> None:
        self._next.pop(key, None)

    def victim(self, pinned: Collection[Key], spared: Collection[int] = ()) -> Key | None:
        aside, found = [], None
        while self._heap and found is None:
            negative, key = self._heap[0]
            if self._next.get(key) != -negative:
                heappop(self._heap)
            elif key in pinned or key[0] in spared:
                aside.append(heappop(self._heap))
            else:
                found = key
        for entry in aside:
            heappush(self._heap, entry)
        return found

    def tick(self) -> None:
        pass

    def resize(self, capacity: int) -> None:
        pass

    def _note(self, key: Key, *, used: bool) -> None:
        uses = self._uses.get(key, deque())
        if used:
            uses.popleft()
        self._next[key] = uses[0] if uses else NEVER
        heappush(self._heap, (-self._next[key], key))


def replay_per_layer_lru(
    trace: RoutingTrace,
    capacity_nbytes: int,
    *,
    tokens: int | None = None,
    spread_rest: bool = False,
) -> ReplayResult:
    """The decode cache of the peer streamlx: every layer an LRU of its own, of equal bytes.

    After prefill in chunks of 2,048 tokens a layer holds what the last chunk used most. Hits of a
    call are touched before its misses come in.

    Args:
        spread_rest: slots that do not divide evenly go to the first layers; streamlx leaves them
            unused.
    """
    layers = len(trace.layers)
    counts = _Counts(trace, tokens)
    steps = trace.steps if tokens is None else min(tokens, trace.steps)
    for i, (ids, nbytes) in enumerate(zip(trace.decode, trace.expert_nbytes, strict=True)):
        slots = capacity_nbytes // layers // nbytes
        if spread_rest:
            slots = layer_share(capacity_nbytes // nbytes, i, layers)
        prompt = trace.prompt[i]
        last = prompt[max(0, len(prompt) - 1) // STREAMLX_CHUNK * STREAMLX_CHUNK :]
        hot = best_experts(
            np.bincount(last.reshape(-1), minlength=trace.num_experts[i]), max(1, slots)
        )
        lru = OrderedDict.fromkeys(reversed(hot))
        for step in range(steps):
            wanted = sorted(set(ids[step].tolist()))
            missing = [e for e in wanted if e not in lru]
            for expert in wanted:
                if expert not in missing:
                    lru.move_to_end(expert)
            for expert in missing:
                if len(lru) >= max(1, slots):
                    lru.popitem(last=False)
                lru[expert] = None
            counts.add(step, i, len(wanted), len(missing))
    return counts.result()
