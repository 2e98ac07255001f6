//! name: moe_gemm
//! inputs: x wg sg bg wu su bu tile_expert tile_row offsets
//! outputs: y
//! template: T=dtype MODE=int GATED=bool K=int N=int
//! grid: threads = (N/32*128, tiles, 1), block = (128, 1, 1)
// The CUDA twin of metal/moe_gemm.metal: tensor cores, cp.async. For testing the shim; not tuned.
//! include: ptx.h

// MODE 0: affine, group 64 (scale and bias of type S). MODE 1: MXFP4, group 32 (E8M0 scale).
template <typename T, int MODE, typename S>
__device__ __forceinline__ void stage_weights(const uint32_t* w, const S* scales, const S* biases, T* to,
                                              int stride, int depth, int k0, int thread) {
  const int r = thread / 4, c = (thread % 4) * 8;
  const uint32_t codes = __ldg(&w[(size_t(r) * depth + k0 + c) / 8]);
  const size_t group = (size_t(r) * depth + k0 + c) / (MODE == 0 ? 64 : 32);
  const float scale = MODE == 0 ? float(scales[group]) : __uint_as_float(unsigned(float(scales[group])) << 23);
  const float bias = MODE == 0 ? float(biases[group]) : 0.f;
  for (int i = 0; i < 8; i++) {
    const unsigned code = (codes >> (4 * i)) & 15u, m = code & 7u;
    float value;
    if (MODE == 0)
      value = float(code) * scale + bias;
    else
      value = (m < 2 ? 0.5f * m : (1.f + 0.5f * (m & 1)) * float(1u << ((m >> 1) - 1))) * (code & 8u ? -scale : scale);
    to[r * stride + c + i] = T(value);
  }
}
//! body
  constexpr int LD = 40;
  __shared__ __align__(16) T Xs[32 * LD];
  __shared__ __align__(16) T Ws[32 * LD], Us[GATED ? 32 * LD : 1];
  const int lid = threadIdx.x, warp = lid / 32, lane = lid % 32, g = lane / 4, t = lane % 4;
  const int e = tile_expert[blockIdx.y], row0 = tile_row[blockIdx.y];
  const int rows = min(32, offsets[e + 1] - row0), col0 = blockIdx.x * 32;
  constexpr int GS = MODE == 0 ? 64 : 32;
  const size_t wo = (size_t(e) * N + col0) * K / 8, so = (size_t(e) * N + col0) * K / GS;
  const int sm = (warp / 2) * 16, sn = (warp % 2) * 16;
  float ga[2][4] = {}, ua[2][4] = {};
  for (int k0 = 0; k0 < K; k0 += 32) {
    __syncthreads();  // A
    const int r = lid / 4, c = (lid % 4) * 8;
    const int valid = r < rows ? 16 : 0;
    cp_async16(&Xs[r * LD + c], &x[size_t(row0 + (valid ? r : 0)) * K + k0 + c], valid);
    cp_async_commit();
    stage_weights<T, MODE>(wg + wo, sg + so, bg + so, Ws, LD, K, k0, lid);
    if (GATED) stage_weights<T, MODE>(wu + wo, su + so, bu + so, Us, LD, K, k0, lid);
    cp_async_wait<0>();
    __syncthreads();  // B
    for (int k = 0; k < 32; k += 16) {
      uint32_t a[4];
      ldmatrix<4, false>(a, &Xs[(sm + lane % 16) * LD + k + lane / 16 * 8]);
      for (int j = 0; j < 2; j++) {
        uint32_t b[2];
        ldmatrix<2, false>(b, &Ws[(sn + j * 8 + lane % 8) * LD + k + lane / 8 % 2 * 8]);
        mma_m16n8k16<T>(ga[j], a, b);
        if (GATED) {
          ldmatrix<2, false>(b, &Us[(sn + j * 8 + lane % 8) * LD + k + lane / 8 % 2 * 8]);
          mma_m16n8k16<T>(ua[j], a, b);
        }
      }
    }
  }
  for (int j = 0; j < 2; j++) for (int i = 0; i < 4; i++) {
    const int rr = sm + g + 8 * (i / 2), cc = sn + j * 8 + t * 2 + i % 2;
    const float v = GATED ? ga[j][i] / (1.f + __expf(-ga[j][i])) * ua[j][i] : ga[j][i];
    if (rr < rows) y[size_t(row0 + rr) * N + col0 + cc] = T(v);
  }
