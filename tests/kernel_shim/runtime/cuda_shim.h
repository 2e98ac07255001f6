// The subset of CUDA C++ that our kernels use, for clang on a CPU, over the same runtime as Metal.
//
// PTX cannot run here. A kernel's wrappers of PTX instructions (mma, ldmatrix, cp.async) call the
// functions of namespace `ptx` below when CUDA_SHIM is defined, and contain the asm otherwise, so the
// asm text itself is only compiled, by nvcc. kernels/cuda/ptx.h is such a pair.
#pragma once
#include <type_traits>

#include "abi.h"

#define CUDA_SHIM 1
#define __global__
#define __device__
#define __host__
#define __constant__ const
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __restrict__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
#define SHIM_UNCHECKED __attribute__((no_sanitize("thread", "alignment", "array-bounds", "shift")))

#define threadIdx (shim_ids()->thread_in_group)
#define blockIdx (shim_ids()->group_in_grid)
#define blockDim (shim_ids()->group_threads)
#define gridDim (shim_ids()->groups)
#define warpSize 32

// ---- types

typedef _Float16 __half;
typedef _Float16 half;
typedef __bf16 __nv_bfloat16;
typedef __bf16 nv_bfloat16;
typedef unsigned int uint;
typedef unsigned char uchar;

#define SHIM_VECTORS(T, name)                              \
  struct alignas(2 * sizeof(T)) name##2 { T x, y; };       \
  struct name##3 { T x, y, z; };                           \
  struct alignas(4 * sizeof(T)) name##4 { T x, y, z, w; }; \
  SHIM_INLINE name##2 make_##name##2(T x, T y) { return {x, y}; } \
  SHIM_INLINE name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
SHIM_VECTORS(int, int)
SHIM_VECTORS(unsigned, uint)
SHIM_VECTORS(float, float)
SHIM_VECTORS(unsigned char, uchar)
SHIM_VECTORS(unsigned short, ushort)
#undef SHIM_VECTORS
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};
struct alignas(4) __half2 {
  __half x, y;
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
typedef __half2 half2;
typedef __nv_bfloat162 nv_bfloat162;

// MLX passes these by value; in memory a shape is int32 and strides are int64.
template <typename T>
struct ShimDims {
  T at[8];
  SHIM_INLINE T operator[](int i) const { return at[i]; }
};
typedef ShimDims<int32_t> Shape;
typedef ShimDims<int64_t> Strides;

// ---- conversions and arithmetic

SHIM_INLINE float __half2float(__half v) { return v; }
SHIM_INLINE __half __float2half(float v) { return static_cast<__half>(v); }
SHIM_INLINE __half __float2half_rn(float v) { return static_cast<__half>(v); }
SHIM_INLINE float __bfloat162float(__nv_bfloat16 v) { return v; }
SHIM_INLINE __nv_bfloat16 __float2bfloat16(float v) { return static_cast<__nv_bfloat16>(v); }
SHIM_INLINE __nv_bfloat16 __float2bfloat16_rn(float v) { return static_cast<__nv_bfloat16>(v); }
SHIM_INLINE __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
SHIM_INLINE __half2 __float22half2_rn(float2 v) { return {__half(v.x), __half(v.y)}; }
SHIM_INLINE __half2 __halves2half2(__half x, __half y) { return {x, y}; }
SHIM_INLINE __half2 __half2half2(__half x) { return {x, x}; }
SHIM_INLINE float2 __half22float2(__half2 v) { return {float(v.x), float(v.y)}; }
SHIM_INLINE __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__nv_bfloat16(x), __nv_bfloat16(y)};
}
SHIM_INLINE __nv_bfloat162 __float22bfloat162_rn(float2 v) { return __floats2bfloat162_rn(v.x, v.y); }
SHIM_INLINE __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
SHIM_INLINE __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 x) { return {x, x}; }
SHIM_INLINE float2 __bfloat1622float2(__nv_bfloat162 v) { return {float(v.x), float(v.y)}; }
#define SHIM_PAIR(T)                                                                   \
  SHIM_INLINE T __hadd2(T a, T b) { return {decltype(a.x)(a.x + b.x), decltype(a.x)(a.y + b.y)}; } \
  SHIM_INLINE T __hsub2(T a, T b) { return {decltype(a.x)(a.x - b.x), decltype(a.x)(a.y - b.y)}; } \
  SHIM_INLINE T __hmul2(T a, T b) { return {decltype(a.x)(a.x * b.x), decltype(a.x)(a.y * b.y)}; } \
  SHIM_INLINE T __hfma2(T a, T b, T c) {                                               \
    using E = decltype(a.x); /* one rounding, as on the GPU: float holds the exact product */ \
    return {E(float(a.x) * float(b.x) + float(c.x)), E(float(a.y) * float(b.y) + float(c.y))}; \
  }
SHIM_PAIR(__half2)
SHIM_PAIR(__nv_bfloat162)
#undef SHIM_PAIR

template <typename To, typename From>
SHIM_INLINE To shim_bits(From v) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, v);
}
SHIM_INLINE float __uint_as_float(unsigned v) { return shim_bits<float>(v); }
SHIM_INLINE unsigned __float_as_uint(float v) { return shim_bits<unsigned>(v); }
SHIM_INLINE float __int_as_float(int v) { return shim_bits<float>(v); }
SHIM_INLINE int __float_as_int(float v) { return shim_bits<int>(v); }
SHIM_INLINE __half __ushort_as_half(unsigned short v) { return shim_bits<__half>(v); }
SHIM_INLINE unsigned short __half_as_ushort(__half v) { return shim_bits<unsigned short>(v); }
SHIM_INLINE __nv_bfloat16 __ushort_as_bfloat16(unsigned short v) { return shim_bits<__nv_bfloat16>(v); }
SHIM_INLINE unsigned short __bfloat16_as_ushort(__nv_bfloat16 v) { return shim_bits<unsigned short>(v); }
// Byte i of the result is byte (selector >> 4 i) & 7 of the eight bytes b:a.
SHIM_INLINE unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  uint64_t bytes = a | static_cast<uint64_t>(b) << 32;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) result |= (bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}

#define SHIM_MATH(name, builtin) \
  SHIM_INLINE float name(float x) { return builtin(x); }
SHIM_MATH(expf, __builtin_expf)
SHIM_MATH(__expf, __builtin_expf)
SHIM_MATH(exp2f, __builtin_exp2f)
SHIM_MATH(logf, __builtin_logf)
SHIM_MATH(__logf, __builtin_logf)
SHIM_MATH(tanhf, __builtin_tanhf)
SHIM_MATH(erff, __builtin_erff)
SHIM_MATH(sqrtf, __builtin_sqrtf)
SHIM_MATH(fabsf, __builtin_fabsf)
SHIM_MATH(floorf, __builtin_floorf)
SHIM_MATH(rintf, __builtin_rintf)
#undef SHIM_MATH
SHIM_INLINE float rsqrtf(float x) { return 1.f / __builtin_sqrtf(x); }
SHIM_INLINE float __fdividef(float a, float b) { return a / b; }
SHIM_INLINE float fminf(float a, float b) { return b < a ? b : a; }
SHIM_INLINE float fmaxf(float a, float b) { return a < b ? b : a; }
SHIM_INLINE float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
SHIM_INLINE float ldexpf(float x, int e) { return __builtin_ldexpf(x, e); }
template <typename T>
SHIM_INLINE T min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
SHIM_INLINE T max(T a, T b) {
  return a < b ? b : a;
}

// ---- memory and synchronisation

template <typename T>
SHIM_INLINE T __ldg(const T* p) {
  return *p;
}
template <typename T>
SHIM_INLINE T __ldcs(const T* p) {
  return *p;
}
SHIM_INLINE void __syncthreads() { shim_threadgroup_barrier(SHIM_MEM_DEVICE | SHIM_MEM_THREADGROUP); }
SHIM_INLINE void __syncwarp(unsigned = ~0u) {
  shim_simdgroup_barrier(SHIM_MEM_DEVICE | SHIM_MEM_THREADGROUP);
}
SHIM_INLINE void __threadfence() {}
SHIM_INLINE void __threadfence_block() {}
SHIM_INLINE int atomicAdd(int* p, int v) {
  return static_cast<int>(shim_atomic_add(reinterpret_cast<uint32_t*>(p), static_cast<uint32_t>(v)));
}
SHIM_INLINE unsigned atomicAdd(unsigned* p, unsigned v) { return shim_atomic_add(p, v); }

// ---- warp shuffles

template <typename T>
struct ShimLane {
  T in, out;
  unsigned source;
};
template <typename T>
SHIM_UNCHECKED void shim_shuffle(void** lanes) {
  for (unsigned i = 0; i < SHIM_LANES; i++) {
    if (!lanes[i]) continue;
    ShimLane<T>& lane = *static_cast<ShimLane<T>*>(lanes[i]);
    if (lane.source >= SHIM_LANES || !lanes[lane.source]) {
      shim_report("shuffle", "the source lane is inactive or beyond the warp");
      lane.out = lane.in;
    } else {
      lane.out = static_cast<ShimLane<T>*>(lanes[lane.source])->in;
    }
  }
}
template <typename T>
SHIM_INLINE T shim_shuffle_from(T v, unsigned source) {
  ShimLane<T> lane = {v, v, source};
  shim_collective(&lane, shim_shuffle<T>, 0);
  return lane.out;
}
// A source outside the segment of `width` lanes means the lane's own value, as in CUDA.
template <typename T>
SHIM_INLINE T __shfl_sync(unsigned, T v, int source, int width = 32) {
  return shim_shuffle_from(v, (shim_ids()->lane & -width) + (source & (width - 1)));
}
template <typename T>
SHIM_INLINE T __shfl_xor_sync(unsigned, T v, int mask, int width = 32) {
  unsigned lane = shim_ids()->lane, source = lane ^ mask;
  return shim_shuffle_from(v, (source & -width) > (lane & -width) ? lane : source);
}
template <typename T>
SHIM_INLINE T __shfl_down_sync(unsigned, T v, unsigned delta, int width = 32) {
  unsigned lane = shim_ids()->lane, source = lane + delta;
  return shim_shuffle_from(v, source < (lane & -width) + width ? source : lane);
}
template <typename T>
SHIM_INLINE T __shfl_up_sync(unsigned, T v, unsigned delta, int width = 32) {
  unsigned lane = shim_ids()->lane;
  return shim_shuffle_from(v, lane >= (lane & -width) + delta ? lane - delta : lane);
}

// ---- PTX instructions, from the fragment layouts of the PTX manual; g = lane / 4, t = lane % 4

namespace ptx {
template <typename T>
struct MmaLane {
  T a[8], b[4];
  float* c;
};
// A 16x16 row-major: element i is at row g + 8 (i/2 % 2), column 2t + i%2 + 8 (i/4).
// B 16x8 column-major: element i is at row 2t + i%2 + 8 (i/2), column g.
// C 16x8: element i is at row g + 8 (i/2), column 2t + i%2.
template <typename T>
SHIM_UNCHECKED void mma_m16n8k16_lanes(void** lanes) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < 32; lane++) {
    const auto& m = *static_cast<MmaLane<T>*>(lanes[lane]);
    int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 8; i++) a[g + 8 * (i / 2 % 2)][2 * t + i % 2 + 8 * (i / 4)] = float(m.a[i]);
    for (int i = 0; i < 4; i++) b[2 * t + i % 2 + 8 * (i / 2)][g] = float(m.b[i]);
  }
  for (int lane = 0; lane < 32; lane++) {
    auto& m = *static_cast<MmaLane<T>*>(lanes[lane]);
    int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) {
      int row = g + 8 * (i / 2), column = 2 * t + i % 2;
      for (int k = 0; k < 16; k++) m.c[i] += a[row][k] * b[k][column];
    }
  }
}
// c += a b, fragments as elements of T = __half or __nv_bfloat16.
template <typename T>
SHIM_INLINE void mma_m16n8k16(float (&c)[4], const T (&a)[8], const T (&b)[4]) {
  MmaLane<T> lane;
  __builtin_memcpy(lane.a, a, sizeof lane.a);
  __builtin_memcpy(lane.b, b, sizeof lane.b);
  lane.c = c;
  shim_collective(&lane, mma_m16n8k16_lanes<T>, 1);
}
// The same, fragments as 32-bit registers of two elements.
template <typename T>
SHIM_INLINE void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  MmaLane<T> lane;
  __builtin_memcpy(lane.a, a, sizeof lane.a);
  __builtin_memcpy(lane.b, b, sizeof lane.b);
  lane.c = c;
  shim_collective(&lane, mma_m16n8k16_lanes<T>, 1);
}

struct LoadLane {
  uint16_t row[8];  // the row this lane's address points to
  uint16_t* out;
};
// Matrix i is the eight rows that lanes 8i..8i+7 point to; a lane gets elements (g, 2t), (g, 2t+1).
template <int Count, bool Transpose>
SHIM_UNCHECKED void ldmatrix_lanes(void** lanes) {
  for (int lane = 0; lane < 32; lane++) {
    auto& m = *static_cast<LoadLane*>(lanes[lane]);
    int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 2 * Count; i++) {
      int matrix = i / 2, column = 2 * t + i % 2;
      int row = Transpose ? column : g;
      m.out[i] = static_cast<LoadLane*>(lanes[8 * matrix + row])->row[Transpose ? g : column];
    }
  }
}
template <int Count, bool Transpose>
SHIM_INLINE void ldmatrix(uint32_t (&registers)[Count], const void* row) {
  LoadLane lane;
  // Each lane reads its own row, so that the checker sees who reads what. With fewer than four
  // matrices the addresses of the upper lanes are ignored.
  if (shim_ids()->lane < 8 * Count) {
    if (reinterpret_cast<uintptr_t>(row) % 16) shim_report("misaligned", "ldmatrix row address");
    for (int i = 0; i < 8; i++) lane.row[i] = static_cast<const uint16_t*>(row)[i];
  }
  lane.out = reinterpret_cast<uint16_t*>(registers);
  shim_collective(&lane, ldmatrix_lanes<Count, Transpose>, 1);
}

SHIM_INLINE void cp_async16(void* shared, const void* global, int source_bytes = 16) {
  shim_async_copy(shared, global, 16, source_bytes);
}
SHIM_INLINE void cp_async8(void* shared, const void* global, int source_bytes = 8) {
  shim_async_copy(shared, global, 8, source_bytes);
}
SHIM_INLINE void cp_async4(void* shared, const void* global, int source_bytes = 4) {
  shim_async_copy(shared, global, 4, source_bytes);
}
SHIM_INLINE void cp_async_commit() { shim_async_commit(); }
// Waits until at most `Pending` of this thread's committed groups are outstanding.
template <int Pending>
SHIM_INLINE void cp_async_wait() {
  shim_async_wait(Pending);
}
}  // namespace ptx
