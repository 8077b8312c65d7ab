// Sizes of the model and what follows from them (PAPER 2).
#pragma once
#include <cstdint>

namespace rownorm {

struct ModelConfig {
  std::int64_t vocab_size = 0;
  std::int64_t context = 0;
  std::int64_t layers = 0;
  std::int64_t width = 0;
  std::int64_t head_dim = 0;
  std::int64_t mlp_ratio = 4;
  double rope_base = 10000;
  double norm_eps = 1e-6;
  double init_std = 0.02;

  std::int64_t heads() const { return width / head_dim; }
  std::int64_t mlp_width() const { return mlp_ratio * width; }
};

// layers * (4 d^2 + 3 mlp_ratio d^2) + 2 V d; with mlp_ratio 4: 16 d^2 a layer.
std::int64_t parameter_count(const ModelConfig& model);

// Floating-point operations of forward and backward a token: 6 * (block parameters + V d) + 6 L T d (causal attention).
double flops_per_token(const ModelConfig& model);

}  // namespace rownorm
