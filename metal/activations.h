namespace experts {

// The numbers of mlx_stream/backends/kernels/activations.py. From GELU_TANH on: one argument.
enum Activation : int {
  SWIGLU = 0,
  SWIGLU_OAI = 1,            // a: alpha, b: limit
  SWIGLU_CLAMP_BEFORE = 2,   // b: limit, on the gate before SiLU
  SWIGLU_CLAMP_AFTER = 3,    // b: limit, on SiLU's result
  GEGLU_TANH = 4,
  GEGLU_ERF = 5,
  SITU = 6,                  // a: beta, b: linear beta or 0
  GELU_TANH = 16,
  GELU_ERF = 17,
  GELU_SIGMOID = 18,
  SILU = 19,
  RELU = 20,
  RELU_SQUARED = 21
};

METAL_FUNC float sigmoid(float x) {
  return 1.f / (1.f + exp(-x));
}

// Through sigmoid, which saturates where a fast tanh may overflow. Absolute accuracy.
METAL_FUNC float tanh_by_sigmoid(float x) {
  return 2.f * sigmoid(2.f * x) - 1.f;
}

// (1 + tanh(y)) / 2 is sigmoid(2 y).
METAL_FUNC float gelu_tanh(float x) {
  return x * sigmoid(1.5957691216057308f * x * (1.f + 0.044715f * x * x));
}

// Metal has no erf: Abramowitz and Stegun 7.1.26, absolute error of erf below 1.5e-7.
METAL_FUNC float gelu_erf(float x) {
  const float t = 1.f / (1.f + 0.23164189f * abs(x));  // 0.3275911 / sqrt(2)
  const float p = ((((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t +
                   0.254829592f) * t;
  const float tail = 0.5f * abs(x) * p * exp(-0.5f * x * x);
  return max(x, 0.f) - tail;
}

template <int ACT>
METAL_FUNC float activate(float gate, float up, float a, float b) {
  if constexpr (ACT == SWIGLU) {
    return gate * sigmoid(gate) * up;
  } else if constexpr (ACT == SWIGLU_OAI) {
    const float g = min(gate, b);
    return g * sigmoid(a * g) * (clamp(up, -b, b) + 1.f);
  } else if constexpr (ACT == SWIGLU_CLAMP_BEFORE) {
    const float g = min(gate, b);
    return g * sigmoid(g) * clamp(up, -b, b);
  } else if constexpr (ACT == SWIGLU_CLAMP_AFTER) {
    return min(gate * sigmoid(gate), b) * clamp(up, -b, b);
  } else if constexpr (ACT == GEGLU_TANH) {
    return gelu_tanh(gate) * up;
  } else if constexpr (ACT == GEGLU_ERF) {
    return gelu_erf(gate) * up;
  } else if constexpr (ACT == SITU) {
    const float linear = b > 0.f ? b * tanh_by_sigmoid(up / b) : up;
    return a * tanh_by_sigmoid(gate / a) * sigmoid(gate) * linear;
  } else if constexpr (ACT == GELU_TANH) {
    return gelu_tanh(gate);
  } else if constexpr (ACT == GELU_ERF) {
    return gelu_erf(gate);
  } else if constexpr (ACT == GELU_SIGMOID) {
    return gate * sigmoid(1.702f * gate);
  } else if constexpr (ACT == SILU) {
    return gate * sigmoid(gate);
  } else if constexpr (ACT == RELU) {
    return max(gate, 0.f);
  } else {
    static_assert(ACT == RELU_SQUARED, "unknown activation");
    return max(gate, 0.f) * max(gate, 0.f);
  }
}

}  // namespace experts
