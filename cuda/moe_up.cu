//! name: moe_up
//! inputs: x tokens tiles wg sg bg wu su bu bias_g bias_u params
//! outputs: y
//! template: T=dtype MODE=int GS=int K=int N=int BM=int ACT=int GATED=bool BIAS=bool
//! grid: x 128 threads a strip of columns, y one block a tile
//! include: ptx.h
//! include: pairs.h
//! include: dequantize.h
//! include: activations.h
//! include: grouped_gemm.h
// First half of the expert MLP: y[r] = act(x[tokens[r]] Wg^T, x[tokens[r]] Wu^T), rows sorted by
// expert; without GATED y[r] = act(x[tokens[r]] Wg^T), the SwitchMLP form.
//
//   x [*, K]  tokens [R]  tiles [n, 4]: expert, first row, rows, 0   y [R, N]
//   wg, wu [E, N, K bits / 32]  s*, b* [E, N, K / GS]  bias_* [E, N]  params: limit, alpha
//
// A tile never straddles experts. Formats without biases, GATED = false and BIAS = false leave the
// arrays they do not need unread.
//! body
  using Kernel = Gemm<T, MODE, GS, K, BM>;
  constexpr int BN = GATED ? STRIP : COLUMNS;
  __shared__ __align__(16) T xs[Kernel::stages * Kernel::x_elements];
  __shared__ __align__(16) unsigned ws[Kernel::stages * Kernel::w_words];
  __shared__ __align__(16) unsigned cs[Kernel::stages * Kernel::c_words];
  const int expert = tiles[4 * blockIdx.y], row0 = tiles[4 * blockIdx.y + 1], rows = tiles[4 * blockIdx.y + 2];
  const int col0 = blockIdx.x * BN;
  if (col0 >= N) return;  // the grid is rounded up; the whole block leaves
  int token[Kernel::m_tiles];
#pragma unroll
  for (int i = 0; i < Kernel::m_tiles; i++) {
    const int r = threadIdx.x / 8 + 16 * i;
    token[i] = r < rows ? tokens[row0 + r] : -1;
  }
  const Strip<T, typename Kernel::Scale> strips[2] = {
      strip_of<T, MODE, GS, K, N>(wg, sg, bg, expert, col0),
      GATED ? strip_of<T, MODE, GS, K, N>(wu, su, bu, expert, col0)
            : strip_of<T, MODE, GS, K, N>(wg, sg, bg, expert, col0 + STRIP)};
  typename Kernel::Accumulators acc = {};
  Kernel::run(x, token, strips, xs, ws, cs, acc);

  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const float limit = params[0], alpha = params[1];
#pragma unroll
  for (int s = 0; s < (GATED ? 1 : 2); s++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int col = col0 + STRIP * s + 16 * warp + 8 * j + 2 * t;
      if (col >= N) continue;
      float2 plus = {0.f, 0.f}, plus_up = {0.f, 0.f};
      if (BIAS) {
        const size_t at = size_t(expert) * N + col;
        plus = {float(bias_g[at]), float(bias_g[at + 1])};
        if (GATED) plus_up = {float(bias_u[at]), float(bias_u[at + 1])};
      }
#pragma unroll
      for (int m = 0; m < Kernel::m_tiles; m++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int r = 16 * m + 8 * h + g;
          if (r >= rows) continue;
          const float first = acc[s][m][j][2 * h] + plus.x, second = acc[s][m][j][2 * h + 1] + plus.y;
          unsigned out;
          if constexpr (GATED)
            out = pack<T>(gated<ACT>(first, acc[1][m][j][2 * h] + plus_up.x, limit, alpha),
                          gated<ACT>(second, acc[1][m][j][2 * h + 1] + plus_up.y, limit, alpha));
          else
            out = pack<T>(activate<ACT>(first), activate<ACT>(second));
          *reinterpret_cast<unsigned*>(y + size_t(row0 + r) * N + col) = out;
        }
    }
