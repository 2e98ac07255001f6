// Two 16-bit floats in one 32-bit register, for T = __half and __nv_bfloat16.
template <typename T>
struct Pair;
template <>
struct Pair<__half> {
  using Vec = __half2;
  static constexpr unsigned magic = 0x64006400u;  // 1024: a nibble put in its low bits adds itself
  static constexpr unsigned fp4_lift = 0x74007400u;  // 2^14: what e2m1 bits lack as a half
  static constexpr int fp4_shift = 9;
  static __device__ __forceinline__ Vec make(float x, float y) { return __floats2half2_rn(x, y); }
  static __device__ __forceinline__ float2 floats(Vec v) { return __half22float2(v); }
};
template <>
struct Pair<__nv_bfloat16> {
  using Vec = __nv_bfloat162;
  static constexpr unsigned magic = 0x43004300u;  // 128
  static constexpr unsigned fp4_lift = 0x7E807E80u;  // 2^126
  static constexpr int fp4_shift = 6;
  static __device__ __forceinline__ Vec make(float x, float y) { return __floats2bfloat162_rn(x, y); }
  static __device__ __forceinline__ float2 floats(Vec v) { return __bfloat1622float2(v); }
};

template <typename To, typename From>
__device__ __forceinline__ To bits_as(From v) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  union {
    From from;
    To to;
  } u;
  u.from = v;
  return u.to;
}
template <typename T>
__device__ __forceinline__ typename Pair<T>::Vec as_pair(unsigned bits) {
  return bits_as<typename Pair<T>::Vec>(bits);
}
template <typename T>
__device__ __forceinline__ unsigned pack(float x, float y) {
  return bits_as<unsigned>(Pair<T>::make(x, y));
}
template <typename T>
__device__ __forceinline__ float2 unpack(unsigned bits) {
  return Pair<T>::floats(as_pair<T>(bits));
}
