"""The CUDA backend's code on whatever device MLX has here: stock operations, a fake runtime.

Everything but the CUDA calls is what runs on a GPU: slots, mirrors, un-sort, weighted sums, plan C.
"""

import mlx.core as mx
import pytest

from mlx_stream.backends.cuda.backend import CudaBackend
from mlx_stream.backends.select import select_backend
from mlx_stream.errors import CapabilityError
from tests.prefill.running import QUANTIZATIONS, decode, relative, settled_prompt
from tests.support.checkpoints import random_tokens

FAMILIES = ("qwen3_moe", "gpt_oss", "llama4", "phixtral", "deepseek_v32", "nemotron_h")
N, STEPS = 50, 4


@pytest.mark.parametrize("io", ["buffered", "direct"])
@pytest.mark.parametrize("name", FAMILIES)
def test_families_equal_stock(checkpoint, stock, open_cuda, fake, name, io):
    path = checkpoint(name)
    prompt, rows = settled_prompt(stock(path), N, STEPS)
    engine = open_cuda(path, io=io)
    result = engine.prefill(prompt)
    assert relative(result.logits, rows[0]) < 1e-5
    assert decode(engine, result, prompt, STEPS) == [int(row.argmax()) for row in rows]
    assert result.receipt.backend == "cuda"
    assert fake.copied_nbytes > 0
    assert not fake.misuse


@pytest.mark.parametrize("path", ["hot", "staged"])
def test_cuda_has_no_stacked_slots(checkpoint, open_cuda, path):
    with pytest.raises(CapabilityError, match="the cuda backend has no stacked"):
        open_cuda(checkpoint("qwen3_moe"), decode_path=path)


@QUANTIZATIONS
def test_quantizations_equal_stock(checkpoint, stock, open_cuda, options):
    path = checkpoint("qwen3_moe", **options)
    prompt, rows = settled_prompt(stock(path), N, STEPS)
    engine = open_cuda(path)
    result = engine.prefill(prompt)
    assert relative(result.logits, rows[0]) < 1e-5
    assert decode(engine, result, prompt, STEPS) == [int(row.argmax()) for row in rows]


def test_without_a_cuda_runtime_mlx_copies(checkpoint, stock, open_cuda):
    path = checkpoint("qwen3_moe")
    prompt, rows = settled_prompt(stock(path), N, STEPS)
    engine = open_cuda(path, backend=CudaBackend(require_device=False), io="direct")
    assert "pinned-staging" not in engine.backend.capabilities
    result = engine.prefill(prompt)
    assert relative(result.logits, rows[0]) < 1e-5
    assert decode(engine, result, prompt, STEPS) == [int(row.argmax()) for row in rows]


def test_small_parts_of_a_group_are_unpacked_one_after_the_other(
    checkpoint, stock, open_cuda, monkeypatch
):
    """Plan C with room for one expert's dense weights at a time."""
    monkeypatch.setattr("mlx_stream.backends.cuda.expert_paths.DequantizePath.__init__", tiny_parts)
    path = checkpoint("qwen3_moe")
    prompt, rows = settled_prompt(stock(path), N, 1)
    assert relative(open_cuda(path).prefill(prompt).logits, rows[0]) < 1e-5


def tiny_parts(self, mlp, nbytes=1):
    self._module, self._nbytes, self._values = mlp.module, nbytes, 1


def test_the_choice_of_every_layer_has_a_reason(checkpoint, open_cuda, fake):
    engine = open_cuda(checkpoint("qwen3_moe"))
    engine.prefill(random_tokens(160, 12))
    choices = engine.backend.choices
    assert len(choices) == len(engine._mlps)
    assert {(c.path, c.reason) for c in choices.values()} == {("dequantize", "no CUDA device")}


def test_a_missing_device_is_an_error_that_names_it():
    if mx.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(CapabilityError, match=r"NVIDIA GPU[\s\S]*cuda13"):
        select_backend("cuda")


def test_a_missing_runtime_library_is_an_error_that_names_it(monkeypatch):
    from mlx_stream.backends.cuda import cudart

    monkeypatch.setattr(cudart, "_candidates", lambda: iter(["libcudart-of-nowhere.so"]))
    with pytest.raises(CapabilityError, match=r"libcudart[\s\S]*libcudart-of-nowhere"):
        cudart.CtypesCudart()


def test_kernels_can_be_forced_and_typos_are_errors(monkeypatch):
    for word in ("fused", "stock"):
        monkeypatch.setenv("MLX_STREAM_KERNELS", word)
        CudaBackend(require_device=False).close()
    monkeypatch.setenv("MLX_STREAM_KERNELS", "fsued")
    with pytest.raises(CapabilityError, match="fsued"):
        CudaBackend(require_device=False)


def test_slots_are_pinned_aligned_and_pooled(fake):
    backend = CudaBackend(require_device=False, cudart=fake)
    first = backend.allocate(100_000, 1 << 14)
    assert first.array.ctypes.data % (1 << 14) == 0
    assert first.nbytes >= 100_000
    backend.free(first)
    assert backend.allocate(100_000, 1 << 14) is first
    assert fake.calls.count("host_alloc") == 1
    backend.free(first)
    other = backend.allocate(300_000, 4096)
    assert fake.calls.count("host_free") == 1, "slots of another size must make room"
    backend.free(other)
    assert backend.pinned_nbytes > 0
    backend.close()
    assert backend.pinned_nbytes == 0
    assert fake.open_handles == 0


def test_closing_puts_the_cache_limit_back(fake):
    previous = mx.set_cache_limit(123 << 20)
    try:
        backend = CudaBackend(require_device=False, cudart=fake)
        assert mx.set_cache_limit(1 << 20) != 123 << 20
        backend.close()
        assert mx.set_cache_limit(123 << 20) == 123 << 20
    finally:
        mx.set_cache_limit(previous)
