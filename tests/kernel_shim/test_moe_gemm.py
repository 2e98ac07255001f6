"""The shim on a whole kernel: right values, nothing found, in every type, mode and order."""

import shutil
import subprocess

import numpy as np
import pytest

from . import needs_clang, nvcc_text, run_on_cpu
from .arrays import as_buf
from .support import AFFINE, MXFP4, moe_case

pytestmark = needs_clang
TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}
CASES = [("metal", t) for t in TOLERANCE] + [("cuda", "float16"), ("cuda", "bfloat16")]


@pytest.mark.parametrize("mode", [AFFINE, MXFP4], ids=["affine", "mxfp4"])
@pytest.mark.parametrize(("language", "dtype"), CASES)
def test_agrees_with_numpy_and_the_checker_is_silent(language, dtype, mode):
    case = moe_case(language, dtype, mode)
    (y,), findings = run_on_cpu(case.source, case.launch, case.inputs)
    assert not findings, "\n".join(map(str, findings))
    assert case.error(y) <= TOLERANCE[dtype]


@pytest.mark.parametrize("language", ["metal", "cuda"])
def test_every_order_gives_the_same_bits(language):
    case = moe_case(language, "float16")
    runs = [
        run_on_cpu(case.source, case.launch, case.inputs, check=False, order=order, seed=seed)
        for order, seed in [("fifo", 0), ("reverse", 0), ("shuffled", 1), ("shuffled", 2)]
    ]
    for (y,), findings in runs:
        assert not findings
        np.testing.assert_array_equal(y, runs[0][0][0])


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc: the asm is not compiled here")
def test_nvcc_compiles_what_the_shim_ran(tmp_path):
    case = moe_case("cuda", "bfloat16", MXFP4)
    text = nvcc_text(case.source, case.launch, [as_buf(a) for a in case.inputs])
    (tmp_path / "kernel.cu").write_text(text)
    command = "nvcc -std=c++17 -arch=sm_80 -cubin -o kernel.cubin kernel.cu"
    done = subprocess.run(command.split(), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
