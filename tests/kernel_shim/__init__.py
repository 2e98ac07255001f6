"""The CPU shim: runs our Metal and CUDA kernels on Linux, with checks no GPU makes.

``run_on_cpu`` is the whole interface; docs of the parts:

- generate.py: the text MLX would compile, from a `KernelSource` and a `Launch`
- rewrite.py: that text as C++ for clang
- compiler.py: clang, flags, the cache of shared objects
- run.py: buffers between guard zones, the launch, the findings
- runtime/: fibers, scheduler, collectives, checker, and the two language headers
"""

import pytest

from .arrays import Buf, bf16
from .compiler import MIN_CLANG, CompileError, find_compiler
from .generate import nvcc_text
from .rewrite import NotMetalError
from .run import Finding, check_types, run_on_cpu

needs_clang = pytest.mark.skipif(
    find_compiler() is None,
    reason=f"KERNELS NOT TESTED: no clang >= {MIN_CLANG}; apt-get install clang-19 "
    "(or pip install ziglang)",
)

__all__ = [
    "Buf",
    "CompileError",
    "Finding",
    "NotMetalError",
    "bf16",
    "check_types",
    "find_compiler",
    "needs_clang",
    "nvcc_text",
    "run_on_cpu",
]
