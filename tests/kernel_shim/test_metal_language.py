"""The Metal subset of the shim against numpy, one feature a test."""

import numpy as np
import pytest

from mlx_stream.backends.kernels.launch import Launch

from . import bf16, needs_clang, run_on_cpu
from .support import as_float, cast, inline_kernel, launch

pytestmark = needs_clang
I = "const uint i = thread_position_in_grid.x; "  # noqa: E741
X = np.linspace(-3, 3, 64, dtype=np.float32)


def run(body, inputs=(X,), *, threads=64, out=((64,), "float32"), header="", template=None):
    """One output of a kernel whose inputs are named x, w, v; nothing may be found."""
    kinds = {bool: "bool", int: "int", str: "dtype"}
    source = inline_kernel(
        I + body,
        inputs=" ".join("xwv"[: len(inputs)]),
        header=header,
        template=" ".join(f"{n}={kinds[type(v)]}" for n, v in (template or {}).items()),
    )
    where = launch(threads, [out], template=template)
    (y,), found = run_on_cpu(source, where, list(inputs))
    assert not found, [*map(str, found)]
    return y


FUNCTIONS = {
    **{"exp": np.exp, "exp2": np.exp2, "tanh": np.tanh, "sin": np.sin, "cos": np.cos},
    **{"floor": np.floor, "ceil": np.ceil, "trunc": np.trunc, "rint": np.rint},
    **{"fabs": np.abs, "abs": np.abs, "precise::exp": np.exp, "fast::exp": np.exp},
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_math_rounds_once_to_the_argument_type(dtype):
    x = cast(X, dtype)
    body = "".join(f"y[{k * 64} + i] = {name}(x[i]);\n" for k, name in enumerate(FUNCTIONS))
    y = run(body, [x], out=((len(FUNCTIONS), 64), dtype))
    expected = np.stack([as_float(cast(f(as_float(x)), dtype)) for f in FUNCTIONS.values()])
    np.testing.assert_allclose(as_float(y), expected, rtol=1e-6, atol=1e-7)


def test_math_of_positive_numbers_and_pairs():
    x = np.abs(X) + 0.1
    body = "y[i] = log(x[i]) + sqrt(x[i]) * rsqrt(x[i]) + fma(x[i], 2.0, clamp(x[i], 0.5, 1.0)) "
    y = run(body + "+ min(x[i], 1.5f) + max(x[i], 1.5f) + select(0.f, 1.f, isnan(x[i]));", [x])
    expected = np.log(x) + 1 + 2 * x + np.clip(x, 0.5, 1) + np.minimum(x, 1.5) + np.maximum(x, 1.5)
    np.testing.assert_allclose(y, expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_arithmetic_rounds_after_every_operation(dtype):
    x = cast(X * 1.37, dtype)
    y = run("y[i] = x[i] * x[i] + x[i];", [x], out=((64,), dtype))
    product = as_float(cast(as_float(x) * as_float(x), dtype))
    np.testing.assert_array_equal(as_float(y), as_float(cast(product + as_float(x), dtype)))


def test_vectors():
    body = """
      float4 a = ((device const float4*)x)[i];
      float4 b = float4(a.zw, a.xy) * 2.f + float4(1);
      half4 h = half4(b);
      float4 c = static_cast<float4>(h.wzyx);
      ((device float4*)y)[i] = c + dot(a, b);
    """
    y = run(body, threads=16)
    a = X.reshape(16, 4)
    b = a[:, [2, 3, 0, 1]] * 2 + 1
    expected = b.astype(np.float16)[:, ::-1].astype(np.float32) + (a * b).sum(1, keepdims=True)
    np.testing.assert_allclose(y.reshape(16, 4), expected, rtol=1e-5, atol=1e-5)


def test_bytes_words_and_bit_casts():
    w = np.random.default_rng(0).integers(0, 2**32, 64, dtype=np.uint32)
    body = """
      uchar4 b = as_type<uchar4>(w[i]);
      bfloat4 f = bfloat4(b);
      vec<T, 4> t = vec<T, 4>(f);
      uint e = as_type<uint>(float(b.x) + 1.f) >> 23;
      y[i] = float(t.x) + float(t.y) + float(t.z) + float(t.w) + float(e & 0xff);
    """
    y = run(body, [X, w], template={"T": "bfloat16"})
    octets = w.view(np.uint8).reshape(64, 4).astype(np.float32)
    exponent = (octets[:, 0] + 1).view(np.uint32) >> 23
    np.testing.assert_array_equal(y, octets.sum(1) + exponent)


def test_wide_and_packed_loads():
    w = np.arange(256, dtype=np.uint32)
    body = """
      uint4 a = ((device const uint4*)w)[i];
      packed_half2 h = ((device const packed_half2*)(v + 1))[i / 2];
      y[i] = float(a.x + a.y + a.z + a.w) + float(h.x) + float(h.y);
    """
    v = np.append(X, 7).astype(np.float16)
    y = run(body, [X, w, v])
    pairs = v[1:].astype(np.float32).reshape(32, 2).sum(1)
    np.testing.assert_allclose(y, w.reshape(64, 4).sum(1) + np.repeat(pairs, 2), rtol=1e-6)


def test_simd_functions():
    body = """
      const ushort lane = thread_index_in_simdgroup;
      float s = simd_sum(x[i]) + simd_max(x[i]) + simd_min(x[i]) + simd_broadcast(x[i], 3);
      float p = simd_shuffle_xor(x[i], 5) + simd_shuffle(x[i], ushort((lane + 1) % 32));
      float q = simd_prefix_exclusive_sum(x[i]) + simd_prefix_inclusive_sum(int(lane));
      float d = simd_shuffle_down(x[i], 4), u = simd_shuffle_up(x[i], 4);
      float2 both = simd_sum(float2(1.f, x[i]));
      y[i] = s + p + q + (lane < 28 ? d : 0) + (lane >= 4 ? u : 0) + both.x + both.y
             + float(simd_any(lane == 7)) + float(simd_all(lane == 7));
    """
    y = run(body)
    lane = np.arange(32)
    for k, part in enumerate(X.reshape(2, 32)):
        fixed = part.sum() + part.max() + part.min() + part[3]
        moved = part[lane ^ 5] + part[(lane + 1) % 32]
        before = np.cumsum(part) - part + np.cumsum(lane)
        ends = np.where(lane < 28, np.roll(part, -4), 0) + np.where(lane >= 4, np.roll(part, 4), 0)
        expected = fixed + moved + before + ends + 32 + part.sum() + 1
        np.testing.assert_allclose(y[k * 32 : k * 32 + 32], expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_matrices_of_any_type_accumulate_in_float(dtype):
    rng = np.random.default_rng(1)
    a, b = (cast(rng.standard_normal((8, 8)), dtype) for _ in range(2))
    body = """
      simdgroup_matrix<T, 8, 8> a, b;
      simdgroup_float8x8 c = make_filled_simdgroup_matrix<float, 8, 8>(1.f), d;
      simdgroup_load(a, x, 8);
      simdgroup_load(b, w, 8, 0, true);
      simdgroup_multiply_accumulate(c, a, b, c);
      simdgroup_multiply(d, simdgroup_float8x8(2.f), c);
      simdgroup_store(d, y, 8);
    """
    y = run(body, [a, b], threads=32, out=((8, 8), "float32"), template={"T": dtype})
    np.testing.assert_allclose(y, 2 * (as_float(a) @ as_float(b).T + 1), rtol=1e-5, atol=1e-5)


def test_thread_elements_have_apples_layout():
    body = """
      simdgroup_matrix<float, 8, 8> m;
      const uint lane = i, quad = lane / 4;
      const uint row = (quad & 4) + (lane / 2) % 4, column = (quad & 2) * 2 + (lane % 2) * 2;
      m.thread_elements()[0] = x[row * 8 + column];
      reinterpret_cast<thread float2&>(m.thread_elements()).y = x[row * 8 + column + 1];
      simdgroup_store(m, y, 8, ulong2(0, 0), true);
    """
    y = run(body, threads=32, out=((8, 8), "float32"))
    np.testing.assert_array_equal(y, X.reshape(8, 8).T)


def test_templates_tables_and_constexpr():
    header = """
    constant uchar ORDER[4] = {3, 1, 2, 0};
    struct Twice { static METAL_FUNC float apply(float v) { return 2 * v; } };
    template <int N, typename Op, typename P>
    METAL_FUNC void gather(P from, thread float (&to)[N], uint base) {
      for (int k = 0; k < N; k++) to[k] = Op::apply(from[base + ORDER[k % 4]]);
    }
    """
    body = """
      constexpr int ROWS = FLAG ? N : 1;
      threadgroup T tile[ROWS][4], other[sizeof(T) == 2 ? 4 : 8];
      threadgroup float2 pair;
      for (int k = 0; k < 4; k++) if (i < ROWS) tile[i][k] = T(x[(i * 4 + k) % 64]);
      if (i < 4) other[i] = T(i);
      if (i == 0) pair = float2(5, 6);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      float t[4];
      gather<4, Twice>(&tile[i % ROWS][0], t, 0);
      if constexpr (is_same_v<T, half>) t[0] += 0.5f; else t[0] += 100.f;
      y[i] = t[0] + t[3] + float(other[i % 4]) + pair.y;
    """
    template = {"T": "float16", "N": 16, "FLAG": True}
    y = run(body, header=header, template=template)
    tile = X.astype(np.float16).astype(np.float32).reshape(16, 4)
    i = np.arange(64)
    expected = 2 * tile[i % 16, 3] + 2 * tile[i % 16, 0] + 0.5 + i % 4 + 6
    np.testing.assert_allclose(y, expected, rtol=1e-6)


def test_atomic_counters():
    body = """
      threadgroup atomic_uint count;
      if (i == 0) atomic_store_explicit(&count, 0, memory_order_relaxed);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      uint mine = atomic_fetch_add_explicit(&count, 2, memory_order_relaxed);
      threadgroup_barrier(mem_flags::mem_threadgroup);
      y[mine / 2] = float(atomic_load_explicit(&count, memory_order_relaxed));
    """
    np.testing.assert_array_equal(run(body), np.full(64, 128))


def test_positions_in_a_ragged_grid():
    body = """
      const uint3 p = thread_position_in_grid, n = threads_per_grid;
      const uint3 q = threadgroup_position_in_grid, s = threads_per_threadgroup;
      y[(p.z * n.y + p.y) * n.x + p.x] = int(q.x * 1000 + q.y * 100 + s.x * 10 + s.y)
        + int(thread_index_in_threadgroup) * 10000;
    """
    source = inline_kernel(body)
    where = Launch({}, (7, 5, 2), (4, 2, 1), ((2, 5, 7),), ("int32",))
    (y,), found = run_on_cpu(source, where, [X])
    assert not found
    z, row, column = np.indices((2, 5, 7))
    width, height = np.where(column < 4, 4, 3), np.where(row < 4, 2, 1)
    index = (row % 2) * width + column % 4
    expected = column // 4 * 1000 + row // 2 * 100 + width * 10 + height + index * 10000
    np.testing.assert_array_equal(y, expected + 0 * z)


def test_shapes_strides_and_scalars():
    body = "y[i] = x[i] * w + float(x_shape[1] + x_strides[0] + x_ndim);"
    y = run(body, [X.reshape(4, 16), np.float32(3)])
    np.testing.assert_allclose(y, X * 3 + 16 + 16 + 2, rtol=1e-6)


def test_bfloat16_buffers_round_trip():
    x = bf16(X)
    y = run("y[i] = x[i];", [x], out=((64,), "bfloat16"))
    np.testing.assert_array_equal(bf16(y).array, x.array)
