//! name: expert_gate_up
//! inputs: x token_rows tiles act
//! inputs: gate_w gate_s gate_b gate_bias gate_global
//! inputs: up_w up_s up_b up_bias up_global
//! outputs: h
//! template: T=dtype FORMAT=int GROUP=int ACT=int GATED=bool BIASED=bool GLOBAL=bool BM=int BN=int
//! grid: (ceil(F / BN) * 128, tiles, 1), threadgroup (128, 1, 1)
//
// h[r] = activation(gate(x[token_rows[r]]), up(x[token_rows[r]])) for rows sorted by expert: both
// matrices and the activation in one pass over x, which is gathered as it is staged.
//
// x [T, D]; token_rows [R] int32: token of each sorted row; tiles [n, 3] int32: expert, first row,
// rows; act [2] float32: the activation's constants; per matrix: w [G, F, D packed], s and b
// [G, F, D / GROUP], bias [G, F], global [G]. h [R, F]. Arrays that a variant does not use are
// never read, any array may stand for them.
//! include: weights.h
//! include: activations.h
//! include: tile.h
//! body
  using namespace experts;
  using Shape = Tile<T, BM, BN>;
  constexpr int MATRICES = GATED ? 2 : 1;
  constexpr int LD = Shape::LD, TM = Shape::TM, TN = Shape::TN, UNITS = Shape::UNITS;
  threadgroup vec<T, 4> xs[BM * LD / 4];
  threadgroup vec<T, 4> ws[MATRICES * BN * LD / 4];

  const uint3 group = threadgroup_position_in_grid;
  const uint index = thread_index_in_threadgroup;
  const uint simdgroup = simdgroup_index_in_threadgroup;
  const int K = x_shape[1], N = gate_w_shape[1];
  const int e = tiles[group.y * 3], row0 = tiles[group.y * 3 + 1], rows = tiles[group.y * 3 + 2];
  const int col0 = int(group.x) * BN;
  const int sm = int(simdgroup) % Shape::ROW_GROUPS * Shape::SM;
  const int sn = int(simdgroup) / Shape::ROW_GROUPS * Shape::SN;

  const size_t weight = size_t(e) * N * gate_w_shape[2];
  const size_t scale = size_t(e) * N * (K / GROUP);
  const bool aligned = rows_aligned<FORMAT>(K);

  int sources[UNITS];
  EXPERTS_UNROLL
  for (int u = 0; u < UNITS; u++) {
    const int r = (int(index) + u * THREADS) / (BK / 4);
    sources[u] = r < rows ? token_rows[row0 + r] : -1;
  }

  simdgroup_matrix<float, 8, 8> acc[MATRICES][TM][TN];
  clear(acc);
  for (int k0 = 0; k0 < K; k0 += BK) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the last step's reads are over
    stage_rows<T, LD>(x, sources, K, k0, aligned, xs, index);
    stage_weights<T, FORMAT, GROUP, BN, LD>(
        gate_w + weight, gate_s + scale, gate_b + scale, col0, N, k0, K, aligned, ws, index);
    if (GATED) {
      stage_weights<T, FORMAT, GROUP, BN, LD>(
          up_w + weight, up_s + scale, up_b + scale, col0, N, k0, K, aligned, ws + BN * LD / 4,
          index);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);  // staged
    if (sm < rows) {  // of the whole simdgroup
      multiply<T, MATRICES, TM, TN, BN, LD>(
          (threadgroup const T*)xs + sm * LD, (threadgroup const T*)ws + sn * LD, acc);
    }
  }

  const ushort2 place = fragment_place(thread_index_in_simdgroup);
  const float gate_factor = GLOBAL ? float(gate_global[e]) / NVFP4_RANGE : 1.f;
  const float up_factor = GLOBAL ? float(up_global[e]) / NVFP4_RANGE : 1.f;
  EXPERTS_UNROLL
  for (int i = 0; i < TM; i++) {
    const int row = sm + i * 8 + place.x;
    EXPERTS_UNROLL
    for (int j = 0; j < TN; j++) {
      EXPERTS_UNROLL
      for (int c = 0; c < 2; c++) {
        const int col = col0 + sn + j * 8 + place.y + c;
        if (row < rows && col < N) {
          float g = acc[0][i][j].thread_elements()[c] * gate_factor;
          float u = acc[MATRICES - 1][i][j].thread_elements()[c] * up_factor;
          if (BIASED) {
            g += float(gate_bias[size_t(e) * N + col]);
            if (GATED) u += float(up_bias[size_t(e) * N + col]);
          }
          h[size_t(row0 + row) * N + col] = T(activate<ACT>(g, u, act[0], act[1]));
        }
      }
    }
  }
