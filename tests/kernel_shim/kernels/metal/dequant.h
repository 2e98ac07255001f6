// Shared by the test kernels: 4-bit codes to numbers.
constant float FP4_VALUES[16] = {0.f,  .5f,  1.f,  1.5f,  2.f,  3.f,  4.f,  6.f,
                                 -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f};

// MODE 0: affine, group 64 (scale and bias of type S). MODE 1: MXFP4, group 32 (E8M0 scale).
template <typename T, int MODE, typename S>
METAL_FUNC void stage_weights(const device uint32_t* w, const device S* scales, const device S* biases,
                              threadgroup T* to, int stride, int depth, int k0, uint thread_id) {
  // 32 rows x 32 columns by 128 threads: one word of 8 codes a thread
  const int r = thread_id / 4, c = (thread_id % 4) * 8;
  const uint32_t codes = w[(size_t(r) * depth + k0 + c) / 8];
  const size_t group = (size_t(r) * depth + k0 + c) / (MODE == 0 ? 64 : 32);
  if constexpr (MODE == 0) {
    const float scale = float(scales[group]), bias = float(biases[group]);
    for (int i = 0; i < 8; i++) to[r * stride + c + i] = T(float((codes >> (4 * i)) & 15u) * scale + bias);
  } else {
    const float scale = as_type<float>(uint(scales[group]) << 23);
    for (int i = 0; i < 8; i++) to[r * stride + c + i] = T(FP4_VALUES[(codes >> (4 * i)) & 15u] * scale);
  }
}
