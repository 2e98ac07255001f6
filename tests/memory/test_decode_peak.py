"""Decode from outside: what the kernel saw while tokens came from a cache of a quarter of them."""

from __future__ import annotations

import json
import os
import shutil
import sys

import pytest

from tests.memory.test_peak_rss import MEDIUM
from tests.support.checkpoints import build_family
from tests.support.watch import run_watched

pytestmark = pytest.mark.slow

BIG = os.environ.get("MLX_STREAM_BIG") == "1"
# 64 experts of 184 KB in each of 9 layers, or of 737 KB in each of 8: 106 and 380 MB.
SMALL = MEDIUM | {"hidden_size": 512, "moe_intermediate_size": 256, "num_hidden_layers": 9}
TOKENS = 10
SLACK = 24_000_000  # malloc's arenas, Python objects, code pages touched for the first time

CHILD = """
import itertools, json, pathlib, re, sys
import mlx.core as mx
import mlx_stream.backends.cpu.backend as cpu
import mlx_stream.backends.metal as metal
import mlx_stream.engine as engines
from mlx_stream.config import StreamConfig

model, kind, path, share, tokens = sys.argv[1:]
cpu.MLX_CACHE_NBYTES = metal.CACHE_LIMIT_NBYTES = 8 << 20
if kind == "metal":
    engines.select_backend = lambda name: metal.MetalBackend(require_device=False)
model = pathlib.Path(model)


def rss():
    return int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024


engine = engines.Engine(model, StreamConfig(backend="cpu", decode_path=path, predict="off",
                                            memory_budget=10**9, chunk_tokens=64,
                                            io="direct" if kind == "cpu" else "buffered"))
nbytes, opened = engine.index.nbytes, rss()
engine.budget.total = int(float(share) * nbytes) + engine._plans.scratch + engine.budget.used
engine.budget.total += engine.plan(64).memory.kv
answer = []
for prompt in (list(range(64)), list(range(100, 120))):
    result = engine.prefill(prompt)
    steps = engine.decode(result, prompt, sampler=lambda row: mx.argmax(row, axis=-1))
    answer += [token for token, _ in itertools.islice(steps, int(tokens))]
    steps.close()
cache = engine.decoder.cache
print(json.dumps({"opened": opened, "capacity": cache.capacity, "cache": cache.nbytes,
                  "experts": nbytes, "budget": engine.budget.total, "peak": engine.budget.peak,
                  "resident": engine.budget.owner("resident weights"),
                  "misses": cache.counts.misses, "answer": answer}))
engine.close()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decode_peak")
    changes = MEDIUM if BIG else SMALL
    yield build_family("qwen3_moe", folder / "model", dtype="float32", changes=changes)
    shutil.rmtree(folder)


ARMS = [("cpu", "exact"), ("metal", "exact"), ("metal", "hot")]


def run(model, kind, path):
    arguments = [str(model), kind, path, "0.25", str(TOKENS)]
    report = run_watched([sys.executable, "-c", CHILD, *arguments])
    assert report.exit_code == 0, report.err[-2000:]
    return report, json.loads(report.out.splitlines()[-1])


@pytest.mark.parametrize(("kind", "path"), ARMS)
def test_peak_stays_within_the_budget(model, kind, path):
    """What prompts and answers add to an opened engine; holding all experts would be more."""
    report, found = run(model, kind, path)
    room = found["budget"] - found["resident"]
    grown = report.peak_rss - found["opened"]
    print(f"grown by {grown / 1e6:.0f} MB of {room / 1e6:.0f} MB, {found['capacity']} records")
    assert found["experts"] > room + SLACK, "else nothing is shown"
    assert grown <= room + SLACK
    assert found["peak"] <= found["budget"]
    # Stacked slots keep the size that they had in prefill.
    assert found["cache"] <= 0.3 * found["experts"]
    assert path == "hot" or found["cache"] >= 0.1 * found["experts"]
    assert found["misses"] > found["capacity"], "the cache was filled and more"
