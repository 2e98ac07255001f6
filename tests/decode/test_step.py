"""What a step counts, and in which order it reads, computes and waits."""

from __future__ import annotations

import threading
from itertools import islice

import numpy as np
import pytest

from mlx_stream.backends.cpu.backend import CpuLayerComputation
from mlx_stream.backends.mlx_ops import MlxLayerComputation
from mlx_stream.decode.step import STREAK
from tests.decode.running import answer, check_slots, hold, records, settled_answer, token_set
from tests.prefill.running import greedy
from tests.support.faults import install_fault, time_limit

N, STEPS = 30, 24
KINDS = ("open_engine", "open_metal")


def watched(engine):
    """What layers of each step route to, by the observer: ``[{layer: ids}]``."""
    steps = []

    def observer(layer, ids, in_prefill):
        if not in_prefill:
            if not steps or layer in steps[-1]:
                steps.append({})
            steps[-1][layer] = ids

    engine.decoder.observer = observer
    return steps


def routed(steps):
    return sum(len(np.unique(ids)) for step in steps for ids in step.values())


@pytest.mark.parametrize("held", ["all", "half", "token"])
@pytest.mark.parametrize("predict", ["off", "previous", "lookahead"])
@pytest.mark.parametrize("kind", KINDS)
def test_exact_waits_once_a_layer_and_once_a_token(
    checkpoint, request, monkeypatch, kind, predict, held
):
    engine = request.getfixturevalue(kind)(
        checkpoint("qwen3_moe"), decode_path="exact", predict=predict
    )
    half = records(engine) // 2
    hold(engine, monkeypatch, {"all": 2 * half, "half": half, "token": token_set(engine)}[held])
    answer(engine, list(range(N)), STEPS)
    layers = len(engine.index.layers)
    assert {step.syncs for step in engine.decode_metrics.history} == {layers + 1}
    assert {step.path for step in engine.decode_metrics.history} == {"exact"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["hot", "staged"])
def test_hot_waits_once_a_token_and_reads_nothing(checkpoint, request, monkeypatch, kind, path):
    engine = request.getfixturevalue(kind)(checkpoint("qwen3_moe"), decode_path=path)
    hold(engine, monkeypatch, records(engine))
    prompt = list(range(83))  # so long that it seeds every expert
    steps = watched(engine)
    answer(engine, prompt, STEPS)
    assert len(engine.decoder.cache) == records(engine)
    before = engine.reader.counters
    for step in engine.decode_metrics.history:
        assert (step.path, step.syncs, step.redone) == (path, 1, 0)
        assert (step.misses, step.bytes_read, step.read_calls) == (0, 0, 0)
    assert sum(s.hits for s in engine.decode_metrics.history) == routed(steps)
    assert engine.reader.counters == before


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_read_when_all_is_resident(checkpoint, request, monkeypatch, kind):
    engine = request.getfixturevalue(kind)(checkpoint("qwen3_moe"), decode_path="exact")
    hold(engine, monkeypatch, records(engine))
    result = engine.prefill(list(range(83)))
    before = engine.reader.counters
    assert len(list(islice(engine.decode(result, [1], sampler=greedy), STEPS))) == STEPS
    assert engine.reader.counters == before
    assert engine.decoder.cache.counts.guesses == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["exact", "hot", "staged", "auto"])
@pytest.mark.parametrize("held", [3, 14, 32])
def test_counts_equal_a_recount(checkpoint, request, monkeypatch, kind, path, held):
    """Hits and misses by the observer, bytes by the reader; each step's and in sum."""
    options = {"io": "buffered"} if kind == "open_engine" else {}
    engine = request.getfixturevalue(kind)(
        checkpoint("qwen3_moe"), decode_path=path, predict="previous", **options
    )
    hold(engine, monkeypatch, held)
    steps = watched(engine)
    result = engine.prefill(list(range(N)))
    before, start = engine.reader.counters, len(engine.decoder.cache)
    list(islice(engine.decode(result, [1], sampler=greedy), 2 * STEPS))
    totals, counts = engine.decode_metrics.totals, engine.decoder.cache.counts
    engine.decoder.cache.abandon_pending()
    assert len(steps) == totals.steps == 2 * STEPS - 1
    per_step = [routed([step]) for step in steps]
    assert [s.hits + s.misses for s in engine.decode_metrics.history] == per_step
    assert (counts.hits, counts.misses) == (totals.hits, totals.misses)
    expert = engine.index.layers[0].expert_nbytes
    read = engine.reader.counters.bytes - before.bytes
    assert (totals.misses * expert) <= read <= (totals.misses + counts.guesses) * expert
    assert totals.bytes_read <= read
    unused = counts.guesses - counts.guesses_used - len(engine.decoder.cache._guesses)
    assert totals.wasted_bytes == counts.wasted_nbytes <= unused * expert
    assert counts.evictions >= totals.misses + start - held - counts.guesses
    assert totals.redone <= totals.paths.get("exact", 0)
    check_slots(engine)


class Events:
    """The order in which a step starts reads, computes and waits for bytes."""

    def __init__(self, engine, monkeypatch):
        self.seen = []
        cache = engine.decoder.cache
        for name in ("start_read", "finish_read", "lookup"):
            monkeypatch.setattr(cache, name, self._noted(name, getattr(cache, name)))
        for cls in (CpuLayerComputation, MlxLayerComputation):
            real = cls.add

            def add(computation, groups, _real=real):
                self.seen.append(("add", sorted(e for g in groups for e in g.experts)))
                return _real(computation, groups)

            monkeypatch.setattr(cls, "add", add)

    def _noted(self, name, real):
        def note(*args):
            found = real(*args)
            if name == "start_read":
                self.seen.append(("start", None if found is None else found.key))
            elif name == "finish_read":
                self.seen.append(("finish", args[0].key))
            else:
                self.seen.append(("hit" if found else "miss", (args[0].layer.index, args[1])))
            return found

        return note

    def layers(self):
        """Cut where a layer starts to look up."""
        parts = []
        for event in self.seen:
            if event[0] in ("hit", "miss") and not (parts and parts[-1][-1][0] in ("hit", "miss")):
                parts.append([])
            parts[-1].append(event)
        return parts


@pytest.mark.parametrize("kind", KINDS)
def test_misses_are_read_while_residents_compute(checkpoint, request, monkeypatch, kind):
    engine = request.getfixturevalue(kind)(
        checkpoint("qwen3_moe"), decode_path="exact", predict="off"
    )
    hold(engine, monkeypatch, 12)
    result = engine.prefill(list(range(N)))
    events = Events(engine, monkeypatch)
    list(islice(engine.decode(result, [1], sampler=greedy), STEPS))
    mixed = 0
    for part in events.layers():
        kinds = [kind for kind, _ in part]
        if "hit" not in kinds or "miss" not in kinds:
            continue
        mixed += 1
        hits = sorted(key[1] for kind, key in part if kind == "hit")
        misses = [key for kind, key in part if kind == "miss"]
        first_add = kinds.index("add")
        assert [key for kind, key in part[:first_add] if kind == "start"] == misses
        assert "finish" not in kinds[:first_add]
        assert part[first_add] == ("add", hits), "residents together, before any wait"
    assert mixed > 0


def test_residents_compute_although_the_disk_hangs(checkpoint, stock, open_engine, monkeypatch):
    """Reads of a layer return only after its residents were added: else this would hang."""
    armed, added = threading.Event(), threading.Event()

    def fault(file, offset, nbytes):
        if armed.is_set():
            assert added.wait(30)

    install_fault(monkeypatch, fault)
    path = checkpoint("qwen3_moe")
    prompt, expected = settled_answer(stock, path, N, STEPS)
    engine = open_engine(path, decode_path="exact", predict="off")
    hold(engine, monkeypatch, 12)
    result = engine.prefill(prompt)
    cache, real, mixed = engine.decoder.cache, CpuLayerComputation.add, []
    look_up = engine.decoder.exact._look_up

    def looked_up(mlp, needed):
        found = look_up(mlp, needed)
        if found[0] and found[2]:  # residents and misses
            mixed.append(mlp)
            added.clear()
            armed.set()
        return found

    def add(self, groups):
        fence = real(self, groups)
        added.set()
        armed.clear()
        return fence

    monkeypatch.setattr(engine.decoder.exact, "_look_up", looked_up)
    monkeypatch.setattr(CpuLayerComputation, "add", add)
    with time_limit(25):
        tokens = [t for t, _ in islice(engine.decode(result, prompt, sampler=greedy), STEPS)]
    assert tokens == expected
    assert mixed
    assert cache.counts.misses > 0


def test_auto_bets_after_a_streak_and_stops_after_a_miss(checkpoint, open_metal, monkeypatch):
    """One step is redone when the bet is lost, and the next ones are exact again."""
    engine = open_metal(checkpoint("qwen3_moe"), predict="off")
    hold(engine, monkeypatch, records(engine))
    prompt = list(range(83))
    tokens = engine.decode(engine.prefill(prompt), prompt, sampler=greedy)
    list(islice(tokens, 1 + STREAK + 3))
    history = engine.decode_metrics.history
    assert [s.path for s in history] == ["exact"] * STREAK + ["hot"] * 3
    engine.decoder.cache.resize(records(engine) - 1)  # stacked slots are emptied
    engine.decoder.cache.resize(records(engine))
    list(islice(tokens, 1))
    last = engine.decode_metrics.last
    assert (last.path, last.redone) == ("exact", 1)
    assert last.misses == last.hits + last.misses == token_set(engine)
    list(islice(tokens, 1))
    assert (engine.decode_metrics.last.path, engine.decode_metrics.last.redone) == ("exact", 0)
