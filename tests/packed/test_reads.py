"""Reads of a packed folder: one for an expert, few for a group, in every mode and by every path."""

from __future__ import annotations

import numpy as np
import pytest

from mlx_stream.decode.planar_slots import PlanarSlots
from mlx_stream.storage.read_plan import layer_slot_capacity, plan_group
from mlx_stream.storage.reader import Reader
from mlx_stream.storage.slot_memory import allocate_slot
from tests.packed.building import expert_bytes, index_of, random_orders
from tests.prefill.running import decode
from tests.support.checkpoints import random_tokens

ALIGNS = [1, 512, 4096]
CASES = [
    ("qwen3_moe", {}),
    ("gpt_oss", {}),  # odd sizes: padding between tensors
    ("nemotron_h", {}),
    ("qwen3_moe", {"mode": "nvfp4"}),
    ("gpt_oss", {"mode": "mxfp4", "dtype": "bfloat16"}),
]


def sizes(index):
    return [f.size for f in index.checkpoint.files]


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("align", ALIGNS)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_an_expert_is_one_read(checkpoint, packed, name, options, align, ordered):
    plain = index_of(checkpoint(name, **options))
    orders = random_orders(plain) if ordered else None
    index = index_of(packed(checkpoint(name, **options), orders=orders))
    for layer, before in zip(index.layers, plain.layers, strict=True):
        for expert in range(layer.num_experts):
            read = plan_group(layer, [expert], align=align, file_sizes=sizes(index))
            assert len(read.ops) == 1
            assert read.slot_nbytes <= layer_slot_capacity(layer, 1, align)
            assert read.read_nbytes <= layer.record.nbytes
        if align == 1:
            old = plan_group(before, [3], align=1, file_sizes=sizes(plain))
            assert len(old.ops) == len({(t.offset, t.file) for t in before.tensors})


@pytest.mark.parametrize("align", ALIGNS)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_group_is_as_few_reads_as_their_size_allows(checkpoint, packed, name, options, align):
    index = index_of(packed(checkpoint(name, **options)))
    for layer in index.layers:
        record = layer.record.nbytes
        for limit in (record, 2 * record, 3 * record + 4096, 8 << 20):
            for group in (1, 2, 4, 8):
                read = plan_group(
                    layer,
                    range(group),
                    align=align,
                    max_op_nbytes=limit,
                    file_sizes=sizes(index),
                )
                each = max(1, limit // record)
                assert len(read.ops) == -(-group // each)
                assert read.slot_nbytes <= layer_slot_capacity(layer, group, align)


@pytest.mark.parametrize("io", ["direct", "buffered"])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_groups_bring_the_bytes_of_every_expert(checkpoint, packed, name, options, ordered, io):
    plain = index_of(checkpoint(name, **options))
    orders = random_orders(plain) if ordered else None
    index = index_of(packed(checkpoint(name, **options), orders=orders))
    with Reader(index.checkpoint, io=io, verify="always") as reader:
        for layer, before in zip(index.layers, plain.layers, strict=True):
            for experts in (range(8), [0, 2, 3, 7], [5], layer.experts_at(range(2, 6))):
                read = plan_group(layer, experts, align=reader.align, file_sizes=reader.file_sizes)
                slot = allocate_slot(read.slot_nbytes)
                reader.submit(read.ops, slot, read.checks).wait()
                for i, expert in enumerate(read.experts):
                    wanted = expert_bytes(plain, before, expert)
                    for plane in read.planes:
                        start = plane.offsets[i]
                        got = slot[start : start + plane.nbytes].tobytes()
                        assert got == wanted[plane.key]
                if reader.align == 1:
                    assert all(p.contiguous for p in read.planes)


def test_places_of_the_file_are_consecutive_reads(checkpoint, packed):
    plain = checkpoint("qwen3_moe")
    index = index_of(packed(plain, orders=random_orders(index_of(plain))))
    layer = index.layers[0]
    assert sorted(layer.experts_at(range(2, 6))) == sorted(layer.record.order[2:6])
    read = plan_group(layer, layer.experts_at(range(2, 6)), align=1, file_sizes=sizes(index))
    assert len(read.ops) == 1


@pytest.mark.parametrize("io", ["direct", "buffered"])
def test_decode_reads_an_expert_with_one_call_not_nine(checkpoint, packed, open_engine, io):
    """Counted by the reader, over decoded tokens whose every expert is a miss."""
    plain = checkpoint("qwen3_moe")
    calls = {}
    for folder in (plain, packed(plain)):
        engine = open_engine(folder, io=io, decode_path="exact", predict="off")
        prompt = random_tokens(engine.model, 5)
        result = engine.prefill(prompt)
        cache = engine.decoder.cache
        cache.resize(1)
        before, misses = engine.reader.counters, cache.counts.misses
        decode(engine, result, prompt, 6)
        after = engine.reader.counters
        read = cache.counts.misses - misses
        assert read > 10
        assert after.retries == before.retries
        calls[folder] = (after.calls - before.calls) / read
    assert list(calls.values()) == [9 if io == "buffered" else calls[plain], 1]
    assert calls[plain] > 1


@pytest.mark.parametrize("io", ["direct", "buffered"])
@pytest.mark.parametrize(("name", "options"), CASES)
def test_stacked_slots_hold_the_same_bytes(checkpoint, packed, open_metal, name, options, io):
    plain = checkpoint(name, **options)
    engine = open_metal(packed(plain))
    engine.reader.close()
    index, before = index_of(engine.path), index_of(plain)
    mlps = engine._mlps
    with Reader(index.checkpoint, io=io, verify="always") as reader:
        store = PlanarSlots(engine.backend, reader, mlps[:1], 4)
        for n in range(4):
            record = store.start_read(mlps[0], n + 2, store.take())
            record.arrival.wait()
            wanted = expert_bytes(before, before.layers[0], n + 2)
            for key, start in store.starts.items():
                nbytes = len(wanted[key])
                at = start + record.slot * nbytes
                assert np.array(store.memory).reshape(-1)[at : at + nbytes].tobytes() == wanted[key]
        assert reader.counters.calls == 4
        store.close()


@pytest.mark.parametrize("path", ["exact", "hot", "staged"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_decode_paths_answer_as_from_the_plain_folder(checkpoint, packed, open_metal, name, path):
    plain = checkpoint(name)
    answers = []
    for folder in (plain, packed(plain, orders=random_orders(index_of(plain)))):
        engine = open_metal(folder, decode_path=path, union_tokens=512)
        prompt = random_tokens(engine.model, 9)
        answers.append(decode(engine, engine.prefill(prompt), prompt, 6))
    assert answers[0] == answers[1]
