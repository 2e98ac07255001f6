"""Stacked slots hold the bytes of the file whatever happens to them; none is lost on the way."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_stream.decode.expert_cache import ExpertCache
from mlx_stream.decode.planar_slots import (
    BOUNCES,
    MAX_ELEMENTS,
    PAGE_NBYTES,
    PlanarSlots,
    most_slots,
)
from mlx_stream.decode.policy import make_policy
from mlx_stream.decode.relocation import relocate
from mlx_stream.errors import CapabilityError, ReadCancelled, ReadError
from mlx_stream.storage.read_plan import plan_group
from tests.decode.running import answer, settled_answer
from tests.support.faults import FailingReads, install_fault

FAST = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
IO = ("direct", "buffered")
CAPACITY = 5


class Harness:
    """A cache of stacked slots over an engine's reader."""

    def __init__(self, engine, capacity=CAPACITY):
        self.engine, self.mlps = engine, engine._mlps
        self.store = PlanarSlots(engine.backend, engine.reader, self.mlps, capacity)
        self.cache = ExpertCache(self.store, make_policy("lru", capacity=capacity), capacity=1)
        self.cache.resize(capacity)
        self.reads = 0

    def fetch(self, layer, expert):
        mlp = self.mlps[layer]
        record = self.cache.lookup(mlp, expert)
        if record is None:
            self.reads += 1
            record = self.cache.start_read(mlp, expert, set())
            self.cache.finish_read(record)
        return record

    def file_bytes(self, key):
        found = {}
        for t in self.mlps[key[0]].layer.tensors:
            raw = self.engine.index.checkpoint.files[t.file].path.read_bytes()
            start = t.offset + key[1] * t.stride
            found[t.key] = raw[start : start + t.nbytes]
        return found

    def device_bytes(self, record):
        """As the device sees them: through the planes that the kernels are given."""
        found = {}
        for key, plane in self.store.planes.items():
            raw = plane[record.slot].reshape(-1).view(mx.uint8)
            found[key] = np.array(raw).tobytes()
        return found

    def check(self):
        """Every record has the file's bytes; slots and bounce buffers are all accounted for."""
        cache, store = self.cache, self.store
        for key, record in cache._records.items():
            if record.arrival is None:
                assert self.device_bytes(record) == self.file_bytes(key), key
        held = [r.slot for r in cache._records.values()] + cache._free
        assert len(held) == cache._slots <= cache.capacity
        assert sorted(held + store._free) == list(range(store.slots))
        assert len(store._bounces) + len(store._bounced) == store._bounces_made <= BOUNCES

    def arriving(self):
        return [r for r in self.cache._records.values() if r.arrival is not None]


@pytest.fixture
def harness(checkpoint, open_engine):
    made = []

    def make(name="qwen3_moe", capacity=CAPACITY, *, io="direct", **options):
        path = checkpoint(name, **options)
        made.append(Harness(open_engine(path, io=io), capacity))
        if io == "direct" and made[-1].engine.reader.align == 1:
            pytest.skip("this file system has no O_DIRECT")
        return made[-1]

    yield make
    for one in made:
        one.cache.close()
        assert not one.store._bounced


@pytest.mark.parametrize("io", IO)
@pytest.mark.parametrize(
    ("name", "options", "whole_pages"),
    [
        ("qwen3_moe", {}, False),  # weight, scales, biases
        ("qwen3_moe", {"mode": "nvfp4"}, False),  # uint8 scales
        ("qwen3_moe", {"mode": "none", "changes": {"moe_intermediate_size": 40}}, False),
        ("qwen3_moe", {"mode": "none", "dtype": "bfloat16"}, True),
        ("gpt_oss", {"mode": "mxfp4"}, False),  # biases of projections
        ("nemotron_h", {}, False),  # fc1, fc2
    ],
)
def test_bytes_equal_the_file(harness, io, name, options, whole_pages):
    h = harness(name, io=io, **options)
    last = len(h.mlps) - 1
    for layer, expert in [(0, 0), (last, 7), (0, 3), (last, 2), (0, 7), (last, 5), (0, 0)]:
        record = h.fetch(layer, expert)
        assert h.device_bytes(record) == h.file_bytes((layer, expert))
    assert h.cache.counts.evictions == 2
    h.check()
    odd = [t for t in h.mlps[0].layer.tensors if t.nbytes * CAPACITY % PAGE_NBYTES]
    assert bool(odd) is not whole_pages


@pytest.mark.parametrize("io", IO)
def test_copies_from_staging_equal_the_file(harness, io):
    h = harness(io=io)
    reader, mlp = h.engine.reader, h.mlps[1]
    read = plan_group(mlp.layer, range(2, 7), align=reader.align, file_sizes=reader.file_sizes)
    buffer = h.engine.backend.allocate(read.slot_nbytes, reader.align)
    reader.submit(read.ops, buffer.array).wait()
    for expert in (2, 5, 6):
        assert h.cache.copy_in(mlp, expert, read, buffer)
    buffer.array[:] = 0
    assert h.cache.keys() == {(1, 2), (1, 5), (1, 6)}
    h.check()


def test_a_copy_of_an_expert_that_was_not_staged_loses_no_slot(harness):
    h = harness()
    mlp, reader = h.mlps[0], h.engine.reader
    read = plan_group(mlp.layer, range(2, 4), align=reader.align, file_sizes=reader.file_sizes)
    with pytest.raises(ValueError, match="index"):
        h.cache.copy_in(mlp, 7, read, None)
    assert not h.cache.keys()
    h.check()


@pytest.mark.parametrize("io", IO)
@pytest.mark.parametrize("size", [1, 2, 4, 6, 11])
@pytest.mark.parametrize("spare", [0, 1, 2, 3, 99])
def test_resizing_moves_what_fits_into_the_spare_bytes(harness, io, size, spare):
    """Spare bytes are for the copies; newest records survive first."""
    h = harness(io=io)
    for n in range(CAPACITY):
        h.fetch(n % 2, n)
    nbytes = spare * h.store.slot_nbytes + (spare == 0)  # one byte is not a slot
    h.cache.resize(size, nbytes)
    h.check()
    assert len(h.cache) == min(CAPACITY, size, spare)
    assert h.cache.keys() == {(n % 2, n) for n in range(CAPACITY - len(h.cache), CAPACITY)}
    assert {len(plane) for plane in h.store.planes.values()} == {size}
    kept, reads = len(h.cache), h.reads
    for n in reversed(range(CAPACITY)):
        h.fetch(n % 2, n)
        h.check()
    assert h.reads == reads + CAPACITY - kept


@pytest.mark.parametrize("io", IO)
@pytest.mark.parametrize("capacity", [1, 2, 5, 40])
def test_memory_is_what_it_says(harness, io, capacity):
    """Planes of whole pages, and all bounce buffers in use."""
    h = harness(io=io, capacity=capacity)
    for n in range(min(8, capacity)):
        h.cache.start_read(h.mlps[0], n, set())
    taken = h.store.memory.nbytes + h.store._bounces_made * h.store._bounce_nbytes
    assert capacity * h.store.slot_nbytes < taken
    assert taken <= capacity * h.store.slot_nbytes + h.store.overhead_nbytes
    h.cache.abandon_pending()


def test_the_same_size_moves_nothing(harness):
    h = harness()
    h.fetch(0, 1)
    before = h.store.memory
    h.cache.resize(CAPACITY)
    assert h.cache.keys() == {(0, 1)}
    assert h.store.memory is before
    h.check()


def test_resizing_forgets_slots_that_were_free(harness):
    """A slot that had been taken and came back must not be given out twice."""
    h = harness()
    for n in range(3):
        h.cache.start_read(h.mlps[0], n, set())
    h.cache.abandon_pending()
    assert h.cache._free
    h.cache.resize(CAPACITY + 2, 0)
    for n in range(7):
        h.fetch(0, n)
    assert len(h.cache) == CAPACITY + 2
    h.check()


def test_resizing_gives_the_old_planes_back(checkpoint, open_metal):
    """Slot maps and tables of the mapped path must not keep them."""
    engine = open_metal(checkpoint("qwen3_moe"), decode_path="hot", predict="off")
    prompt = list(range(30))
    answer(engine, prompt, 5)
    cache = engine.decoder.cache
    assert cache.store.maps, "the mapped path was tried"
    least = cache.store.memory.nbytes - (cache.slot_nbytes + 12 * PAGE_NBYTES)
    before = mx.get_active_memory()
    cache.resize(1)
    assert before - mx.get_active_memory() >= least > 4 * cache.slot_nbytes


@pytest.mark.parametrize("io", IO)
@FAST
@given(data=st.data())
def test_any_sequence_of_events_keeps_bytes_and_slots(one_harness, io, data):
    """Reads, guesses, abandoned reads, sizes with and without spare bytes, in any order."""
    h = one_harness(io)
    h.cache.close()
    h.cache.resize(CAPACITY)
    h.cache.guess_limit = 2
    for _ in range(data.draw(st.integers(1, 10))):
        event = data.draw(st.sampled_from(["fetch", "guess", "abandon", "resize", "collect"]))
        layer, expert = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 7))
        if event == "fetch":
            record = h.fetch(layer, expert)
            h.cache.finish_read(record)  # a guess may be on its way
            assert h.device_bytes(record) == h.file_bytes((layer, expert))
        elif event == "guess":
            h.cache.guess(h.mlps[layer], expert, set())
        elif event == "abandon":
            h.cache.abandon_pending()
            assert not h.arriving()
        elif event == "collect":
            h.cache.collect_guesses()
        else:
            spare = data.draw(st.integers(0, 4)) * h.store.slot_nbytes
            h.cache.resize(data.draw(st.integers(3, 8)), spare)
        h.check()


@pytest.fixture
def one_harness(harness):
    made = {}

    def get(io):
        if io not in made:
            made[io] = harness(io=io)
        return made[io]

    return get


@pytest.mark.parametrize("io", IO)
@pytest.mark.parametrize("skip", [0, 2, 5])
def test_failed_reads_leave_no_slot_and_no_bounce_buffer(harness, monkeypatch, io, skip):
    fault = FailingReads()
    install_fault(monkeypatch, fault)
    h = harness(io=io)
    h.fetch(0, 7)
    fault.arm(skip=skip)
    started = [h.cache.start_read(h.mlps[0], n, set()) for n in range(3)]
    with pytest.raises(ReadError):  # noqa: PT012 - which of them fails depends on the threads
        for record in started:
            h.cache.finish_read(record)
    h.cache.abandon_pending()
    assert fault.failed
    assert (0, 7) in h.cache
    assert not h.arriving()
    assert not h.store._bounced
    h.check()
    fault.disarm()
    for n in range(3):
        h.fetch(0, n)
    h.check()
    assert h.cache.counts.evictions == 0, "every slot came back"


@pytest.mark.parametrize("io", IO)
def test_cancelled_reads_leave_no_slot_and_no_bounce_buffer(harness, monkeypatch, io):
    """More guesses than bounce buffers, dropped again and again."""
    h = harness(io=io, capacity=8)
    h.cache.guess_limit = 8
    for _ in range(5):
        for expert in range(8):
            h.cache.guess(h.mlps[0], expert, set())
        h.cache.resize(8)  # drops the guesses
        assert not h.cache.keys()
        assert not h.store._bounced
        h.check()
    assert h.cache.counts.wasted_nbytes > 0


def test_a_bounced_error_comes_to_the_one_who_waits(harness, monkeypatch):
    """The store may have settled the read already, to get its bounce buffer."""
    fault = FailingReads()
    install_fault(monkeypatch, fault)
    h = harness(io="direct", capacity=BOUNCES + 2)
    fault.arm()
    records = [h.cache.start_read(h.mlps[0], n, set()) for n in range(BOUNCES + 1)]
    assert len(h.store._bounced) == BOUNCES, "the first gave its buffer to the last"
    fault.disarm()
    with pytest.raises(ReadError):
        h.cache.finish_read(records[0])
    assert records[0].key not in h.cache
    h.cache.abandon_pending()
    h.check()


@pytest.mark.parametrize("io", IO)
def test_a_closed_reader_loses_no_slot(harness, io):
    h = harness(io=io)
    h.engine.reader.close()
    with pytest.raises(ReadCancelled):
        h.cache.start_read(h.mlps[0], 0, set())
    assert not h.cache.keys()
    h.check()


class Interrupting:
    """An arrival whose first waits are interrupted, as Ctrl-C would."""

    def __init__(self, inner, times):
        self._inner, self._times = inner, times
        self.cancelled = False

    def done(self):
        return self._inner.done()

    def cancel(self):
        self.cancelled = True
        self._inner.cancel()

    def wait(self):
        if self._times:
            self._times -= 1
            raise KeyboardInterrupt
        self._inner.wait()


@pytest.mark.parametrize("io", IO)
@pytest.mark.parametrize("times", [1, 2, 3])
def test_ctrl_c_while_reads_are_abandoned(harness, io, times):
    """A record that was never filled must not stay as if it were in memory."""
    h = harness(io=io)
    for n in range(3):
        record = h.cache.start_read(h.mlps[0], n, set())
        record.arrival = Interrupting(record.arrival, times if n == 0 else 0)
    with pytest.raises(KeyboardInterrupt):
        h.cache.finish_read(h.cache.record((0, 0)))
    assert (0, 0) not in h.cache
    other = h.cache.record((0, 1))
    other.arrival = Interrupting(other.arrival, 1)
    with pytest.raises(KeyboardInterrupt):
        h.cache.abandon_pending()
    assert not h.cache.keys(), "all were dropped, although the first wait was interrupted"
    h.check()
    for n in range(3):
        assert h.device_bytes(h.fetch(0, n)) == h.file_bytes((0, n))


# --- layouts


def test_layers_of_two_layouts_are_refused_by_tensor(checkpoint, open_metal):
    """Only one layer's down projection is quantized otherwise."""
    path = checkpoint("qwen3_moe", overrides=MIXED)
    with pytest.raises(CapabilityError) as caught:
        open_metal(path, decode_path="hot")
    text = str(caught.value)
    assert "layers.2.mlp.switch_mlp.down_proj" in text
    assert "exact" in text


MIXED = (("model.layers.2.mlp.switch_mlp.down_proj", {"group_size": 64, "bits": 8}),)


def test_auto_takes_the_exact_path_for_two_layouts(checkpoint, stock, open_metal):
    path = checkpoint("qwen3_moe", overrides=MIXED)
    engine = open_metal(path)
    assert engine.decoder.plan.path == "exact"
    assert "layout" in engine.decoder.plan.reason
    prompt, expected = settled_answer(stock, path, 20, 6)
    assert answer(engine, prompt, 6) == expected


@pytest.mark.parametrize("sizes", [(1, 1), (3, 100), (2**20, 2**10), (2**28, 5), (2**30, 2**30)])
@given(slots=st.integers(1, 1 << 20))
def test_planes_stay_within_an_mlx_axis(sizes, slots):
    tensors = [SimpleNamespace(shape=(n,), nbytes=n) for n in sizes]
    got = most_slots(SimpleNamespace(tensors=tensors), slots)
    assert 1 <= got <= slots
    for t in tensors:  # whole pages are reshaped by rows, the rest as one long axis
        assert got * t.nbytes % PAGE_NBYTES == 0 or got * t.nbytes <= MAX_ELEMENTS


@given(data=st.data())
def test_relocated_reads_cover_the_planes_once(engine_layer, data):
    """Parts of every op keep their length and order; together they are the planes, each once."""
    layer, sizes = engine_layer
    expert = data.draw(st.integers(0, 7))
    read = plan_group(layer, (expert,), align=1, file_sizes=sizes)
    gap, places, at = data.draw(st.integers(0, 99)), {}, 0
    for plane in data.draw(st.permutations(read.planes)):
        places[plane.key] = at
        at += plane.nbytes + gap
    moved, _ = relocate(read, places)
    assert [(o.file, o.offset, o.nbytes) for o in moved] == [
        (o.file, o.offset, o.nbytes) for o in read.ops
    ]
    found = sorted(part for op in moved for part in op.parts)
    covered = set()
    for start, nbytes in found:
        covered.update(range(start, start + nbytes))
    assert len(covered) == sum(nbytes for _, nbytes in found) == sum(p.nbytes for p in read.planes)
    for plane in read.planes:
        assert covered.issuperset(range(places[plane.key], places[plane.key] + plane.nbytes))


@pytest.fixture(scope="module")
def engine_layer(tmp_path_factory):
    from mlx_stream.storage.checkpoint import open_checkpoint
    from mlx_stream.storage.expert_index import build_expert_index
    from tests.support.checkpoints import cached_checkpoint

    index = build_expert_index(open_checkpoint(cached_checkpoint(tmp_path_factory, "qwen3_moe")))
    return index.layers[0], tuple(f.size for f in index.checkpoint.files)
