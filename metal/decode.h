namespace experts {

// A slot table holds word offsets into one buffer of uint32: per expert and projection these five.
// An expert that is not in the cache has ABSENT as the place of its weight.
enum Part : int { WEIGHT = 0, SCALES = 1, BIASES = 2, BIAS = 3, TENSOR_SCALE = 4, PARTS = 5 };
enum Projection : int { GATE = 0, UP = 1, DOWN = 2, PROJECTIONS = 3 };  // fc1 is GATE, fc2 DOWN
enum : uint { ABSENT = 0xffffffffu };

// A simdgroup computes ROWS outputs; its lanes share the inner dimension, eight values each time.
enum : int { ROWS = 4, DECODE_SIMDGROUPS = 2, LANE_VALUES = 8, STEP = 32 * LANE_VALUES };

// Element types of a cached projection: S where the checkpoint has floats.
template <int FORMAT, typename S> struct Stored {
  using Weight = uint32_t;
  using Scale = uint8_t;
};
template <typename S> struct Stored<AFFINE4, S> {
  using Weight = uint32_t;
  using Scale = S;
};
template <typename S> struct Stored<AFFINE8, S> {
  using Weight = uint32_t;
  using Scale = S;
};
template <typename S> struct Stored<PLAIN, S> {
  using Weight = S;
  using Scale = S;
};

// What an absent expert computes: loud, never another expert's answer.
METAL_FUNC float absent_result() {
  return as_type<float>(0x7fc00000u);
}

// This lane's share of rows row0 .. row0 + ROWS - 1 of the projection at parts [N, K], times x [K].
template <int FORMAT, int GROUP, bool GLOBAL, typename S, typename T>
METAL_FUNC void lane_dots(
    const device T* x, const device uint32_t* slots, const device uint32_t* parts, int row0, int N,
    int K, uint lane, thread float (&sums)[ROWS]) {
  using W = typename Stored<FORMAT, S>::Weight;
  using C = typename Stored<FORMAT, S>::Scale;
  const device W* w = (const device W*)(slots + parts[WEIGHT]);
  const device C* s = (const device C*)(slots + parts[SCALES]);
  const device S* b = (const device S*)(slots + parts[BIASES]);
  const bool aligned = rows_aligned<FORMAT>(K);
  EXPERTS_UNROLL
  for (int r = 0; r < ROWS; r++) sums[r] = 0.f;
  for (int k = int(lane) * LANE_VALUES; k < K; k += STEP) {
    const float4 x0 = widen(load4(x + k, K - k, aligned));
    const float4 x1 = widen(load4(x + k + 4, K - k - 4, aligned));
    const float total = dot(x0, float4(1.f)) + dot(x1, float4(1.f));
    EXPERTS_UNROLL
    for (int r = 0; r < ROWS; r++) {
      if (row0 + r < N) {
        const uint i = uint(row0 + r) * uint(K) + uint(k);
        float4 lo, hi;
        load_codes<FORMAT>(w, i, K - k, aligned, lo, hi);
        float part = dot(lo, x0) + dot(hi, x1);
        if constexpr (FORMAT != PLAIN) part *= group_scale<FORMAT>(s[i / GROUP]);
        // The affine bias is the same for the whole group: one product with the sum of x.
        if constexpr (FORMAT == AFFINE4 || FORMAT == AFFINE8) part += float(b[i / GROUP]) * total;
        sums[r] += part;
      }
    }
  }
  if constexpr (GLOBAL) {
    const float factor = as_type<float>(slots[parts[TENSOR_SCALE]]) / NVFP4_RANGE;
    EXPERTS_UNROLL
    for (int r = 0; r < ROWS; r++) sums[r] *= factor;
  }
}

}  // namespace experts
