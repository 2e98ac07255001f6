//! name: moe_combine
//! inputs: rows places scores y_in
//! outputs: y
//! template: T=dtype D=int ADD=bool
//! grid: x one thread eight elements of a token
//! include: pairs.h
// The router's weighted sum without atomics: y[c] = y_in[c] + sum over k of scores[c, k] rows[places[c, k]].
// places[c, k] is negative where expert k of token c is not among these rows. The sum runs in the
// order of k, in float, so it is the same every time. Without ADD y_in is not read.
//
//   rows [R, D]  places, scores [C, topk]  y_in, y [C, D]
//! body
  constexpr int CHUNKS = D / 8;
  const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= static_cast<long long>(places_shape[0]) * CHUNKS) return;  // the grid is rounded up
  const int token = static_cast<int>(i / CHUNKS), d = static_cast<int>(i % CHUNKS) * 8;
  const int topk = places_shape[1];
  const size_t at = size_t(token) * D + d;
  float2 sum[4] = {};
  if (ADD) {
    const uint4 v = *reinterpret_cast<const uint4*>(y_in + at);
    const unsigned parts[4] = {v.x, v.y, v.z, v.w};
    for (int j = 0; j < 4; j++) sum[j] = unpack<T>(parts[j]);
  }
  for (int k = 0; k < topk; k++) {
    const int place = places[size_t(token) * topk + k];
    if (place < 0) continue;
    const float score = scores[size_t(token) * topk + k];
    const uint4 v = *reinterpret_cast<const uint4*>(rows + size_t(place) * D + d);
    const unsigned parts[4] = {v.x, v.y, v.z, v.w};
    for (int j = 0; j < 4; j++) {
      const float2 f = unpack<T>(parts[j]);
      sum[j].x = fmaf(score, f.x, sum[j].x);
      sum[j].y = fmaf(score, f.y, sum[j].y);
    }
  }
  *reinterpret_cast<uint4*>(y + at) = make_uint4(pack<T>(sum[0].x, sum[0].y), pack<T>(sum[1].x, sum[1].y),
                                                 pack<T>(sum[2].x, sum[2].y), pack<T>(sum[3].x, sum[3].y));
