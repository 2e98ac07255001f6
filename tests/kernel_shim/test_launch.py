"""Launch parameters are held against the kernel before anything runs, on a GPU as on the shim."""

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_stream.backends.kernels.launch import (
    Launch,
    LaunchError,
    check_launch,
    dtype_name,
    run_cuda,
    run_metal,
)

from .support import inline_kernel

SOURCE = inline_kernel("y[0] = T(x[0]);", template="T=dtype N=int FLAG=bool")
GOOD = Launch(
    template={"T": "bfloat16", "N": 3, "FLAG": True},
    grid=(64, 1, 1),
    threadgroup=(32, 1, 1),
    output_shapes=((64,),),
    output_dtypes=("float32",),
)


def test_a_fitting_launch_passes():
    check_launch(SOURCE, GOOD, 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"template": {"T": "bfloat16", "N": 3}}, "template parameters differ"),
        ({"template": {"N": 3, "T": "bfloat16", "FLAG": True}}, "template parameters differ"),
        ({"template": {"T": "bfloat16", "N": True, "FLAG": True}}, "N has the wrong kind"),
        ({"template": {"T": "bfloat16", "N": 3, "FLAG": 1}}, "FLAG has the wrong kind"),
        ({"template": {"T": "float64", "N": 3, "FLAG": True}}, "T has the wrong kind"),
        ({"output_shapes": ()}, "number of outputs"),
        ({"output_dtypes": ("float32", "float32")}, "number of outputs"),
        ({"output_dtypes": ("float64",)}, "unknown output dtype"),
        ({"grid": (0, 1, 1)}, "grid must be three positive"),
        ({"threadgroup": (32, 1)}, "threadgroup must be three positive"),
        ({"threadgroup": (1024, 2, 1)}, "too many threads"),
        ({"dynamic_shared": 1}, "is CUDA's"),
    ],
)
def test_an_unfit_launch_is_refused(change, message):
    with pytest.raises(LaunchError, match=message):
        check_launch(SOURCE, replace(GOOD, **change), 1)


def test_the_number_of_inputs_is_checked():
    with pytest.raises(LaunchError, match="number of inputs"):
        check_launch(SOURCE, GOOD, 2)


def test_a_kernel_of_the_other_language_is_refused():
    cuda = inline_kernel("y[0] = x[0];", language="cuda")
    with pytest.raises(LaunchError, match="another language"):
        run_metal(cuda, GOOD, [mx.zeros(64)])
    with pytest.raises(LaunchError, match="another language"):
        run_cuda(SOURCE, GOOD, [mx.zeros(64)])


def test_dtype_names():
    assert dtype_name(mx.bfloat16) == "bfloat16"
    assert dtype_name(mx.array(np.zeros(1, np.uint8)).dtype) == "uint8"


@pytest.mark.skipif(mx.metal.is_available(), reason="this machine has the device")
def test_without_a_gpu_mlx_itself_says_so():
    with pytest.raises(RuntimeError, match="No Metal back-end"):
        run_metal(SOURCE, GOOD, [mx.zeros(64)])
