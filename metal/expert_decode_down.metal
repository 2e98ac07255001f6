//! name: expert_decode_down
//! inputs: h ids slots slot_table dims scores
//! outputs: y
//! template: T=dtype S=dtype FORMAT=int GROUP=int COMBINED=bool BIASED=bool GLOBAL=bool
//! grid: (ceil(D / 8) * 64, COMBINED ? T : T * K, 1), threadgroup (64, 1, 1)
//
// y[t] = sum over k of scores[t, k] * down(h[t, k]), in the order of k; without COMBINED
// y[t, k] = down(h[t, k]). The experts are those of ids[t, k], found through the slot table.
//
// h [T * K, F]; ids [T, K] int32; slots, slot_table: as expert_decode_up; dims [2] int32: F, D;
// scores [T, K]. y [T, D] or [T, K, D].
//! include: weights.h
//! include: decode.h
//! body
  using namespace experts;
  const int lane = int(thread_index_in_simdgroup), outer = int(threadgroup_position_in_grid.y);
  const int block = int(threadgroup_position_in_grid.x) * DECODE_SIMDGROUPS;
  const int row0 = (block + int(simdgroup_index_in_threadgroup)) * ROWS;
  const int N = dims[1], K = dims[0];
  const int pairs = COMBINED ? ids_shape[1] : 1;

  // Every lane keeps its share of the weighted sum: one reduction per output, not one per expert.
  float sums[ROWS], part[ROWS];
  EXPERTS_UNROLL
  for (int r = 0; r < ROWS; r++) sums[r] = 0.f;
  for (int p = outer * pairs; p < (outer + 1) * pairs; p++) {
    const float score = COMBINED ? float(scores[p]) : 1.f;
    const device uint32_t* parts =
        slot_table + size_t(ids[p]) * (PROJECTIONS * PARTS) + DOWN * PARTS;
    if (parts[WEIGHT] == ABSENT) {
      EXPERTS_UNROLL
      for (int r = 0; r < ROWS; r++) sums[r] = absent_result();
      continue;
    }
    lane_dots<FORMAT, GROUP, GLOBAL, S>(h + size_t(p) * K, slots, parts, row0, N, K, lane, part);
    EXPERTS_UNROLL
    for (int r = 0; r < ROWS; r++) {
      if (BIASED && lane == 0 && row0 + r < N) {
        part[r] += float(((const device S*)(slots + parts[BIAS]))[row0 + r]);
      }
      sums[r] += score * part[r];
    }
  }
  EXPERTS_UNROLL
  for (int r = 0; r < ROWS; r++) {
    const float v = simd_sum(sums[r]);
    if (lane == r && row0 + r < N) y[size_t(outer) * N + row0 + r] = T(v);
  }
