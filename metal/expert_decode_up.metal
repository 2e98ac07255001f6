//! name: expert_decode_up
//! inputs: x ids slots slot_table dims act
//! outputs: h
//! template: T=dtype S=dtype FORMAT=int GROUP=int ACT=int GATED=bool BIASED=bool GLOBAL=bool
//! grid: (ceil(F / 8) * 64, T * K, 1), threadgroup (64, 1, 1)
//
// h[t, k] = activation(gate(x[t]), up(x[t])) of expert ids[t, k], its weights wherever the slot
// table says. For a handful of tokens: one product with a matrix per (token, expert) pair.
//
// x [T, D]; ids [T, K] int32; slots [words] uint32; slot_table [E, 3, 5] uint32: see decode.h,
// every offset a multiple of four words; dims [2] int32: F, D; act [2] float32. S: dtype of the
// checkpoint's floats (affine scales and biases, bias, plain weights). h [T * K, F].
//! include: weights.h
//! include: activations.h
//! include: decode.h
//! body
  using namespace experts;
  const int pair = int(threadgroup_position_in_grid.y), lane = int(thread_index_in_simdgroup);
  const int block = int(threadgroup_position_in_grid.x) * DECODE_SIMDGROUPS;
  const int row0 = (block + int(simdgroup_index_in_threadgroup)) * ROWS;
  const int N = dims[0], K = x_shape[1], token = pair / ids_shape[1];
  const device uint32_t* parts = slot_table + size_t(ids[pair]) * (PROJECTIONS * PARTS);
  const device uint32_t* gate_parts = parts + GATE * PARTS;
  const device uint32_t* up_parts = parts + UP * PARTS;
  const bool present = gate_parts[WEIGHT] != ABSENT;

  float gate[ROWS], up[ROWS];
  if (present) {
    lane_dots<FORMAT, GROUP, GLOBAL, S>(
        x + size_t(token) * K, slots, gate_parts, row0, N, K, lane, gate);
    if (GATED) {
      lane_dots<FORMAT, GROUP, GLOBAL, S>(
          x + size_t(token) * K, slots, up_parts, row0, N, K, lane, up);
    }
  }
  EXPERTS_UNROLL
  for (int r = 0; r < ROWS; r++) {
    float g = present ? simd_sum(gate[r]) : absent_result();
    float u = present && GATED ? simd_sum(up[r]) : 0.f;
    if (lane == r && row0 + r < N) {
      if (BIASED && present) {
        g += float(((const device S*)(slots + gate_parts[BIAS]))[row0 + r]);
        if (GATED) u += float(((const device S*)(slots + up_parts[BIAS]))[row0 + r]);
      }
      // Not through the activation: a clamp may turn a NaN into a number.
      h[size_t(pair) * N + row0 + r] = T(present ? activate<ACT>(g, u, act[0], act[1]) : g);
    }
  }
