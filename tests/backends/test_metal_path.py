"""The metal backend's code on whatever device MLX has here, and on an Apple GPU where there is one.

The code path is the same: planes over a slot, sorted gathers, lazy evaluation with fences.
"""

import mlx.core as mx
import numpy as np
import pytest

from mlx_stream.backends.metal import MetalBackend
from mlx_stream.backends.select import select_backend
from mlx_stream.errors import CapabilityError
from tests.prefill.running import QUANTIZATIONS, decode, relative, settled_prompt
from tests.support.checkpoints import random_tokens

FAMILIES = (
    "qwen3_moe",
    "gpt_oss",
    "llama4",
    "phixtral",
    "qwen3_next",
    "deepseek_v32",
    "gemma4_text",
    "nemotron_h",
)
N, STEPS = 50, 5


@pytest.mark.parametrize("name", FAMILIES)
def test_families_equal_stock(checkpoint, stock, open_metal, name):
    path = checkpoint(name)
    prompt, rows = settled_prompt(stock(path), N, STEPS)
    engine = open_metal(path)
    result = engine.prefill(prompt)
    assert relative(result.logits, rows[0]) < 1e-5
    assert decode(engine, result, prompt, STEPS) == [int(row.argmax()) for row in rows]
    assert result.receipt.backend == "metal"


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "kimi_linear"])
def test_backends_agree(checkpoint, open_engine, open_metal, name):
    path, prompt = checkpoint(name), random_tokens(160, N)
    cpu = open_engine(path, io="buffered").prefill(prompt)
    metal = open_metal(path).prefill(prompt)
    assert relative(metal.logits, cpu.logits) < 1e-4
    for field in ("bytes_read", "distinct_expert_bytes", "segments", "mode", "weighted_layers"):
        assert getattr(metal.receipt, field) == getattr(cpu.receipt, field), field


@QUANTIZATIONS
def test_quantizations_equal_stock(checkpoint, stock, open_metal, options):
    path = checkpoint("qwen3_moe", **options)
    prompt, rows = settled_prompt(stock(path), N, STEPS)
    engine = open_metal(path)
    result = engine.prefill(prompt)
    assert relative(result.logits, rows[0]) < 1e-5
    assert decode(engine, result, prompt, STEPS) == [int(row.argmax()) for row in rows]


def test_sixteen_bit_activations_stay_sixteen_bit(checkpoint, open_metal):
    """No cast to float32 on a GPU: what mlx-lm computes in bfloat16 stays in bfloat16."""
    from mlx_lm.utils import load_model

    path = checkpoint("qwen3_moe", dtype="bfloat16")
    prompt = random_tokens(160, 12)
    engine = open_metal(path)
    result = engine.prefill(prompt)
    assert result.logits.dtype == mx.bfloat16
    model, _ = load_model(path)
    expected = model(mx.array(prompt)[None])[0, -1]
    assert expected.dtype == mx.bfloat16
    got, expected = (np.array(a.astype(mx.float32)) for a in (result.logits, expected))
    assert relative(got, expected) < 0.05


def test_slots_come_from_a_pool_and_are_aligned():
    backend = MetalBackend(require_device=False)
    first = backend.allocate(100_000, 4096)
    assert first.nbytes >= 100_000
    assert first.array.ctypes.data % 4096 == 0
    first.array[:] = 7
    backend.free(first)
    assert backend.allocate(100_000, 4096) is first
    assert backend.allocate(100_000, 4096) is not first
    backend.close()


def test_published_planes_are_views_of_the_slot(checkpoint, open_metal):
    """A refilled slot is seen without a copy: what the readers write is what is computed with."""
    from mlx_stream.storage.read_plan import plan_group

    engine = open_metal(checkpoint("qwen3_moe", mode="none"))
    mlp = engine._mlps[0]
    read = plan_group(mlp.layer, (0, 1), align=1, file_sizes=engine.reader.file_sizes)
    buffer = engine.backend.allocate(read.slot_nbytes, 1)
    engine.reader.submit(read.ops, buffer.array).wait()
    plane = read.planes[0]
    published = engine.backend.publish(mlp, read, buffer)
    before = np.array(published.weights[plane.key])
    start = plane.offsets[0]
    raw = buffer.array[start : start + 2 * plane.nbytes]
    assert (before == raw.view(np.float32).reshape(2, *plane.shape)).all()
    raw[:] = 0
    again = engine.backend.publish(mlp, read, buffer).weights[plane.key]
    assert not np.array(again).any()


def test_a_missing_device_is_an_error_that_names_it():
    if mx.metal.is_available():
        pytest.skip("there is a Metal device")
    with pytest.raises(CapabilityError, match="Apple GPU"):
        select_backend("metal")


def test_selecting_a_backend():
    auto = select_backend("auto")
    assert auto.name == ("metal" if mx.metal.is_available() else "cpu")
    auto.close()
    with pytest.raises(CapabilityError, match="cuda"):
        select_backend("cuda")


def test_closing_puts_mlx_settings_back():
    previous = mx.set_cache_limit(123 << 20)
    try:
        for name in ("cpu", "metal"):
            device = mx.default_device()
            backend = (
                MetalBackend(require_device=False) if name == "metal" else select_backend(name)
            )
            assert mx.set_cache_limit(1 << 20) != 123 << 20
            backend.close()
            assert mx.default_device() == device
            assert mx.set_cache_limit(123 << 20) == 123 << 20
    finally:
        mx.set_cache_limit(previous)


@pytest.mark.metal
@pytest.mark.parametrize("name", FAMILIES)
def test_families_equal_stock_on_the_gpu(checkpoint, stock, open_engine, name):
    path = checkpoint(name)
    prompt, rows = settled_prompt(stock(path), N, STEPS)
    engine = open_engine(path, backend="metal")
    result = engine.prefill(prompt)
    assert relative(result.logits, rows[0]) < 1e-3
    assert decode(engine, result, prompt, STEPS) == [int(row.argmax()) for row in rows]
