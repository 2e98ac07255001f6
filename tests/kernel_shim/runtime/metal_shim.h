// The subset of the Metal Shading Language (MSL) that our kernels use, for clang on a CPU. Included
// before the kernel's text, after rewrite.py has removed what clang cannot parse.
//
// Compiled twice: with -DSHIM_TYPE_BUILD for syntax only, where address spaces are part of the type
// (passing `device` for `threadgroup` is an error, as on a Mac); and to run, where they are erased,
// because LLVM's sanitizer passes skip non-zero address spaces.
//
// Absent because Metal has none: double, erf, the C++ library. Absent because unused so far: textures,
// quad_*, simd_ballot, simdgroup_async_copy, and the tensor operations of the M5 generation.
#pragma once
#include <type_traits>

#include "abi.h"

typedef unsigned int uint;
typedef unsigned short ushort;
typedef unsigned char uchar;
typedef unsigned long ulong;
typedef _Float16 half;
typedef __bf16 bfloat;

#ifdef SHIM_TYPE_BUILD
#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#else
#define device
#define constant const
#define threadgroup
#endif
#define thread
#define kernel
#define METAL_FUNC inline __attribute__((always_inline))

// The functions of this header run on values, not on shared memory, and are not instrumented.
#define SHIM_UNCHECKED __attribute__((no_sanitize("thread", "alignment", "array-bounds", "shift")))

namespace metal {
template <typename T, int N>
using vec = T __attribute__((ext_vector_type(N)));
#define SHIM_VECTORS(T)  \
  typedef vec<T, 2> T##2; \
  typedef vec<T, 3> T##3; \
  typedef vec<T, 4> T##4;
SHIM_VECTORS(float)
SHIM_VECTORS(half)
SHIM_VECTORS(bfloat)
SHIM_VECTORS(int)
SHIM_VECTORS(uint)
SHIM_VECTORS(short)
SHIM_VECTORS(ushort)
SHIM_VECTORS(char)
SHIM_VECTORS(uchar)
SHIM_VECTORS(ulong)
SHIM_VECTORS(long)
#undef SHIM_VECTORS
// Vectors in memory with the alignment of their element.
#define SHIM_PACKED(T)                                                             \
  typedef T packed_##T##2 __attribute__((ext_vector_type(2), aligned(sizeof(T)))); \
  typedef T packed_##T##4 __attribute__((ext_vector_type(4), aligned(sizeof(T))));
SHIM_PACKED(float)
SHIM_PACKED(half)
SHIM_PACKED(bfloat)
SHIM_PACKED(int)
SHIM_PACKED(uint)
SHIM_PACKED(short)
SHIM_PACKED(ushort)
SHIM_PACKED(char)
SHIM_PACKED(uchar)
#undef SHIM_PACKED

using std::bool_constant;
using std::conditional;
using std::conditional_t;
using std::enable_if;
using std::enable_if_t;
using std::false_type;
using std::integral_constant;
using std::is_integral;
using std::is_integral_v;
using std::is_same;
using std::is_same_v;
using std::remove_const_t;
using std::remove_cv_t;
using std::remove_reference_t;
using std::true_type;

namespace shim {
template <typename V>
struct traits {
  using element = V;
  static constexpr int size = 1;
};
template <typename T, int N>
struct traits<T __attribute__((ext_vector_type(N)))> {
  using element = T;
  static constexpr int size = N;
};
template <typename V>
constexpr bool is_vector = traits<V>::size > 1;
template <typename T>
constexpr bool is_real = std::is_same_v<T, float> || std::is_same_v<T, half> || std::is_same_v<T, bfloat>;

template <typename V, typename A>
SHIM_INLINE void append(V& to, int& i, A a) {
  using E = typename traits<V>::element;
  if constexpr (!is_vector<A>)
    to[i++] = static_cast<E>(static_cast<conditional_t<is_real<A>, float, A>>(a));
  else
    for (int k = 0; k < traits<A>::size; k++) append(to, i, a[k]);
}
}  // namespace shim

// float4(...) is rewritten to shim_make<float4>(...): clang has no functional vector constructor
// outside OpenCL. One scalar fills the vector; otherwise the parts are strung together.
template <typename V, typename... Parts>
SHIM_INLINE V shim_make(Parts... parts) {
  V v = {};
  int i = 0;
  (shim::append(v, i, parts), ...);
  if (i == 1)
    for (int k = 1; k < shim::traits<V>::size; k++) v[k] = v[0];
  return v;
}

template <typename To, typename From>
SHIM_INLINE To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, value);
}

// ---- synchronisation

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2, mem_texture = 4 };
SHIM_INLINE constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return static_cast<mem_flags>(static_cast<int>(a) | static_cast<int>(b));
}
SHIM_INLINE void threadgroup_barrier(mem_flags f) { shim_threadgroup_barrier(static_cast<int>(f)); }
SHIM_INLINE void simdgroup_barrier(mem_flags f) { shim_simdgroup_barrier(static_cast<int>(f)); }

// ---- simdgroup functions: active lanes exchange a value each

namespace shim {
template <typename T>
struct Lane {
  T in, out;
  unsigned source;
};
// Floats are added as floats: the order is not specified, the width is.
template <typename T>
using Sum = conditional_t<is_real<T>, float, T>;

template <typename T, typename Step>
SHIM_UNCHECKED void reduce(void** lanes, Step step) {
  bool first = true;
  Sum<T> total = Sum<T>(0);
  for (unsigned i = 0; i < SHIM_LANES; i++) {
    if (!lanes[i]) continue;
    Sum<T> value = static_cast<Sum<T>>(static_cast<Lane<T>*>(lanes[i])->in);
    total = first ? value : step(total, value);
    first = false;
  }
  for (unsigned i = 0; i < SHIM_LANES; i++)
    if (lanes[i]) static_cast<Lane<T>*>(lanes[i])->out = static_cast<T>(total);
}
template <typename T>
SHIM_UNCHECKED void sum(void** lanes) {
  reduce<T>(lanes, [](Sum<T> a, Sum<T> b) SHIM_UNCHECKED { return Sum<T>(a + b); });
}
template <typename T>
SHIM_UNCHECKED void largest(void** lanes) {
  reduce<T>(lanes, [](Sum<T> a, Sum<T> b) SHIM_UNCHECKED { return a < b ? b : a; });
}
template <typename T>
SHIM_UNCHECKED void smallest(void** lanes) {
  reduce<T>(lanes, [](Sum<T> a, Sum<T> b) SHIM_UNCHECKED { return b < a ? b : a; });
}
template <typename T, bool Inclusive>
SHIM_UNCHECKED void prefix(void** lanes) {
  Sum<T> total = Sum<T>(0);
  for (unsigned i = 0; i < SHIM_LANES; i++) {
    if (!lanes[i]) continue;
    Lane<T>& lane = *static_cast<Lane<T>*>(lanes[i]);
    Sum<T> before = total;
    total += static_cast<Sum<T>>(lane.in);
    lane.out = static_cast<T>(Inclusive ? total : before);
  }
}
template <typename T>
SHIM_UNCHECKED void shuffle(void** lanes) {
  for (unsigned i = 0; i < SHIM_LANES; i++) {
    if (!lanes[i]) continue;
    Lane<T>& lane = *static_cast<Lane<T>*>(lanes[i]);
    if (lane.source >= SHIM_LANES || !lanes[lane.source]) {
      shim_report("shuffle", "the source lane is inactive or beyond the simdgroup");
      lane.out = lane.in;
    } else {
      lane.out = static_cast<Lane<T>*>(lanes[lane.source])->in;
    }
  }
}
// Scalar by scalar for vectors, as the compiler does it on a GPU.
template <typename T, template <typename> class Exchange>
SHIM_INLINE T each(T value, unsigned source) {
  if constexpr (is_vector<T>) {
    T result;
    for (int k = 0; k < traits<T>::size; k++)
      result[k] = each<typename traits<T>::element, Exchange>(value[k], source);
    return result;
  } else {
    Lane<T> lane = {value, value, source};
    shim_collective(&lane, Exchange<T>::run, 0);
    return lane.out;
  }
}
#define SHIM_EXCHANGE(Name, function)                      \
  template <typename T>                                    \
  struct Name {                                            \
    static constexpr void (*run)(void**) = function;       \
  };
SHIM_EXCHANGE(DoSum, sum<T>)
SHIM_EXCHANGE(DoMax, largest<T>)
SHIM_EXCHANGE(DoMin, smallest<T>)
SHIM_EXCHANGE(DoInclusive, (prefix<T, true>))
SHIM_EXCHANGE(DoExclusive, (prefix<T, false>))
SHIM_EXCHANGE(DoShuffle, shuffle<T>)
#undef SHIM_EXCHANGE
}  // namespace shim

#define SHIM_REDUCTION(name, Exchange) \
  template <typename T>                \
  SHIM_INLINE T name(T v) {            \
    return shim::each<T, shim::Exchange>(v, 0); \
  }
SHIM_REDUCTION(simd_sum, DoSum)
SHIM_REDUCTION(simd_max, DoMax)
SHIM_REDUCTION(simd_min, DoMin)
SHIM_REDUCTION(simd_prefix_inclusive_sum, DoInclusive)
SHIM_REDUCTION(simd_prefix_exclusive_sum, DoExclusive)
#undef SHIM_REDUCTION
SHIM_INLINE bool simd_any(bool v) { return simd_max(static_cast<int>(v)); }
SHIM_INLINE bool simd_all(bool v) { return simd_min(static_cast<int>(v)); }

template <typename T>
SHIM_INLINE T simd_shuffle(T v, ushort lane) {
  return shim::each<T, shim::DoShuffle>(v, lane);
}
template <typename T>
SHIM_INLINE T simd_broadcast(T v, ushort lane) {
  return shim::each<T, shim::DoShuffle>(v, lane);
}
template <typename T>
SHIM_INLINE T simd_shuffle_xor(T v, ushort mask) {
  return shim::each<T, shim::DoShuffle>(v, shim_ids()->lane ^ mask);
}
// Beyond the ends Metal leaves the value undefined, and reductions rely on not using it: own value.
template <typename T>
SHIM_INLINE T simd_shuffle_down(T v, ushort delta) {
  unsigned lane = shim_ids()->lane, source = lane + delta;
  return shim::each<T, shim::DoShuffle>(v, source < SHIM_LANES ? source : lane);
}
template <typename T>
SHIM_INLINE T simd_shuffle_up(T v, ushort delta) {
  unsigned lane = shim_ids()->lane;
  return shim::each<T, shim::DoShuffle>(v, lane >= delta ? lane - delta : lane);
}

// ---- math: float, half and bfloat, and vectors of them, computed in float and rounded once

#define SHIM_MATH1(name, expression)                                                   \
  template <typename T>                                                                \
  SHIM_INLINE T name(T v) {                                                            \
    if constexpr (shim::is_vector<T>) {                                                \
      T result;                                                                        \
      for (int k = 0; k < shim::traits<T>::size; k++)                                  \
        result[k] = name<typename shim::traits<T>::element>(v[k]);                     \
      return result;                                                                   \
    } else {                                                                           \
      static_assert(shim::is_real<T>, #name " takes a float, half or bfloat in Metal"); \
      float x = static_cast<float>(v);                                                 \
      return static_cast<T>(expression);                                               \
    }                                                                                  \
  }
SHIM_MATH1(exp, __builtin_expf(x))
SHIM_MATH1(exp2, __builtin_exp2f(x))
SHIM_MATH1(log, __builtin_logf(x))
SHIM_MATH1(log2, __builtin_log2f(x))
SHIM_MATH1(sin, __builtin_sinf(x))
SHIM_MATH1(cos, __builtin_cosf(x))
SHIM_MATH1(tanh, __builtin_tanhf(x))
SHIM_MATH1(sqrt, __builtin_sqrtf(x))
SHIM_MATH1(rsqrt, 1.f / __builtin_sqrtf(x))
SHIM_MATH1(floor, __builtin_floorf(x))
SHIM_MATH1(ceil, __builtin_ceilf(x))
SHIM_MATH1(trunc, __builtin_truncf(x))
SHIM_MATH1(round, __builtin_roundf(x))
SHIM_MATH1(rint, __builtin_rintf(x))
SHIM_MATH1(fabs, __builtin_fabsf(x))
#undef SHIM_MATH1
namespace fast {
using metal::exp;
using metal::exp2;
using metal::log;
using metal::rsqrt;
using metal::tanh;
}  // namespace fast
namespace precise {
using metal::exp;
using metal::exp2;
using metal::log;
using metal::rsqrt;
using metal::tanh;
}  // namespace precise

template <typename T>
SHIM_INLINE bool isnan(T x) {
  return static_cast<float>(x) != static_cast<float>(x);
}
template <typename T>
SHIM_INLINE bool isinf(T x) {
  return __builtin_isinf(static_cast<float>(x));
}
template <typename T>
SHIM_INLINE bool isfinite(T x) {
  return __builtin_isfinite(static_cast<float>(x));
}
template <typename T>
SHIM_INLINE bool signbit(T x) {
  return __builtin_signbit(static_cast<float>(x));
}
SHIM_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
SHIM_INLINE float pow(float a, float b) { return __builtin_powf(a, b); }
SHIM_INLINE float ldexp(float x, int e) { return __builtin_ldexpf(x, e); }

// Both arguments of one type, as in Metal, where min(int, uint) is ambiguous.
#define SHIM_MATH2(name, expression)                                       \
  template <typename T>                                                    \
  SHIM_INLINE T name(T a, T b) {                                           \
    if constexpr (shim::is_vector<T>) {                                    \
      T result;                                                            \
      for (int k = 0; k < shim::traits<T>::size; k++)                      \
        result[k] = name<typename shim::traits<T>::element>(a[k], b[k]);   \
      return result;                                                       \
    } else {                                                               \
      return expression;                                                   \
    }                                                                      \
  }
SHIM_MATH2(min, b < a ? b : a)
SHIM_MATH2(max, a < b ? b : a)
SHIM_MATH2(fmin, b < a ? b : a)
SHIM_MATH2(fmax, a < b ? b : a)
#undef SHIM_MATH2
template <typename T>
SHIM_INLINE T clamp(T v, T low, T high) {
  return metal::min(metal::max(v, low), high);
}
template <typename T>
SHIM_INLINE T abs(T a) {
  if constexpr (shim::is_vector<T>) {
    return metal::max(a, -a);
  } else {
    return a < T(0) ? -a : a;
  }
}
template <typename T>
SHIM_INLINE T select(T no, T yes, bool condition) {
  return condition ? yes : no;
}
template <typename T>
SHIM_INLINE T mix(T a, T b, T t) {
  return a + (b - a) * t;
}
template <typename V>
SHIM_INLINE typename shim::traits<V>::element dot(V a, V b) {
  typename shim::traits<V>::element sum = 0;
  for (int k = 0; k < shim::traits<V>::size; k++) sum += a[k] * b[k];
  return sum;
}
template <typename T>
SHIM_INLINE T popcount(T v) {
  return __builtin_popcount(v);
}
template <typename T>
SHIM_INLINE T clz(T v) {
  return v ? __builtin_clz(v) : 32;
}

// ---- atomics: 32-bit counters, relaxed, which is all that Metal guarantees

enum memory_order { memory_order_relaxed };
struct atomic_uint {
  uint32_t value;
};
typedef atomic_uint atomic_int;
template <typename P>
SHIM_INLINE uint atomic_fetch_add_explicit(P p, uint value, memory_order) {
  return shim_atomic_add((uint32_t*)p, value);
}
template <typename P>
SHIM_INLINE uint atomic_load_explicit(P p, memory_order) {
  return shim_atomic_add((uint32_t*)p, 0);
}
template <typename P>
SHIM_INLINE void atomic_store_explicit(P p, uint value, memory_order) {
  p->value = value;
}

// ---- simdgroup matrices: 8x8, two elements a lane, at Apple's lane layout

template <typename T, int Rows, int Columns>
struct simdgroup_matrix {
  static_assert(Rows == 8 && Columns == 8, "Metal has 8x8 only");
  static_assert(shim::is_real<T>);
  vec<T, 2> elements;
  // Uninitialised in Metal: NaN here, so that forgetting to clear an accumulator shows.
  simdgroup_matrix() { elements[0] = elements[1] = static_cast<T>(__builtin_nanf("0x123")); }
  explicit simdgroup_matrix(T diagonal) {
    unsigned row, column;
    position(row, column);
    elements[0] = row == column ? diagonal : T(0.f);
    elements[1] = row == column + 1 ? diagonal : T(0.f);
  }
  thread vec<T, 2>& thread_elements() { return elements; }
  const thread vec<T, 2>& thread_elements() const { return elements; }
  static void position(unsigned& row, unsigned& column) {
    unsigned lane = shim_ids()->lane, quad = lane / 4;
    row = (quad & 4) + (lane / 2) % 4;
    column = (quad & 2) * 2 + (lane % 2) * 2;
  }
};
#define SHIM_MATRIX(T) typedef simdgroup_matrix<T, 8, 8> simdgroup_##T##8x8;
SHIM_MATRIX(float)
SHIM_MATRIX(half)
SHIM_MATRIX(bfloat)
#undef SHIM_MATRIX

template <typename T, int Rows, int Columns>
SHIM_INLINE simdgroup_matrix<T, Rows, Columns> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Rows, Columns> m;
  m.elements[0] = m.elements[1] = value;
  return m;
}

namespace shim {
// Element (row, column) of the memory that a load or store covers.
template <typename P>
SHIM_INLINE auto& element(P p, ulong stride, vec<ulong, 2> origin, bool transpose, ulong row, ulong column) {
  return transpose ? p[(origin[1] + column) * stride + origin[0] + row]
                   : p[(origin[1] + row) * stride + origin[0] + column];
}
// Unary plus drops const and the address space.
template <typename T, typename P>
constexpr bool points_to = std::is_same_v<decltype(+(*P())), T>;
}  // namespace shim

// P: pointer to T in any address space; no conversion happens on the way, as in Metal.
template <typename T, typename P>
SHIM_INLINE void simdgroup_load(thread simdgroup_matrix<T, 8, 8>& m, P p, ulong stride = 8,
                                vec<ulong, 2> origin = {0, 0}, bool transpose = false) {
  static_assert(shim::points_to<T, P>, "simdgroup_load does not convert");
  unsigned row, column;
  m.position(row, column);
  for (unsigned k = 0; k < 2; k++)
    m.elements[k] = shim::element(p, stride, origin, transpose, row, column + k);
}
template <typename T, typename P>
SHIM_INLINE void simdgroup_store(const thread simdgroup_matrix<T, 8, 8>& m, P p, ulong stride = 8,
                                 vec<ulong, 2> origin = {0, 0}, bool transpose = false) {
  static_assert(shim::points_to<T, P>, "simdgroup_store does not convert");
  unsigned row, column;
  m.position(row, column);
  for (unsigned k = 0; k < 2; k++)
    shim::element(p, stride, origin, transpose, row, column + k) = m.elements[k];
}

// Operands may be half or bfloat with a float accumulator; products and sums are float.
template <typename D, typename A, typename B, typename C>
SHIM_INLINE void simdgroup_multiply_accumulate(
    thread simdgroup_matrix<D, 8, 8>& d, const thread simdgroup_matrix<A, 8, 8>& a,
    const thread simdgroup_matrix<B, 8, 8>& b, const thread simdgroup_matrix<C, 8, 8>& c) {
  float fa[2], fb[2], fc[2], fd[2];
  for (int k = 0; k < 2; k++) {
    fa[k] = static_cast<float>(a.elements[k]);
    fb[k] = static_cast<float>(b.elements[k]);
    fc[k] = static_cast<float>(c.elements[k]);
  }
  shim_mma8x8(fa, fb, fc, fd);
  for (int k = 0; k < 2; k++) d.elements[k] = static_cast<D>(fd[k]);
}
template <typename D, typename A, typename B>
SHIM_INLINE void simdgroup_multiply(thread simdgroup_matrix<D, 8, 8>& d,
                                    const thread simdgroup_matrix<A, 8, 8>& a,
                                    const thread simdgroup_matrix<B, 8, 8>& b) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<D, 8, 8>(D(0.f)));
}
}  // namespace metal
using namespace metal;
typedef half float16_t;
typedef bfloat bfloat16_t;

SHIM_INLINE uint3 shim_uint3(ShimVec3 v) { return uint3{v.x, v.y, v.z}; }
