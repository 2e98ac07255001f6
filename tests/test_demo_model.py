"""The demo model: small, trained, and as good through the stream as its card says."""

import json
import math

import mlx.core as mx
import numpy as np
import pytest

from mlx_stream.hub import demo_path
from mlx_stream.runtime import load
from tests.prefill.running import relative

WINDOW = 512


@pytest.fixture(scope="module")
def runtime():
    """A budget below the experts' size: they really are read again and again."""
    with load(memory_budget="90MB", backend="cpu", prerouter="off") as loaded:
        yield loaded


def windows(runtime):
    """Non-overlapping windows of the held-out text, as the model card describes them."""
    ids = runtime.encode((demo_path() / "heldout.txt").read_text(encoding="utf-8"))
    return [ids[i : i + WINDOW] for i in range(0, len(ids), WINDOW)]


def test_it_is_small_and_a_real_moe(runtime):
    assert sum(f.stat().st_size for f in demo_path().iterdir()) <= 10_000_000
    index = runtime.engine.index
    assert len(index.layers) >= 6
    assert all(layer.num_experts >= 32 for layer in index.layers)
    assert {spec.bits for layer in index.layers for _, spec in layer.quant} == {4}


@pytest.mark.slow
def test_perplexity_through_the_stream_is_the_published_one(runtime):
    published = json.loads((demo_path() / "metrics.json").read_text())["excerpt_4bit"]
    total, scored, read = 0.0, 0, runtime.engine.reader.counters.bytes
    for number, window in enumerate(windows(runtime)):
        with runtime.engine.backend.compute_scope():
            logits = runtime.model(mx.array([window]))[0].astype(mx.float32)
            mx.eval(logits)
        losses = np.array(mx.logsumexp(logits[:-1], axis=-1)) - np.array(
            mx.take_along_axis(logits[:-1], mx.array(window[1:])[:, None], axis=1)[:, 0]
        )
        total, scored = total + float(losses.sum()), scored + len(losses)
        if number % 6 == 0:  # the layer-major path says the same about the last token
            assert relative(runtime.prefill(window).logits, logits[-1]) < 1e-4
    assert scored == published["scored_tokens"]
    assert math.exp(total / scored) == pytest.approx(published["perplexity"], rel=1e-3)
    assert runtime.engine.reader.counters.bytes - read > 10 * runtime.engine.index.nbytes
    assert published["perplexity"] < 40


def test_it_writes_english_words(runtime):
    text = runtime.generate("And it came to pass", max_tokens=40)
    known = set((demo_path() / "heldout.txt").read_text(encoding="utf-8").lower().split())
    words = text.lower().split()
    assert len(words) >= 15
    assert sum(word in known for word in words) >= 0.7 * len(words)
