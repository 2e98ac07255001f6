#include <metal_stdlib>
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
using namespace metal;

// Expert weights as MLX packs them, decoded eight consecutive values of one row at a time.
//
// The wider MLX preamble shares this translation unit, hence the namespace. Fragment arrays live in
// registers only when every loop over them is unrolled; other compilers may take their time.
#ifdef __METAL_VERSION__
#define EXPERTS_UNROLL _Pragma("clang loop unroll(full)")
#else
#define EXPERTS_UNROLL
#endif

namespace experts {

// The numbers of mlx_stream/backends/kernels/weight_formats.py.
enum Format : int { AFFINE4 = 0, AFFINE8 = 1, MXFP4 = 2, MXFP8 = 3, NVFP4 = 4, PLAIN = 5 };

// nvfp4's tensor scale counts in units of the largest product of a code and a group scale.
enum : int { NVFP4_RANGE = 448 * 6 };

template <typename T>
METAL_FUNC vec<T, 4> narrow(float4 v) {
  vec<T, 4> r;
  r[0] = T(v[0]), r[1] = T(v[1]), r[2] = T(v[2]), r[3] = T(v[3]);
  return r;
}

template <typename T>
METAL_FUNC float4 widen(vec<T, 4> v) {
  return float4(float(v[0]), float(v[1]), float(v[2]), float(v[3]));
}

// Four codes from the low bits of a word, the first one lowest.
METAL_FUNC uint4 nibbles(uint q) {
  return uint4(q & 15u, (q >> 4) & 15u, (q >> 8) & 15u, (q >> 12) & 15u);
}

METAL_FUNC uint4 bytes(uint q) {
  return uint4(q & 255u, (q >> 8) & 255u, (q >> 16) & 255u, q >> 24);
}

// Whether rows of K values start at multiples of four. Packed rows do: K is whole groups.
template <int FORMAT>
METAL_FUNC bool rows_aligned(int K) {
  return FORMAT != PLAIN || K % 4 == 0;
}

METAL_FUNC float4 integers(uint4 c) {
  return float4(float(c[0]), float(c[1]), float(c[2]), float(c[3]));
}

// The small floats have half's sign and exponent order: their bits, moved up, are a half that is
// too small by the difference of the exponent biases. Subnormals come out right as well.
METAL_FUNC float e2m1(uint c) {
  return float(as_type<half>(ushort(((c & 8u) << 12) | ((c & 7u) << 9))) * half(16384.f));
}

METAL_FUNC float e4m3(uint c) {
  return float(as_type<half>(ushort(((c & 128u) << 8) | ((c & 127u) << 7))) * half(256.f));
}

// A power of two; 2^-127 is subnormal.
METAL_FUNC float e8m0(uint c) {
  return as_type<float>(c == 0u ? 0x00400000u : c << 23);
}

METAL_FUNC float4 e2m1(uint4 c) {
  return float4(e2m1(c[0]), e2m1(c[1]), e2m1(c[2]), e2m1(c[3]));
}

METAL_FUNC float4 e4m3(uint4 c) {
  return float4(e4m3(c[0]), e4m3(c[1]), e4m3(c[2]), e4m3(c[3]));
}

// Four values at p, of which the first n exist; the others are zero. `aligned`: n is a multiple of
// four and so is the place of p in its array.
template <typename T>
METAL_FUNC vec<T, 4> load4(const device T* p, int n, bool aligned) {
  vec<T, 4> r = narrow<T>(float4(0.f));
  if (n <= 0) return r;
  if (aligned) return *(const device vec<T, 4>*)p;
  for (int j = 0; j < 4; j++) {
    if (j < n) r[j] = p[j];
  }
  return r;
}

// Codes i to i + 7 of a matrix as numbers, before the scale; i is a multiple of eight within a row
// of which n values are left. Only PLAIN rows may end inside the eight.
template <int FORMAT, typename W>
METAL_FUNC void load_codes(
    const device W* w, uint i, int n, bool aligned, thread float4& lo, thread float4& hi) {
  if constexpr (FORMAT == AFFINE4) {
    const uint q = w[i / 8];
    lo = integers(nibbles(q)), hi = integers(nibbles(q >> 16));
  } else if constexpr (FORMAT == AFFINE8) {
    lo = integers(bytes(w[i / 4])), hi = integers(bytes(w[i / 4 + 1]));
  } else if constexpr (FORMAT == MXFP4 || FORMAT == NVFP4) {
    const uint q = w[i / 8];
    lo = e2m1(nibbles(q)), hi = e2m1(nibbles(q >> 16));
  } else if constexpr (FORMAT == MXFP8) {
    lo = e4m3(bytes(w[i / 4])), hi = e4m3(bytes(w[i / 4 + 1]));
  } else {
    lo = widen(load4(w + i, n, aligned)), hi = widen(load4(w + i + 4, n - 4, aligned));
  }
}

template <int FORMAT, typename S>
METAL_FUNC float group_scale(S s) {
  if constexpr (FORMAT == MXFP4 || FORMAT == MXFP8) {
    return e8m0(uint(s));
  } else if constexpr (FORMAT == NVFP4) {
    return e4m3(uint(s));
  } else {
    return float(s);
  }
}

// Weights i to i + 7: codes times scale plus bias.
template <int FORMAT, int GROUP, typename W, typename S, typename B>
METAL_FUNC void load_weights(
    const device W* w, const device S* s, const device B* b, uint i, int n, bool aligned,
    thread float4& lo, thread float4& hi) {
  load_codes<FORMAT>(w, i, n, aligned, lo, hi);
  if constexpr (FORMAT != PLAIN) {
    const float scale = group_scale<FORMAT>(s[i / GROUP]);
    lo *= scale, hi *= scale;
    if constexpr (FORMAT == AFFINE4 || FORMAT == AFFINE8) {
      const float bias = float(b[i / GROUP]);
      lo += bias, hi += bias;
    }
  }
}

}  // namespace experts
