"""The mapped path never answers from a missing expert, and its map says where experts are."""

from __future__ import annotations

from itertools import islice

import mlx.core as mx
import numpy as np
import pytest

from mlx_stream.backends.base import ABSENT
from mlx_stream.decode.mapped import MappedExecutor
from mlx_stream.errors import CapabilityError
from tests.decode.running import answer, hold, records, settled_answer
from tests.prefill.running import greedy

N, STEPS = 30, 24


@pytest.mark.parametrize("kind", ["open_engine", "open_metal"])
def test_maps_say_where_experts_are(checkpoint, request, monkeypatch, kind):
    """After reads, evictions and changes of size, and a layer's planes have the file's bytes."""
    engine = request.getfixturevalue(kind)(checkpoint("qwen3_moe"), decode_path="hot")
    monkeypatch.setattr(engine._allotment, "after_step", lambda step: None)
    mapped, cache = engine.decoder._mapped, engine.decoder.cache
    prompt = list(range(N))
    tokens = engine.decode(engine.prefill(prompt), prompt, sampler=greedy)
    for size in (20, 7, 32, 32, 3):
        cache.resize(size)
        next(tokens)
        for mlp in engine._mlps:
            slots = mapped._slots(mlp)
            host = np.array(slots.slot_map)
            assert (host == slots.host_map).all()
            for expert in range(8):
                record = cache.record((mlp.layer.index, expert))
                assert host[expert] == (ABSENT if record is None else record.slot)
            assert len(next(iter(slots.planes.values()))) == size


@pytest.mark.parametrize("missing", range(3))
def test_one_missing_expert_is_noticed(checkpoint, stock, open_metal, monkeypatch, missing):
    """All are resident but one that the next token needs, in any layer."""
    path = checkpoint("qwen3_moe")
    prompt, expected = settled_answer(stock, path, 83, STEPS)
    engine = open_metal(path, decode_path="hot", predict="off")
    hold(engine, monkeypatch, records(engine))
    seen = {}
    engine.decoder.observer = lambda layer, ids, prefill: seen.update({layer: ids[-1].tolist()})
    tokens = engine.decode(engine.prefill(prompt), prompt, sampler=greedy)
    got = [next(tokens)[0], next(tokens)[0]]
    assert engine.decode_metrics.last.path == "hot"
    cache, layer = engine.decoder.cache, engine._mlps[missing].layer.index
    redone = 0
    while len(got) < STEPS:
        # What the last token used is the best guess at what the next will use.
        expert = seen[layer][0]
        record = cache.record((layer, expert))
        cache._records.pop(record.key)
        cache.policy.forget(record.key)
        cache.residency.left(layer)
        cache._free.append(record.slot)
        got.append(next(tokens)[0])
        last = engine.decode_metrics.last
        redone += last.redone
        assert last.misses == last.redone == (expert in seen[layer])
        assert last.path == ("exact" if last.redone else "hot")
        if not last.redone:
            cache.finish_read(cache.start_read(engine._mlps[missing], expert, ()))
    assert redone > 0
    assert got == expected


def test_a_result_of_a_missing_expert_is_thrown_away(checkpoint, stock, open_metal, monkeypatch):
    """Without the flags it would be given out: so they are what the test above sees."""
    path = checkpoint("qwen3_moe")
    prompt, expected = settled_answer(stock, path, N, STEPS)
    monkeypatch.setattr(MappedExecutor, "complete", lambda self: True)
    monkeypatch.setattr(MappedExecutor, "commit", lambda self: self.begin())
    engine = open_metal(path, decode_path="hot", seed_policy="none")
    hold(engine, monkeypatch, 8)
    assert answer(engine, prompt, STEPS) != expected


def test_an_observer_sees_each_layer_once_although_a_step_was_redone(
    checkpoint, open_metal, monkeypatch
):
    engine = open_metal(checkpoint("qwen3_moe"), decode_path="hot")
    hold(engine, monkeypatch, 12)
    seen = []
    engine.decoder.observer = lambda layer, ids, prefill: prefill or seen.append(layer)
    answer(engine, list(range(N)), STEPS)
    assert engine.decode_metrics.totals.redone > 0
    layers = [layer.index for layer in engine.index.layers]
    assert seen == layers * (STEPS - 1)


@pytest.mark.parametrize("path", ["hot", "staged"])
def test_a_backend_without_stacked_slots(checkpoint, open_metal, monkeypatch, path):
    from mlx_stream.backends.metal import MetalBackend

    rest = MetalBackend.capabilities - {"stacked-slots"}
    monkeypatch.setattr(MetalBackend, "capabilities", rest)
    with pytest.raises(CapabilityError, match="stacked"):
        open_metal(checkpoint("qwen3_moe"), decode_path=path)


def test_several_tokens_in_one_step(checkpoint, stock, open_metal, monkeypatch):
    """As a step of speculative decoding: the logits of all of them."""
    path = checkpoint("qwen3_moe")
    prompt, expected = settled_answer(stock, path, 83, STEPS)
    engine = open_metal(path, decode_path="hot")
    hold(engine, monkeypatch, records(engine))
    result = engine.prefill(prompt)
    logits = engine.decoder.steps(mx.array([expected[:5]]), result.cache)
    assert mx.argmax(logits, axis=-1).tolist() == expected[1:6]
    assert engine.decode_metrics.last.path == "hot"
    assert engine.decode_metrics.last.tokens == 5
    more = engine.decode(engine.prefill([expected[5]], result.cache), prompt, sampler=greedy)
    assert [t for t, _ in islice(more, 3)] == expected[6:9]
