"""On an NVIDIA GPU: the kernels through NVRTC against numpy, and models through the real runtime.

Set ``MLX_ENABLE_TF32=0``, as tools/check_cuda.py does: float32 models are compared closely.
"""

import mlx.core as mx
import numpy as np
import pytest

from mlx_stream.backends.cuda.backend import CudaBackend
from mlx_stream.backends.kernels.grouped_cuda import cuda_kernel_source
from mlx_stream.backends.kernels.launch import run_cuda
from mlx_stream.storage.quant_spec import QuantSpec
from tests.backends.cuda.cases import TOLERANCE, combine_case, down_case, up_case
from tests.backends.cuda.test_fused_model import HalfExperts
from tests.kernel_shim.arrays import Buf
from tests.prefill.running import decode, relative, settled_prompt

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not mx.cuda.is_available(), reason="needs an NVIDIA GPU and MLX's CUDA build"
    ),
]
SPECS = [QuantSpec("affine", 4, 64), QuantSpec("affine", 8, 32), QuantSpec("mxfp4", 4, 32)]
N, STEPS = 50, 4


def on_device(array):
    if isinstance(array, Buf):
        return mx.array(array.array).view(mx.bfloat16)
    return mx.array(array)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("kernel", ["moe_up", "moe_down", "moe_combine"])
def test_kernels_agree_with_numpy(kernel, spec, dtype):
    """The wrappers of PTX instructions run here and nowhere else."""
    shape = {"k": 256, "n": 200, "counts": (0, 1, 65, 130), "tile": 64, "bias": True}
    if kernel == "moe_combine":
        case = combine_case(dtype, tokens=300, topk=8, dims=256, add=True)
    else:
        case = (up_case if kernel == "moe_up" else down_case)(dtype, spec, **shape)
    source = cuda_kernel_source(kernel)
    (y,) = run_cuda(source, case.launch, [on_device(a) for a in case.inputs])
    got = np.array(y.astype(mx.float32))
    assert relative(got, case.expected) <= TOLERANCE[dtype]


@pytest.mark.parametrize("backend", [CudaBackend, HalfExperts], ids=["plan-c", "fused"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "phixtral"])
def test_families_equal_stock(checkpoint, stock, open_cuda, name, backend):
    path = checkpoint(name)
    prompt, rows = settled_prompt(stock(path), N, STEPS)
    engine = open_cuda(path, backend=backend(), io="direct")
    result = engine.prefill(prompt)
    assert relative(result.logits, rows[0]) < 5e-3
    assert decode(engine, result, prompt, STEPS) == [int(row.argmax()) for row in rows]
    path_taken = "fused" if backend is HalfExperts else "dequantize"
    assert {c.path for c in engine.backend.choices.values()} == {path_taken}
    assert "pinned-staging" in engine.backend.capabilities
