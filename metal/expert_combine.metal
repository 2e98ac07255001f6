//! name: expert_combine
//! inputs: y table scores previous
//! outputs: out
//! template: O=dtype ADDED=bool
//! grid: (D, T, 1), threadgroup (256, 1, 1)
//
// out[t] = (ADDED ? previous[t] : 0) + sum over k of scores[t, k] * y[table[t, k]], in the order of
// k, in float32. A negative table entry is an expert of another read group: it adds nothing.
//
// y [R, D]; table [T, K] int32; scores [T, K]; previous, out [T, D].
#include <metal_stdlib>
using namespace metal;
//! body
  const uint3 at = thread_position_in_grid;
  const int D = y_shape[1], top_k = table_shape[1], column = int(at.x), token = int(at.y);
  float sum = ADDED ? float(previous[size_t(token) * D + column]) : 0.f;
  for (int k = 0; k < top_k; k++) {
    const int row = table[token * top_k + k];
    if (row >= 0) sum += float(scores[token * top_k + k]) * float(y[size_t(row) * D + column]);
  }
  out[size_t(token) * D + column] = O(sum);
