//! name: moe_gemm
//! inputs: x wg sg bg wu su bu tile_expert tile_row offsets
//! outputs: y
//! template: T=dtype MODE=int GATED=bool K=int N=int
//! grid: threads = (N/32*128, tiles, 1), threadgroup = (128, 1, 1)
// Grouped gate and up projections with a SiLU gate, over tiles of 32 rows of one expert. A plain
// kernel for testing the shim and its checker; not tuned.
#include <metal_stdlib>
#include <metal_simdgroup>
#include <metal_simdgroup_matrix>
using namespace metal;

//! include: dequant.h

template <typename T, int LD>
METAL_FUNC void multiply_tile(threadgroup const T* Xs, threadgroup const T* Ws,
                              thread simdgroup_matrix<float, 8, 8> (&acc)[2][2], int sm, int sn) {
  simdgroup_matrix<T, 8, 8> a[2], b[2];
  for (int k = 0; k < 32; k += 8) {
    for (int i = 0; i < 2; i++) simdgroup_load(a[i], Xs + (sm + i * 8) * LD + k, LD);
    for (int j = 0; j < 2; j++) simdgroup_load(b[j], Ws + (sn + j * 8) * LD + k, LD, ulong2(0, 0), true);
    simdgroup_barrier(mem_flags::mem_none);
    for (int i = 0; i < 2; i++)
      for (int j = 0; j < 2; j++) simdgroup_multiply_accumulate(acc[i][j], a[i], b[j], acc[i][j]);
  }
}
//! body
  constexpr int BM = 32, BN = 32, BK = 32, LD = BK + 16 / int(sizeof(T));
  threadgroup T Xs[BM * LD], Ws[BN * LD];
  threadgroup T Us[GATED ? BN * LD : 1];
  threadgroup float Cs[4][64];
  const uint3 tg = threadgroup_position_in_grid;
  const uint lid = thread_index_in_threadgroup;
  const uint sgi = simdgroup_index_in_threadgroup, lane = thread_index_in_simdgroup;
  const int e = tile_expert[tg.y], row0 = tile_row[tg.y], rows = min(BM, int(offsets[e + 1]) - row0);
  const int col0 = tg.x * BN;
  constexpr int GS = MODE == 0 ? 64 : 32;
  const size_t wo = (size_t(e) * N + col0) * K / 8, so = (size_t(e) * N + col0) * K / GS;
  const int sm = (sgi / 2) * 16, sn = (sgi % 2) * 16;
  simdgroup_matrix<float, 8, 8> ga[2][2], ua[2][2];
  for (int i = 0; i < 2; i++)
    for (int j = 0; j < 2; j++) ga[i][j] = ua[i][j] = simdgroup_matrix<float, 8, 8>(0.f);
  for (int k0 = 0; k0 < K; k0 += BK) {
    threadgroup_barrier(mem_flags::mem_threadgroup);  // BARRIER_A
    const int r = lid / 4, c = (lid % 4) * 8;
    for (int i = 0; i < 8; i++)
      Xs[r * LD + c + i] = r < rows ? x[size_t(row0 + r) * K + k0 + c + i] : T(0);
    stage_weights<T, MODE>(wg + wo, sg + so, bg + so, Ws, LD, K, k0, lid);
    if (GATED) stage_weights<T, MODE>(wu + wo, su + so, bu + so, Us, LD, K, k0, lid);
    threadgroup_barrier(mem_flags::mem_threadgroup);  // BARRIER_B
    multiply_tile<T, LD>(Xs, Ws, ga, sm, sn);
    if (GATED) multiply_tile<T, LD>(Xs, Us, ua, sm, sn);
  }
  for (int i = 0; i < 2; i++) for (int j = 0; j < 2; j++) {
    const float2 g = reinterpret_cast<thread float2&>(ga[i][j].thread_elements());
    const float2 u = reinterpret_cast<thread float2&>(ua[i][j].thread_elements());
    float2 v = g;
    if (GATED) v = g / (1.f + exp(-g)) * u;
    ga[i][j].thread_elements()[0] = v.x;
    ga[i][j].thread_elements()[1] = v.y;
    simdgroup_store(ga[i][j], Cs[sgi], 8);
    simdgroup_barrier(mem_flags::mem_threadgroup);    // BARRIER_C
    for (uint t = lane; t < 64; t += 32) {
      const int rr = sm + i * 8 + t / 8, cc = sn + j * 8 + t % 8;
      if (rr < rows) y[size_t(row0 + rr) * N + col0 + cc] = T(Cs[sgi][t]);
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);    // BARRIER_D
  }
