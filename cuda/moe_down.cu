//! name: moe_down
//! inputs: h places tiles w s b bias
//! outputs: y
//! template: T=dtype MODE=int GS=int K=int N=int BM=int BIAS=bool
//! grid: x 128 threads a strip of columns, y one block a tile
//! include: ptx.h
//! include: pairs.h
//! include: dequantize.h
//! include: grouped_gemm.h
// Second half of the expert MLP: y[places[r]] = h[r] W^T, rows sorted by expert. With the router's
// places this is the un-sort to [C K, N]; with places[r] = r the rows stay sorted.
//
//   h [R, K]  places [R], all different  tiles [n, 4]: expert, first row, rows, 0   y [rows, N]
//   w [E, N, K bits / 32]  s, b [E, N, K / GS]  bias [E, N]
//! body
  using Kernel = Gemm<T, MODE, GS, K, BM>;
  __shared__ __align__(16) T xs[Kernel::stages * Kernel::x_elements];
  __shared__ __align__(16) unsigned ws[Kernel::stages * Kernel::w_words];
  __shared__ __align__(16) unsigned cs[Kernel::stages * Kernel::c_words];
  const int expert = tiles[4 * blockIdx.y], row0 = tiles[4 * blockIdx.y + 1], rows = tiles[4 * blockIdx.y + 2];
  const int col0 = blockIdx.x * COLUMNS;
  if (col0 >= N) return;  // the grid is rounded up; the whole block leaves
  int row[Kernel::m_tiles];
#pragma unroll
  for (int i = 0; i < Kernel::m_tiles; i++) {
    const int r = threadIdx.x / 8 + 16 * i;
    row[i] = r < rows ? row0 + r : -1;
  }
  const Strip<T, typename Kernel::Scale> strips[2] = {
      strip_of<T, MODE, GS, K, N>(w, s, b, expert, col0),
      strip_of<T, MODE, GS, K, N>(w, s, b, expert, col0 + STRIP)};
  typename Kernel::Accumulators acc = {};
  Kernel::run(h, row, strips, xs, ws, cs, acc);

  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int m = 0; m < Kernel::m_tiles; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int r = 16 * m + 8 * half + g;
      if (r >= rows) continue;
      T* out = y + size_t(places[row0 + r]) * N;
#pragma unroll
      for (int strip = 0; strip < 2; strip++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const int col = col0 + STRIP * strip + 16 * warp + 8 * j + 2 * t;
          if (col >= N) continue;
          float2 plus = {0.f, 0.f};
          if (BIAS) plus = {float(bias[size_t(expert) * N + col]), float(bias[size_t(expert) * N + col + 1])};
          *reinterpret_cast<unsigned*>(out + col) =
              pack<T>(acc[strip][m][j][2 * half] + plus.x, acc[strip][m][j][2 * half + 1] + plus.y);
        }
    }
