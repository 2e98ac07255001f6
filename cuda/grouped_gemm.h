// The GEMM of both kernels. A block of four warps multiplies BM rows of one expert with two strips
// of 64 weight rows: the same rows of gate and up, or 128 neighbouring rows of one matrix. A warp
// owns 16 columns of each strip and all BM rows, so no weight is dequantized twice in a block.
//
//   x (cp.async)            -> shared, 16-byte chunks, swizzled -> A fragments
//   packed weights (cp.async) -> shared, as they are             -> registers -> B fragments
//   scales and biases       -> registers -> shared, one stage behind the copies
//
// The buffers take turns, one barrier a step: the buffer that step k fills was last read in step
// k - 1, which every thread has left when it passes the barrier of step k.
constexpr int BK = 64, STRIP = 64, COLUMNS = 2 * STRIP, THREADS = 128;

// Strip of an expert's matrix [N, K]: packed weights, scales, biases from its first row on.
template <typename T, typename Scale>
struct Strip {
  const unsigned* w;
  const Scale* s;
  const T* b;
  int rows;  // rows that exist, at most STRIP
};

// Sizes of a stage's shared arrays, and what a thread needs to move through k.
template <typename T, int MODE, int GS, int K, int BM>
struct Gemm {
  using F = Format<T, MODE>;
  using Scale = typename F::Scale;
  static constexpr int stages = F::bits == 8 ? 2 : 3;   // buffers that fit 48 KiB
  static constexpr int groups = GS < BK ? BK / GS : 1;  // of a row in a stage
  static constexpr int x_elements = BM * BK, w_words = COLUMNS * F::row_words, c_words = COLUMNS * groups;
  static constexpr int m_tiles = BM / 16, steps = (K + BK - 1) / BK;
  static_assert(K % 32 == 0 && BM % 16 == 0 && GS % 32 == 0, "shapes the fragments can hold");
  using Accumulators = float[2][m_tiles][2][4];  // strip, 16 rows, 8 columns, fragment

  struct Constants {  // scales and biases of one thread's row on their way to shared memory
    Scale s[groups];
    T b[groups];
  };

  // x rows of this thread: token[i] is the row of x for tile row tid / 8 + 16 i, negative if none.
  static __device__ __forceinline__ void copy_x(const T* x, const int (&token)[m_tiles], int k0, T* xs) {
    const int c = threadIdx.x % 8, k = k0 + 8 * c;
#pragma unroll
    for (int i = 0; i < m_tiles; i++) {
      const int r = threadIdx.x / 8 + 16 * i;
      const bool there = token[i] >= 0 && k < K;
      const T* from = there ? x + size_t(token[i]) * K + k : x;
      ptx::cp_async16(xs + r * BK + 8 * (c ^ (r % 2 * 4)), from, there ? 16 : 0);
    }
  }

  static __device__ __forceinline__ void copy_w(const Strip<T, Scale> (&strips)[2], int k0, unsigned* ws) {
    constexpr int chunks = BK * F::bits / 128;  // of 16 bytes in a row
#pragma unroll
    for (int s = 0; s < 2; s++)
#pragma unroll
      for (int i = 0; i < STRIP * chunks / THREADS; i++) {
        const int j = threadIdx.x + THREADS * i, r = j / chunks, c = j % chunks;
        const int k = k0 + c * (128 / F::bits);
        const bool there = r < strips[s].rows && k < K;
        const unsigned* from = there ? strips[s].w + (size_t(r) * K + k) / (32 / F::bits) : strips[s].w;
        ptx::cp_async16(ws + (STRIP * s + r) * F::row_words + 4 * c, from, there ? 16 : 0);
      }
  }

  // Thread i brings the constants of row i of the two strips; `strip` is the one it belongs to.
  static __device__ __forceinline__ void load_constants(const Strip<T, Scale>& strip, int k0, Constants& c) {
    const int r = threadIdx.x % STRIP;
#pragma unroll
    for (int i = 0; i < groups; i++) {
      const int k = k0 + i * GS;
      const bool there = r < strip.rows && k < K;
      const size_t at = size_t(r) * (K / GS) + k / GS;
      c.s[i] = there ? strip.s[at] : Scale(0);
      if constexpr (F::affine) c.b[i] = there ? strip.b[at] : T(0.f);
    }
  }

  static __device__ __forceinline__ void store_constants(const Constants& c, unsigned* cs) {
#pragma unroll
    for (int i = 0; i < groups; i++) {
      T bias = T(0.f);
      if constexpr (F::affine) bias = c.b[i];
      cs[threadIdx.x * groups + i] = group_constants<T>(c.s[i], bias);
    }
  }

  // acc += x w^T over the 64 k of one stage.
  static __device__ __forceinline__ void multiply(const T* xs, const unsigned* ws, const unsigned* cs,
                                                  Accumulators& acc) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int kk = 0; kk < BK / 32; kk++) {
      unsigned a[m_tiles][2][4];  // rows of 16, row g or g + 8
#pragma unroll
      for (int m = 0; m < m_tiles; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int r = 16 * m + 8 * h + g, c = (4 * kk + t) ^ (r % 2 * 4);
          split_row<F::interleaved>(*reinterpret_cast<const uint4*>(xs + r * BK + 8 * c), a[m][h]);
        }
#pragma unroll
      for (int s = 0; s < 2; s++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const int row = STRIP * s + 16 * warp + 8 * j + g;
          unsigned w[4];
          dequantize<T, MODE>(ws + row * F::row_words + kk * F::bits, t,
                              cs[row * groups + (groups > 1 ? kk : 0)], w);
          const unsigned b0[2] = {w[0], w[1]}, b1[2] = {w[2], w[3]};
#pragma unroll
          for (int m = 0; m < m_tiles; m++) {
            const unsigned a0[4] = {a[m][0][0], a[m][1][0], a[m][0][1], a[m][1][1]};
            const unsigned a1[4] = {a[m][0][2], a[m][1][2], a[m][0][3], a[m][1][3]};
            ptx::mma_m16n8k16<T>(acc[s][m][j], a0, b0);
            ptx::mma_m16n8k16<T>(acc[s][m][j], a1, b1);
          }
        }
    }
  }

  // The whole k loop. xs, ws, cs: `stages` buffers each. All threads of the block must call it.
  static __device__ __forceinline__ void run(const T* x, const int (&token)[m_tiles],
                                             const Strip<T, Scale> (&strips)[2], T* xs, unsigned* ws,
                                             unsigned* cs, Accumulators& acc) {
    const bool upper = threadIdx.x >= STRIP;
    const Strip<T, Scale> mine = {strips[0].w, upper ? strips[1].s : strips[0].s,
                                  upper ? strips[1].b : strips[0].b, upper ? strips[1].rows : strips[0].rows};
    Constants constants;
#pragma unroll
    for (int k = 0; k < stages - 1; k++) {
      if (k < steps) {
        copy_x(x, token, k * BK, xs + k * x_elements);
        copy_w(strips, k * BK, ws + k * w_words);
        load_constants(mine, k * BK, constants);
        store_constants(constants, cs + k * c_words);
      }
      ptx::cp_async_commit();
    }
    int now = 0, next = stages - 1;
    for (int k = 0; k < steps; k++) {
      ptx::cp_async_wait<stages - 2>();
      __syncthreads();
      const bool more = k + stages - 1 < steps;
      if (more) {
        copy_x(x, token, (k + stages - 1) * BK, xs + next * x_elements);
        copy_w(strips, (k + stages - 1) * BK, ws + next * w_words);
        load_constants(mine, (k + stages - 1) * BK, constants);
      }
      ptx::cp_async_commit();  // an empty group keeps the count of what may be outstanding
      multiply(xs + now * x_elements, ws + now * w_words, cs + now * c_words, acc);
      if (more) store_constants(constants, cs + next * c_words);
      now = now + 1 == stages ? 0 : now + 1;
      next = next + 1 == stages ? 0 : next + 1;
    }
  }
};

// The strip of expert `e` that starts at row `first` of its matrix [N, K].
template <typename T, int MODE, int GS, int K, int N>
__device__ __forceinline__ Strip<T, typename Format<T, MODE>::Scale> strip_of(
    const unsigned* w, const typename Format<T, MODE>::Scale* s, const T* b, int e, int first) {
  const int rows = min(STRIP, N - first);
  const size_t row = rows > 0 ? size_t(e) * N + first : 0;  // no address beyond the matrix
  return {w + row * (K / (32 / Format<T, MODE>::bits)), s + row * (K / GS),
          Format<T, MODE>::affine ? b + row * (K / GS) : b, rows};
}
