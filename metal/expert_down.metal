//! name: expert_down
//! inputs: h places tiles w s b bias tensor_scale
//! outputs: y
//! template: T=dtype FORMAT=int GROUP=int PLACED=bool BIASED=bool GLOBAL=bool BM=int BN=int
//! grid: (ceil(D / BN) * 128, tiles, 1), threadgroup (128, 1, 1)
//
// y[places[r]] = down(h[r]) for rows sorted by expert; without PLACED y[r]. Each row has its own
// place, so the result does not depend on the order of the tiles.
//
// h [R, F]; places [R] int32; tiles [n, 3] int32: expert, first row, rows; w [G, D, F packed],
// s and b [G, D, F / GROUP], bias [G, D], tensor_scale [G]. y [R, D]. Arrays
// that a variant does not use are never read.
//! include: weights.h
//! include: tile.h
//! body
  using namespace experts;
  using Shape = Tile<T, BM, BN>;
  constexpr int LD = Shape::LD, TM = Shape::TM, TN = Shape::TN, UNITS = Shape::UNITS;
  threadgroup vec<T, 4> xs[BM * LD / 4];
  threadgroup vec<T, 4> ws[BN * LD / 4];

  const uint3 group = threadgroup_position_in_grid;
  const uint index = thread_index_in_threadgroup;
  const uint simdgroup = simdgroup_index_in_threadgroup;
  const int K = h_shape[1], N = w_shape[1];
  const int e = tiles[group.y * 3], row0 = tiles[group.y * 3 + 1], rows = tiles[group.y * 3 + 2];
  const int col0 = int(group.x) * BN;
  const int sm = int(simdgroup) % Shape::ROW_GROUPS * Shape::SM;
  const int sn = int(simdgroup) / Shape::ROW_GROUPS * Shape::SN;

  const size_t weight = size_t(e) * N * w_shape[2];
  const size_t scale = size_t(e) * N * (K / GROUP);
  const bool aligned = rows_aligned<FORMAT>(K);

  int sources[UNITS];
  EXPERTS_UNROLL
  for (int u = 0; u < UNITS; u++) {
    const int r = (int(index) + u * THREADS) / (BK / 4);
    sources[u] = r < rows ? row0 + r : -1;
  }

  simdgroup_matrix<float, 8, 8> acc[1][TM][TN];
  clear(acc);
  for (int k0 = 0; k0 < K; k0 += BK) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // the last step's reads are over
    stage_rows<T, LD>(h, sources, K, k0, aligned, xs, index);
    stage_weights<T, FORMAT, GROUP, BN, LD>(
        w + weight, s + scale, b + scale, col0, N, k0, K, aligned, ws, index);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // staged
    if (sm < rows) {  // of the whole simdgroup
      multiply<T, 1, TM, TN, BN, LD>(
          (threadgroup const T*)xs + sm * LD, (threadgroup const T*)ws + sn * LD, acc);
    }
  }

  const ushort2 place = fragment_place(thread_index_in_simdgroup);
  const float factor = GLOBAL ? float(tensor_scale[e]) / NVFP4_RANGE : 1.f;
  EXPERTS_UNROLL
  for (int i = 0; i < TM; i++) {
    const int row = sm + i * 8 + place.x;
    if (row >= rows) continue;
    const int target = PLACED ? int(places[row0 + row]) : row0 + row;
    EXPERTS_UNROLL
    for (int j = 0; j < TN; j++) {
      EXPERTS_UNROLL
      for (int c = 0; c < 2; c++) {
        const int col = col0 + sn + j * 8 + place.y + c;
        if (col < N) {
          float v = acc[0][i][j].thread_elements()[c] * factor;
          if (BIASED) v += float(bias[size_t(e) * N + col]);
          y[size_t(target) * N + col] = T(v);
        }
      }
    }
  }
