import numpy as np, pytest, mlx.core as mx
from tests.decode.running import *
from tests.prefill.running import decode, generate, greedy
from tests.decode.running import check_slots
from mlx_stream.decode.planar_slots import PlanarSlots

def test_resize_loses_slots(checkpoint, open_metal):
    engine = open_metal(checkpoint("qwen3_moe"), decode_path="hot")
    p = list(range(30))
    engine.prefill(p)
    c = engine.decoder.cache
    print(len(c), c._slots, c.capacity)
    c.resize(20); print(len(c), c._slots, len(c._free)); check_slots(engine)

def test_tokens_after_resize(checkpoint, stock, open_metal):
    engine = open_metal(checkpoint("qwen3_moe"), decode_path="hot")
    p, a = settled_answer(stock, engine.path, 30, 24)
    r = engine.prefill(p)
    g = engine.decode(r, p, sampler=greedy)
    got = []
    for n in (30, 9, 20, 3, 32):
        got += [next(g)[0] for _ in range(4)]
        engine.decoder.cache.resize(n)
    got += [next(g)[0] for _ in range(4)]
    assert got == a

def test_maps_keep_memory(checkpoint, open_metal):
    engine = open_metal(checkpoint("qwen3_moe"), decode_path="hot")
    p = list(range(30))
    decode(engine, engine.prefill(p), p, 6)
    c = engine.decoder.cache
    before = mx.get_active_memory()
    n = c.nbytes
    c.resize(1)
    print(before - mx.get_active_memory(), n)
    engine.decoder.exact  # alive
    engine.decoder._mapped._maps.clear()
    print(before - mx.get_active_memory(), n)

def test_grant_order(checkpoint, open_engine, monkeypatch):
    from mlx_stream.backends.cpu.backend import CpuBackend
    monkeypatch.setattr(CpuBackend, "scratch_nbytes", lambda self, mlps: 0)
    monkeypatch.setattr("mlx_stream.loader.DIRECT_ALIGN", 1)
    path = checkpoint("qwen3_moe", changes={"num_experts": 64})
    from tests.prefill.running import smallest_budget
    low = smallest_budget(open_engine(path), 200)
    for extra in (0, 100_000, 300_000, 600_000, 1000_000, 2_000_000):
        engine = open_engine(path, memory_budget=low + extra)
        for n in (200, 10, 200, 3):
            try:
                generate(engine, [i % 150 for i in range(n)], 3)
            except Exception as e:
                print(extra, n, repr(e)[:300])
        print(extra, engine.decoder.cache.capacity, engine.budget.peak <= low + extra)
        engine.close()
def test_kept(checkpoint, open_metal):
    engine = open_metal(checkpoint("qwen3_moe"), decode_path="hot")
    engine.prefill(list(range(30)))
    c = engine.decoder.cache
    n = len(c)
    c.resize(n + 2, 1); print("kept", len(c), "of", n)
