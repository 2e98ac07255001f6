"""A whole model whose experts run in our CUDA kernels, on the CPU shim: prefill and decode."""

import mlx.core as mx
import pytest

from mlx_stream.backends.base import ChunkInput
from mlx_stream.backends.cuda.backend import CudaBackend
from tests.backends.cuda.shim_launcher import ShimLauncher
from tests.kernel_shim.compiler import find_compiler
from tests.prefill.running import decode, relative, settled_prompt
from tests.support.checkpoints import random_tokens

pytestmark = pytest.mark.skipif(
    find_compiler() is None, reason="running kernels on the CPU needs clang >= 17"
)
N, STEPS = 24, 2


class HalfExperts(CudaBackend):
    """Experts in float16 inside a float32 model: what differs from stock is the kernels' work."""

    def begin_layer(self, mlp, chunks):
        halves = [ChunkInput(c.x.astype(mx.float16), c.indices, c.scores) for c in chunks]
        layer = super().begin_layer(mlp, halves)
        outputs, dtype = layer.outputs, chunks[0].x.dtype
        layer.outputs = lambda: [y.astype(dtype) for y in outputs()]
        return layer


@pytest.fixture
def open_fused(open_cuda, fake):
    """``open_fused(folder) -> (engine, launcher)``."""

    def load(path, backend=CudaBackend, **options):
        launcher = ShimLauncher()
        made = backend(require_device=False, cudart=fake, launcher=launcher)
        return open_cuda(path, backend=made, **options), launcher

    return load


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("qwen3_moe", {}),
        ("qwen3_moe", {"bits": 8, "group_size": 32}),
        ("gpt_oss", {"mode": "mxfp4"}),
        ("phixtral", {}),  # fc1, GELU, fc2, with biases
        ("gemma4_text", {}),
    ],
    ids=["affine4", "affine8", "gpt-oss-mxfp4", "two-matrix", "geglu"],
)
def test_a_model_gives_the_tokens_of_stock(checkpoint, stock, open_fused, name, options):
    path = checkpoint(name, **options)
    prompt, rows = settled_prompt(stock(path), N, STEPS)
    engine, launcher = open_fused(path, HalfExperts)
    result = engine.prefill(prompt)
    assert relative(result.logits, rows[0]) < 5e-3
    assert {c.path for c in engine.backend.choices.values()} == {"fused"}
    before = dict(launcher.launches)
    assert before["moe_up"] == before["moe_down"] >= len(engine._mlps)
    assert decode(engine, result, prompt, STEPS) == [int(row.argmax()) for row in rows]
    assert launcher.launches["moe_up"] > before["moe_up"], "decode runs in the kernels too"


def test_sixteen_bit_models_stay_sixteen_bit(checkpoint, stock, open_fused):
    """No casts to float32; CPU MLX's own bfloat16 layers are coarse, hence the tolerance."""
    path = checkpoint("qwen3_moe", dtype="bfloat16")
    prompt, rows = settled_prompt(stock(path), N, 1)
    engine, launcher = open_fused(path)
    result = engine.prefill(prompt)
    assert result.logits.dtype == mx.bfloat16
    assert relative(result.logits.astype(mx.float32), rows[0]) < 0.1
    assert all(len(dtypes) == 1 for dtypes in launcher.input_dtypes.values()), (
        "MLX would run one compiled kernel for inputs of two dtypes"
    )
    assert all(d != "mlx.core.float32" for d in _x_dtypes(launcher))


def _x_dtypes(launcher):
    return [dtypes[0] for every in launcher.input_dtypes.values() for dtypes in every]


def test_layers_that_the_kernels_cannot_compute_take_the_stock_path(checkpoint, open_fused):
    """float32 activations; and the receipt of each layer says so."""
    engine, launcher = open_fused(checkpoint("qwen3_moe"))
    engine.prefill(random_tokens(160, 12))
    assert not launcher.launches
    reasons = {c.reason for c in engine.backend.choices.values()}
    assert reasons == {"tensor cores take float16 or bfloat16, not float32"}


def test_stock_can_be_forced(checkpoint, open_cuda, fake):
    launcher = ShimLauncher()
    backend = CudaBackend(require_device=False, cudart=fake, kernels="stock", launcher=launcher)
    engine = open_cuda(checkpoint("qwen3_moe"), backend=backend)
    engine.prefill(random_tokens(160, 12))
    assert not launcher.launches
    assert {c.path for c in backend.choices.values()} == {"dequantize"}
