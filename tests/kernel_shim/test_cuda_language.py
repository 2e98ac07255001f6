"""The CUDA subset of the shim against numpy, one feature a test."""

import numpy as np
import pytest

from . import needs_clang, run_on_cpu
from .support import KERNELS, as_float, cast, inline_kernel, launch

pytestmark = needs_clang
I = "const int i = blockIdx.x * blockDim.x + threadIdx.x; "  # noqa: E741
X = np.linspace(-3, 3, 64, dtype=np.float32)
PTX = (KERNELS / "cuda" / "ptx.h").read_text()


def run(body, inputs=(X,), *, threads=64, out=((64,), "float32"), kinds="", **options):
    """One output of a kernel whose inputs are named x, w; nothing may be found."""
    source = inline_kernel(
        I + body,
        inputs=" ".join("xw"[: len(inputs)]),
        header=PTX,
        language="cuda",
        template=kinds,
    )
    (y,), found = run_on_cpu(source, launch(threads, [out], **options), list(inputs))
    assert not found, [*map(str, found)]
    return y


def test_warp_shuffles_and_their_widths():
    body = """
      float s = x[i];
      for (int d = 16; d; d /= 2) s += __shfl_xor_sync(~0u, s, d);
      y[i] = s + __shfl_down_sync(~0u, x[i], 3) + __shfl_up_sync(~0u, x[i], 3)
             + __shfl_sync(~0u, x[i], 9, 8) + __shfl_down_sync(~0u, x[i], 3, 8)
             + __shfl_up_sync(~0u, x[i], 1, 4);
    """
    y = run(body)
    lane = np.arange(32)
    for k, part in enumerate(X.reshape(2, 32)):
        down = part[np.where(lane + 3 < 32, lane + 3, lane)]
        up = part[np.where(lane >= 3, lane - 3, lane)]
        eighth = part[lane // 8 * 8 + 1] + part[np.where(lane % 8 + 3 < 8, lane + 3, lane)]
        fourth = part[np.where(lane % 4 >= 1, lane - 1, lane)]
        expected = part.sum() + down + up + eighth + fourth
        np.testing.assert_allclose(y[k * 32 : k * 32 + 32], expected, rtol=1e-5, atol=1e-4)


def test_pairs_and_bit_casts():
    body = """
      __half2 h = __floats2half2_rn(x[i], 2.f);
      float2 f = __half22float2(__hfma2(h, h, __half2half2(__float2half(1.f))));
      __nv_bfloat162 b = __hmul2(__floats2bfloat162_rn(x[i], 3.f), __floats2bfloat162_rn(1.f, 2.f));
      unsigned u = __byte_perm(0x33221100u, 0x77665544u, 0x7410);
      y[i] = f.x + f.y + __bfloat1622float2(b).y + __uint_as_float(__float_as_uint(x[i]))
             + float(u & 0xff) + float(u >> 24);
    """
    h = X.astype(np.float16).astype(np.float32)
    squares = (h * h + 1).astype(np.float16).astype(np.float32)
    np.testing.assert_allclose(run(body), squares + 5 + 6 + X + 0x00 + 0x77, rtol=1e-6)


def test_wide_loads():
    w = np.arange(256, dtype=np.uint32)
    body = """
      const uint4 a = __ldg(reinterpret_cast<const uint4*>(w) + i);
      const float4 f = *reinterpret_cast<const float4*>(x + i / 4 * 4);
      y[i] = float(a.x + a.y + a.z + a.w) + f.x + f.w;
    """
    quads = X.reshape(16, 4)
    expected = w.reshape(64, 4).sum(1) + np.repeat(quads[:, 0] + quads[:, 3], 4)
    np.testing.assert_allclose(run(body, [X, w]), expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_ldmatrix_and_mma_multiply(dtype):
    rng = np.random.default_rng(2)
    a, b = cast(rng.standard_normal((16, 16)), dtype), cast(rng.standard_normal((8, 16)), dtype)
    body = """
      __shared__ __align__(16) T As[16 * 16], Bs[8 * 16], Bt[16 * 8];
      for (int k = i; k < 256; k += 32) As[k] = x[k];
      for (int k = i; k < 128; k += 32) { Bs[k] = w[k]; Bt[k % 16 * 8 + k / 16] = w[k]; }
      __syncwarp();
      uint32_t a[4], b[2], t[2];
      ldmatrix<4, false>(a, &As[i % 16 * 16 + i / 16 * 8]);
      ldmatrix<2, false>(b, &Bs[i % 8 * 16 + i / 8 % 2 * 8]);
      ldmatrix<2, true>(t, &Bt[i % 16 * 8]);
      float c[4] = {1, 1, 1, 1};
      mma_m16n8k16<T>(c, a, b);
      mma_m16n8k16<T>(c, a, t);
      for (int k = 0; k < 4; k++) y[(i / 4 + k / 2 * 8) * 8 + i % 4 * 2 + k % 2] = c[k];
    """
    where = {"threads": 32, "out": ((16, 8), "float32"), "template": {"T": dtype}}
    y = run(body, [a, b], kinds="T=dtype", **where)
    np.testing.assert_allclose(y, 1 + 2 * as_float(a) @ as_float(b).T, rtol=1e-4, atol=1e-4)


def test_cp_async_pipeline_in_dynamic_shared_memory():
    body = """
      extern __shared__ __align__(16) unsigned char memory[];
      float* stage = reinterpret_cast<float*>(memory);
      for (int k = 0; k < 2; k++) {
        if (i < 8) cp_async16(stage + k * 32 + i * 4, x + k * 32 + i * 4, i == 7 ? 8 : 16);
        cp_async_commit();
      }
      cp_async_wait<1>();
      __syncthreads();
      y[i] = i < 32 ? stage[i] : 0.f;
      cp_async_wait<0>();
      __syncthreads();
      if (i >= 32) y[i] = stage[i];
    """
    expected = X.copy()
    expected[[30, 31, 62, 63]] = 0  # bytes beyond source_bytes become zero
    np.testing.assert_array_equal(run(body, dynamic_shared=256), expected)


def test_the_grid_is_rounded_up_to_whole_blocks():
    """Unlike Metal's: a kernel without a guard writes beyond its output."""
    source = inline_kernel(I + "y[i] = x[i];", language="cuda")
    where = launch(50, [((50,), "float32")], group=32)
    _, found = run_on_cpu(source, where, [X[:50]])
    assert found[0].kind == "out-of-bounds"


def test_shapes_and_atomics():
    body = """
      __shared__ int count;
      if (i == 0) count = 0;
      __syncthreads();
      atomicAdd(&count, x_ndim);
      __syncthreads();
      y[i] = float(count + x_shape[1] + int(x_strides[0]));
    """
    np.testing.assert_array_equal(run(body, [X.reshape(4, 16)]), np.full(64, 128 + 16 + 16))
