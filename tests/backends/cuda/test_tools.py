"""tools/check_cuda.py and tools/build_cuda.py, as far as they go without a GPU."""

import json
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_stream.backends.cuda.backend import CudaBackend
from tests.backends.cuda.shim_launcher import ShimLauncher
from tests.kernel_shim.compiler import find_compiler
from tools import check_cuda
from tools.build_cuda import MAIN, Usage, document, parse_usage, table

ROOT = Path(check_cuda.__file__).resolve().parent.parent


@pytest.mark.skipif(mx.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_check_says_so():
    command = [sys.executable, str(ROOT / "tools" / "check_cuda.py")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == check_cuda.EXIT_NO_GPU
    assert "nothing was checked" in done.stderr
    report = json.loads(done.stdout)
    assert report["status"] == "no-gpu"
    assert any("CUDA device" in what for what in report["missing"])


def test_the_check_fits_into_eight_minutes():
    assert sum(check_cuda.LIMITS.values()) < 480


@pytest.mark.skipif(find_compiler() is None, reason="needs clang >= 17")
def test_comparing_paths(checkpoint, open_cuda, fake):
    """The measuring code itself; gather_mm here computes in float32 only, so only ours runs."""
    backend = CudaBackend(require_device=False, cudart=fake, launcher=ShimLauncher())
    engine = open_cuda(checkpoint("qwen3_moe"), backend=backend, io="direct")
    row = check_cuda.compare_paths(engine, mx.float16, 3, 1)
    assert row["choice"] == "fused: supported"
    assert row["ms"]["fused"] > 0
    assert "float32" in row["ms"]["dequantize"]
    exact = check_cuda.compare_paths(engine, mx.float32, 3, 1)
    assert exact["choice"].startswith("dequantize")
    assert exact["ms"]["gather_qmm"] > 0


def test_a_hanging_check_is_a_line_of_the_report(monkeypatch, tmp_path):
    script = tmp_path / "slow.py"
    script.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(check_cuda, "__file__", str(script))
    assert check_cuda.in_a_process("copies", 0.5)["error"] == "not done after 0 s"
    script.write_text("import sys; sys.exit(7)")
    assert check_cuda.in_a_process("copies", 30)["error"] == "exit status 7"


def test_reading_what_ptxas_says():
    log = (
        "ptxas info    : Function properties for k\n"
        "    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads\n"
        "ptxas info    : Used 154 registers, used 1 barriers, 44544 bytes smem, 400 bytes cmem[0]\n"
    )
    assert parse_usage(log) == Usage(154, 44544, 16, 0.0)


def test_the_document_keeps_its_prose():
    results = {(MAIN, "sm_80"): Usage(154, 44544, 0, 1.0)}
    text = document(results, ["sm_80"], "nvcc 1", "# Title\n\nprose\n")
    again = document(results, ["sm_80"], "nvcc 1", text)
    assert text == again
    assert text.startswith("# Title\n\nprose\n")
    assert table(results, ["sm_80"]) in text
    assert "154 / 43.5 KiB" in text


def test_the_generated_text_is_mlxs():
    """Wrapper, namespace and constants as mlx/backend/cuda/custom_kernel.cpp writes them."""
    text = MAIN.text
    kernel = text[text.index("namespace mlx::core::cu {\n\n") :]
    assert kernel.startswith(
        "namespace mlx::core::cu {\n\nnamespace cg = cooperative_groups;\n\n__global__ void "
    )
    for line in (
        "using T = __nv_bfloat16;",
        "constexpr int BM = 64;",
        "constexpr bool GATED = true;",
    ):
        assert f"  {line}\n" in kernel
    assert kernel.rstrip().endswith("}\n\n} // namespace mlx::core::cu")
