#include "model/config.h"

namespace rownorm {

namespace {

std::int64_t block_parameters(const ModelConfig& m) { return m.layers * (4 + 3 * m.mlp_ratio) * m.width * m.width; }

}  // namespace

std::int64_t parameter_count(const ModelConfig& m) { return block_parameters(m) + 2 * m.vocab_size * m.width; }

double flops_per_token(const ModelConfig& m) {
  const auto V = static_cast<double>(m.vocab_size), d = static_cast<double>(m.width);
  const auto L = static_cast<double>(m.layers), T = static_cast<double>(m.context);
  // Each weight: one multiply-add forward, two backward. Attention: q k^T and a v over T/2 positions on average.
  return 6 * (static_cast<double>(block_parameters(m)) + V * d) + 6 * L * T * d;
}

}  // namespace rownorm
