// Quantized weights -> B fragments of mma, in registers. One call gives a thread the eight weights
// of its column at k = 8 t .. 8 t + 7, as two fragments. Which k an mma slot stands for is free as
// long as A and B agree: see `split_row`.
constexpr int AFFINE4 = 0, AFFINE8 = 1, MXFP4 = 2;

template <typename T, int MODE>
struct Format;
template <typename T>
struct Format<T, AFFINE4> {
  using Scale = T;
  static constexpr int bits = 4, row_words = 12;  // a stage's row, padded: no bank conflicts
  static constexpr bool interleaved = true, affine = true;
};
template <typename T>
struct Format<T, AFFINE8> {
  using Scale = T;
  static constexpr int bits = 8, row_words = 24;
  static constexpr bool interleaved = false, affine = true;
};
template <typename T>
struct Format<T, MXFP4> {
  using Scale = unsigned char;
  static constexpr int bits = 4, row_words = 12;
  static constexpr bool interleaved = true, affine = false;
};

// A group's constants as they lie in shared memory: (scale, bias), or (scale, scale) for MXFP4.
template <typename T>
__device__ __forceinline__ unsigned group_constants(T scale, T bias) {
  return pack<T>(float(scale), float(bias));
}
template <typename T>
__device__ __forceinline__ unsigned group_constants(unsigned char scale, T) {
  const float s = __uint_as_float(static_cast<unsigned>(scale) << 23);  // 2^(scale - 127)
  return pack<T>(s, s);
}

// Four bits at a time: register i holds weights i and i + 4.
template <typename T>
__device__ __forceinline__ void dequantize_affine4(unsigned word, unsigned constants, unsigned (&b)[4]) {
  const auto scale = as_pair<T>(__byte_perm(constants, constants, 0x1010));
  const auto bias = as_pair<T>(__byte_perm(constants, constants, 0x3232));
  const auto offset = as_pair<T>(Pair<T>::magic);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const auto v = as_pair<T>(((word >> (4 * i)) & 0x000f000fu) | Pair<T>::magic);
    b[i] = bits_as<unsigned>(__hfma2(__hsub2(v, offset), scale, bias));
  }
}

// e2m1: sign, two exponent bits, one of mantissa; moved to the float's places it is 2^-14 (half)
// or 2^-126 (bfloat16) times its value, subnormals included.
template <typename T>
__device__ __forceinline__ void dequantize_mxfp4(unsigned word, unsigned constants, unsigned (&b)[4]) {
  const auto scale = as_pair<T>(constants);
  const auto lift = as_pair<T>(Pair<T>::fp4_lift);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const unsigned nibbles = word >> (4 * i);
    const unsigned v = ((nibbles & 0x00080008u) << 12) | ((nibbles & 0x00070007u) << Pair<T>::fp4_shift);
    b[i] = bits_as<unsigned>(__hmul2(__hmul2(as_pair<T>(v), lift), scale));
  }
}

// Eight bits at a time, through float: register i holds weights 2 i and 2 i + 1.
template <typename T>
__device__ __forceinline__ void dequantize_affine8(uint2 words, unsigned constants, unsigned (&b)[4]) {
  const float2 c = unpack<T>(constants);
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const unsigned half_word = (i < 2 ? words.x : words.y) >> (16 * (i % 2));
    const float low = static_cast<float>(half_word & 0xffu);
    const float high = static_cast<float>((half_word >> 8) & 0xffu);
    b[i] = pack<T>(fmaf(low, c.x, c.y), fmaf(high, c.x, c.y));
  }
}

// words: where the row's 32 k of this step begin in shared memory; t = lane % 4.
template <typename T, int MODE>
__device__ __forceinline__ void dequantize(const unsigned* words, int t, unsigned constants,
                                           unsigned (&b)[4]) {
  if constexpr (MODE == AFFINE8)
    dequantize_affine8<T>(*reinterpret_cast<const uint2*>(words + 2 * t), constants, b);
  else if constexpr (MODE == AFFINE4)
    dequantize_affine4<T>(words[t], constants, b);
  else
    dequantize_mxfp4<T>(words[t], constants, b);
}

// Eight consecutive x of a row -> what pairs with b[0..3] above: (i, i + 4) for interleaved
// formats, (2 i, 2 i + 1) otherwise.
template <bool INTERLEAVED>
__device__ __forceinline__ void split_row(uint4 x, unsigned (&a)[4]) {
  if constexpr (INTERLEAVED) {
    a[0] = __byte_perm(x.x, x.z, 0x5410);
    a[1] = __byte_perm(x.x, x.z, 0x7632);
    a[2] = __byte_perm(x.y, x.w, 0x5410);
    a[3] = __byte_perm(x.y, x.w, 0x7632);
  } else {
    a[0] = x.x;
    a[1] = x.y;
    a[2] = x.z;
    a[3] = x.w;
  }
}
