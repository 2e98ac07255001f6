// The expert activations of mlx-lm, in float. limit and alpha come from the module.
constexpr int SWIGLU = 0, CLAMP_AFTER = 1, CLAMP_BEFORE = 2, SWIGLU_OAI = 3, GEGLU = 4;
constexpr int GELU_TANH = 16, GELU_ERF = 17, GELU_FAST = 18, SILU = 19, RELU = 20, RELU2 = 21;

__device__ __forceinline__ float sigmoid(float x) { return 1.f / (1.f + __expf(-x)); }
__device__ __forceinline__ float clamp_to(float x, float limit) { return fminf(fmaxf(x, -limit), limit); }
__device__ __forceinline__ float gelu_tanh(float x) {
  return 0.5f * x * (1.f + tanhf(0.7978845608f * (x + 0.044715f * x * x * x)));
}

template <int ACT>
__device__ __forceinline__ float gated(float gate, float up, float limit, float alpha) {
  if constexpr (ACT == SWIGLU) return gate * sigmoid(gate) * up;
  if constexpr (ACT == CLAMP_AFTER) return fminf(gate * sigmoid(gate), limit) * clamp_to(up, limit);
  if constexpr (ACT == CLAMP_BEFORE) {
    gate = fminf(gate, limit);
    return gate * sigmoid(gate) * clamp_to(up, limit);
  }
  if constexpr (ACT == SWIGLU_OAI) {
    gate = fminf(gate, limit);
    return gate * sigmoid(alpha * gate) * (clamp_to(up, limit) + 1.f);
  }
  if constexpr (ACT == GEGLU) return gelu_tanh(gate) * up;
  return 0.f;
}

template <int ACT>
__device__ __forceinline__ float activate(float x) {
  if constexpr (ACT == GELU_TANH) return gelu_tanh(x);
  if constexpr (ACT == GELU_ERF) return 0.5f * x * (1.f + erff(0.7071067812f * x));
  if constexpr (ACT == GELU_FAST) return x * sigmoid(1.702f * x);
  if constexpr (ACT == SILU) return x * sigmoid(x);
  if constexpr (ACT == RELU) return fmaxf(x, 0.f);
  if constexpr (ACT == RELU2) return fmaxf(x, 0.f) * fmaxf(x, 0.f);
  return x;
}
