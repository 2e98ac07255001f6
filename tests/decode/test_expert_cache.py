"""The expert cache against a list: order, eviction, pins, sizes, and the bytes it returns."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_stream.decode.expert_cache import ExpertCache
from mlx_stream.decode.policy import make_policy
from mlx_stream.decode.slots import RecordSlots, record_nbytes
from mlx_stream.errors import ReadError
from mlx_stream.storage.read_plan import plan_group, slot_capacity
from tests.support.faults import FailingReads, install_fault

FAST = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def engine(checkpoint, open_engine):
    return open_engine(checkpoint("qwen3_moe"))


@pytest.fixture
def make_cache(engine):
    """``make_cache(capacity)``: a cache over the engine's reader; closed at teardown."""
    made = []

    def make(capacity):
        align = engine.reader.align
        slot = record_nbytes(engine._mlps, align, slot_capacity(engine.index, 1, align))
        store = RecordSlots(engine.backend, engine.reader, slot)
        policy = make_policy("lru", capacity=capacity)
        made.append(ExpertCache(store, policy, capacity=capacity))
        return made[-1]

    yield make
    for cache in made:
        cache.close()


def fetch(cache, mlp, expert, pinned=()):
    """One lookup, and a read when it misses; the record, or None when nothing can be evicted."""
    record = cache.lookup(mlp, expert)
    if record is None:
        record = cache.start_read(mlp, expert, set(pinned))
        if record is not None:
            cache.finish_read(record)
    return record


def contents(record):
    """``{(projection, part): raw bytes}`` as published."""
    (views,) = record.published.weights
    return {key: np.ascontiguousarray(view).tobytes() for key, view in views.items()}


def from_file(engine, mlp, expert):
    """The same, read slowly from the file."""
    found = {}
    for t in mlp.layer.tensors:
        raw = engine.index.checkpoint.files[t.file].path.read_bytes()
        start = t.offset + expert * t.stride
        found[t.key] = raw[start : start + t.nbytes]
    return found


def test_records_hold_the_bytes_of_the_file(engine, make_cache):
    cache = make_cache(2)
    for mlp in engine._mlps:
        for expert in (0, 3, 7):
            assert contents(fetch(cache, mlp, expert)) == from_file(engine, mlp, expert)


@FAST
@given(
    capacity=st.integers(1, 6),
    asked=st.lists(st.tuples(st.integers(0, 1), st.integers(0, 4)), max_size=30),
    resizes=st.dictionaries(st.integers(0, 29), st.integers(1, 6), max_size=4),
)
def test_it_behaves_as_a_least_recently_used_list(engine, make_cache, capacity, asked, resizes):
    cache = make_cache(capacity)
    model, hits, evictions = [], 0, 0
    for n, (layer, expert) in enumerate(asked):
        if n in resizes:
            capacity = resizes[n]
            cache.resize(capacity)
            evictions += max(0, len(model) - capacity)
            model = model[max(0, len(model) - capacity) :]
        key = (layer, expert)
        if key in model:
            hits += 1
            model.remove(key)
        elif len(model) == capacity:
            model.pop(0)
            evictions += 1
        model.append(key)
        record = fetch(cache, engine._mlps[layer], expert)
        assert record.key == key
        assert list(cache.policy._order) == model
        assert cache.keys() == set(model)
        assert cache.nbytes <= capacity * cache.slot_nbytes
    assert (cache.counts.hits, cache.counts.misses) == (hits, len(asked) - hits)
    assert cache.counts.evictions == evictions
    cache.close()
    assert (len(cache), cache.nbytes) == (0, 0)


def test_a_pinned_record_is_not_evicted(engine, make_cache):
    cache, mlp = make_cache(2), engine._mlps[0]
    first, second = fetch(cache, mlp, 0), fetch(cache, mlp, 1)
    before = contents(first)
    assert fetch(cache, mlp, 2, pinned={first.key, second.key}) is None
    assert fetch(cache, mlp, 2, pinned={first.key}).key == (0, 2)
    assert first.key in cache
    assert second.key not in cache
    assert contents(first) == before


def test_a_record_being_read_is_not_evicted(engine, make_cache):
    cache, mlp = make_cache(1), engine._mlps[0]
    pending = cache.start_read(mlp, 0, set())
    assert cache.start_read(mlp, 1, set()) is None
    cache.finish_read(pending)
    assert cache.start_read(mlp, 1, set()) is not None


def test_abandoned_reads_leave_and_their_slots_come_back(engine, make_cache):
    cache, mlp = make_cache(2), engine._mlps[0]
    kept = fetch(cache, mlp, 0)
    cache.start_read(mlp, 1, set())
    cache.abandon_pending()
    assert cache.keys() == {kept.key}
    record = fetch(cache, mlp, 2)
    assert contents(record) == from_file(engine, mlp, 2)
    assert kept.key in cache, "the freed slot was used, nothing was evicted"


def test_a_failed_read_leaves_the_cache_and_its_slot(checkpoint, open_engine, monkeypatch):
    fault = FailingReads()
    install_fault(monkeypatch, fault)
    engine = open_engine(checkpoint("qwen3_moe"))
    cache, mlp = engine.decoder.cache, engine._mlps[0]
    cache.resize(2)
    kept = fetch(cache, mlp, 5)
    fault.arm()
    failed = cache.start_read(mlp, 1, set())
    with pytest.raises(ReadError):
        cache.finish_read(failed)
    assert failed.key not in cache
    assert kept.key in cache
    fault.disarm()
    assert contents(fetch(cache, mlp, 1)) == from_file(engine, mlp, 1)
    assert len(cache) == 2


@pytest.mark.parametrize("io", ["direct", "buffered"])
def test_copies_from_staging_equal_the_file(checkpoint, open_engine, io):
    engine = open_engine(checkpoint("qwen3_moe"), io=io)
    cache, mlp, reader = engine.decoder.cache, engine._mlps[1], engine.reader
    cache.resize(3)
    read = plan_group(mlp.layer, range(2, 7), align=reader.align, file_sizes=reader.file_sizes)
    slot = engine.backend.allocate(read.slot_nbytes, reader.align)
    reader.submit(read.ops, slot.array).wait()
    before = reader.counters.bytes
    for expert in (2, 5, 6):
        assert cache.copy_in(mlp, expert, read, slot)
    slot.array[:] = 0
    for expert in (2, 5, 6):
        assert contents(cache.lookup(mlp, expert)) == from_file(engine, mlp, expert)
    assert reader.counters.bytes == before, "copies read nothing"
    assert cache.counts.hits == 3


def test_copying_what_is_there_makes_it_most_recent(engine, make_cache):
    cache, mlp = make_cache(2), engine._mlps[0]
    fetch(cache, mlp, 0)
    fetch(cache, mlp, 1)
    assert cache.copy_in(mlp, 0, None, None)
    fetch(cache, mlp, 2)
    assert cache.keys() == {(0, 0), (0, 2)}


def test_growing_costs_nothing_until_it_is_used(engine, make_cache):
    cache = make_cache(1)
    cache.resize(10**6)
    assert cache.nbytes == 0
    fetch(cache, engine._mlps[0], 0)
    assert cache.nbytes == cache.slot_nbytes
