"""The shim's text is what MLX compiles: both generated, MLX's taken from an exported function.

``mx.export_function`` records a Metal kernel on any machine, complete with its source, through the
very call that production makes.
"""

import re

import mlx.core as mx
import numpy as np
import pytest

from mlx_stream.backends.kernels.launch import DTYPES, run_metal

from . import Buf
from .arrays import as_buf
from .generate import METAL_ATTRIBUTES, metal_kernel
from .support import AFFINE, MXFP4, inline_kernel, launch, moe_case


def to_mlx(buf: Buf) -> mx.array:
    if buf.dtype == "bfloat16":
        return mx.array(buf.array).view(mx.bfloat16)
    return mx.array(buf.array)


def recorded(source, where, bufs, tmp_path) -> str:
    """The kernel's text in what MLX exports, its name normalised."""

    def function(*arrays):
        return run_metal(source, where, arrays, stream=mx.gpu)

    path = tmp_path / "kernel.mlxfn"
    mx.export_function(str(path), function, *map(to_mlx, bufs))
    data = path.read_bytes()
    start = data.index(source.header.encode())
    end = data.index(b"\0", start)  # the text's length is stored before it, small numbers after
    text = data[start:end].decode(errors="ignore")
    return text[: text.rindex("}\n" if not where.template else ";\n") + 2]


def assert_equal_text(source, where, inputs, tmp_path):
    bufs = [as_buf(array) for array in inputs]
    theirs = recorded(source, where, bufs, tmp_path)
    kernel = metal_kernel(source, where, bufs)
    name = re.search(r"\[\[kernel\]\] void (\w+)\(", theirs)[1]
    ours = kernel.text.replace(kernel.call.partition("<")[0], name)
    assert ours == theirs
    # The name carries the types in some versions of MLX; ours follows 0.32.4.
    assert name.startswith(f"custom_kernel_{source.name}")


@pytest.mark.parametrize("mode", [AFFINE, MXFP4], ids=["affine", "mxfp4"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_moe_gemm(dtype, mode, tmp_path):
    case = moe_case("metal", dtype, mode)
    assert_equal_text(case.source, case.launch, case.inputs, tmp_path)


def test_every_kind_of_parameter(tmp_path):
    """Scalars, small arrays, shapes, strides, ndim, all types, negative and boolean values."""
    types = [name for name in DTYPES if name != "bfloat16"]  # numpy cannot make that one
    names = [f"in_{name}" for name in types]
    body = "y[0] = in_uint8_shape[0] + in_int32_strides[1] + in_int64_ndim + in_bool_shape;\n"
    body += "// " + " ".join(METAL_ATTRIBUTES)
    source = inline_kernel(
        body, inputs=" ".join(names), outputs="y z", template="A=int B=bool C=dtype D=bool"
    )
    shapes = [(), (7,), (8,), (2, 2, 2), (3, 0)] + [(4, 4)] * (len(types) - 5)
    inputs = [np.zeros(shape, name) for shape, name in zip(shapes, types, strict=True)]
    template = {"A": -3, "B": True, "C": "bfloat16", "D": False}
    where = launch(64, [((4,), "bfloat16"), ((2, 2), "uint64")], template=template)
    assert_equal_text(source, where, inputs, tmp_path)


def test_no_template(tmp_path):
    source = inline_kernel("y[thread_position_in_grid.x] = x[0];")
    where = launch(64, [((64,), "float32")])
    assert_equal_text(source, where, [np.zeros(64, np.float32)], tmp_path)
