"""The Metal backend with our kernels in place of MLX's gathers, the kernels on the CPU shim."""

import pytest

from mlx_stream.backends.kernels.selection import KernelChoiceError, choose, forced_path
from mlx_stream.backends.metal import MetalBackend
from mlx_stream.hub import demo_path
from tests.backends.kernels.running import ShimRunner
from tests.kernel_shim import needs_clang
from tests.prefill.running import decode, generate, relative

PROMPT = ([ord(c) % 60 + 20 for c in "In the beginning God created the heaven and the earth"])[:24]
STEPS = 9


@needs_clang
@pytest.mark.slow
def test_demo_through_the_metal_kernels_gives_the_cpu_backends_tokens(
    open_engine, open_metal, monkeypatch
):
    cpu = open_engine(demo_path(), prerouter="off")
    expected, tokens = cpu.prefill(PROMPT), generate(cpu, PROMPT, STEPS)
    monkeypatch.setenv("MLX_STREAM_KERNELS", "fused")
    runner = ShimRunner()
    metal = MetalBackend(require_device=False, run=runner)
    engine = open_metal(demo_path(), backend=metal, prerouter="off")
    result = engine.prefill(PROMPT)
    assert relative(result.logits, expected.logits) < 1e-4
    assert runner.launches["expert_combine"] == runner.launches["expert_down"] > 0
    prefilled = runner.launches.copy()
    assert decode(engine, result, PROMPT, STEPS) == tokens
    assert runner.findings == []
    layers = {f"{path}: MLX_STREAM_KERNELS=fused": 6 for path in ("fused", "combine")}
    assert result.receipt.kernels == layers
    # A step runs after each token but the last: the decode kernels, and nothing else of ours.
    decoded = runner.launches - prefilled
    assert set(decoded) == {"expert_decode_up", "expert_decode_down"}
    assert min(decoded.values()) >= 6 * (STEPS - 1)
    assert engine.prefill(PROMPT).receipt.kernels["decode: MLX_STREAM_KERNELS=fused"] == 6


def test_a_format_without_kernels_decodes_by_stock_operations(checkpoint, open_metal, monkeypatch):
    monkeypatch.setenv("MLX_STREAM_KERNELS", "fused")
    runner = ShimRunner()
    engine = open_metal(
        checkpoint("qwen3_moe", bits=6), backend=MetalBackend(require_device=False, run=runner)
    )
    generate(engine, PROMPT, 2)
    assert runner.launches == {}
    kernels = engine.prefill(PROMPT).receipt.kernels
    assert {name.partition(":")[0] for name in kernels} == {"stock", "stock decode"}
    assert all("no kernel for affine weights of 6 bits" in name for name in kernels)


CASE = {
    "forced": "auto",
    "supported": True,
    "unsupported_reason": "none",
    "format_name": "affine 4-bit g64",
    "rows_per_expert": 128.0,
    "verified": {"affine 4-bit g64": 1.2},
}


@pytest.mark.parametrize(
    ("changes", "path", "word"),
    [
        ({}, "fused", "1.20x"),
        ({"rows_per_expert": 8.0}, "stock", "8 rows"),
        ({"verified": {}}, "stock", "doctor"),
        ({"verified": {"affine 4-bit g64": 0.9}}, "stock", "0.90x"),
        ({"forced": "fused", "verified": {}, "rows_per_expert": 1.0}, "fused", "=fused"),
        ({"forced": "stock"}, "stock", "=stock"),
        ({"supported": False, "forced": "fused"}, "stock", "no kernel"),
    ],
)
def test_the_choice_has_a_reason(changes, path, word):
    choice = choose(**(CASE | changes))
    assert choice.path == path
    assert word in choice.reason


def test_an_unknown_value_is_an_error(monkeypatch):
    monkeypatch.setenv("MLX_STREAM_KERNELS", "fast")
    with pytest.raises(KernelChoiceError, match="fast"):
        forced_path()
