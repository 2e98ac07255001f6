namespace experts {

// A threadgroup multiplies BM rows by BN columns in steps of BK; both operands are staged in
// threadgroup memory row by row, padded by 16 bytes so that rows start in different banks.
enum : int { BK = 32, THREADS = 128, SIMDGROUPS = THREADS / 32 };

// Simdgroups share a tile as ROW_GROUPS x (SIMDGROUPS / ROW_GROUPS): 16 rows are for one only.
template <typename T, int BM, int BN>
struct Tile {
  enum : int {
    LD = BK + 16 / int(sizeof(T)),
    ROW_GROUPS = BM == 16 ? 1 : 2,
    SM = BM / ROW_GROUPS,                // rows of a simdgroup
    SN = BN * ROW_GROUPS / SIMDGROUPS,   // columns of a simdgroup
    TM = SM / 8,
    TN = SN / 8,
    UNITS = BM * BK / 4 / THREADS        // runs of four row values that a thread stages
  };
};

// Row and first of two columns that a lane holds of an 8 x 8 fragment.
METAL_FUNC ushort2 fragment_place(uint lane) {
  const uint quad = lane / 4;
  return ushort2(ushort((quad & 4) + (lane / 2) % 4), ushort((quad & 2) * 2 + (lane % 2) * 2));
}

// Stages rows [BM, BK] of x from column k0. sources: x row of each unit, negative for a row beyond
// the tile, which becomes zero.
template <typename T, int LD, int UNITS>
METAL_FUNC void stage_rows(
    const device T* x, thread const int (&sources)[UNITS], int K, int k0, bool aligned,
    threadgroup vec<T, 4>* xs, uint thread_index) {
  EXPERTS_UNROLL
  for (int u = 0; u < UNITS; u++) {
    const int unit = int(thread_index) + u * THREADS, r = unit / (BK / 4), c = unit % (BK / 4) * 4;
    const int left = sources[u] < 0 ? 0 : K - k0 - c;
    const device T* row = x + size_t(max(sources[u], 0)) * K;
    xs[(r * LD + c) / 4] = load4(row + k0 + c, left, aligned);
  }
}

// Stages weights [BN, BK] of a matrix [N, K] from (row0, k0), dequantized; zero outside of it.
template <typename T, int FORMAT, int GROUP, int BN, int LD, typename W, typename S, typename B>
METAL_FUNC void stage_weights(
    const device W* w, const device S* s, const device B* b, int row0, int N, int k0, int K,
    bool aligned, threadgroup vec<T, 4>* ws, uint thread_index) {
  for (int unit = int(thread_index); unit < BN * BK / 8; unit += THREADS) {
    const int r = unit / (BK / 8), c = unit % (BK / 8) * 8;
    float4 lo = float4(0.f), hi = float4(0.f);
    if (row0 + r < N && k0 + c < K) {
      const uint i = uint(row0 + r) * uint(K) + uint(k0 + c);
      load_weights<FORMAT, GROUP>(w, s, b, i, K - k0 - c, aligned, lo, hi);
    }
    ws[(r * LD + c) / 4] = narrow<T>(lo);
    ws[(r * LD + c) / 4 + 1] = narrow<T>(hi);
  }
}

// acc[m] += xs [8 TM, BK] * (ws + m * BN * LD) [8 TN, BK]^T: one load of xs serves all matrices.
template <typename T, int MATRICES, int TM, int TN, int BN, int LD>
METAL_FUNC void multiply(
    threadgroup const T* xs, threadgroup const T* ws,
    thread simdgroup_matrix<float, 8, 8> (&acc)[MATRICES][TM][TN]) {
  EXPERTS_UNROLL
  for (int k = 0; k < BK; k += 8) {
    simdgroup_matrix<T, 8, 8> a[TM], b[TN];
    EXPERTS_UNROLL
    for (int i = 0; i < TM; i++) simdgroup_load(a[i], xs + i * 8 * LD + k, LD);
    EXPERTS_UNROLL
    for (int m = 0; m < MATRICES; m++) {
      threadgroup const T* columns = ws + m * BN * LD + k;
      EXPERTS_UNROLL
      for (int j = 0; j < TN; j++) {
        simdgroup_load(b[j], columns + j * 8 * LD, LD, ulong2(0, 0), true);
      }
      EXPERTS_UNROLL
      for (int i = 0; i < TM; i++) {
        EXPERTS_UNROLL
        for (int j = 0; j < TN; j++) {
          simdgroup_multiply_accumulate(acc[m][i][j], a[i], b[j], acc[m][i][j]);
        }
      }
    }
  }
}

template <int MATRICES, int TM, int TN>
METAL_FUNC void clear(thread simdgroup_matrix<float, 8, 8> (&acc)[MATRICES][TM][TN]) {
  EXPERTS_UNROLL
  for (int m = 0; m < MATRICES; m++) {
    EXPERTS_UNROLL
    for (int i = 0; i < TM; i++) {
      EXPERTS_UNROLL
      for (int j = 0; j < TN; j++) acc[m][i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.f);
    }
  }
}

}  // namespace experts
