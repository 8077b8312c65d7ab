#include "optim/ownership.h"

namespace rownorm {

const OptimizerConfig& config_of(const OptimizerConfigs& configs, Role role) {
  switch (role) {
    case Role::hidden:
      return configs.hidden;
    case Role::embedding:
      return configs.embedding;
    case Role::head:
      return configs.head;
  }
  throw std::logic_error("[ownership] unknown role");
}

std::vector<Piece> divide(const std::vector<ParameterInfo>& table, const OptimizerConfigs& configs, int ranks) {
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < table.size(); ++i) {
    const ParameterInfo& p = table[i];
    if (p.role == Role::hidden) {
      pieces.push_back({i, 0, p.rows, static_cast<int>(p.layer % ranks)});
    } else if (config_of(configs, p.role).algorithm == Algorithm::muon) {
      pieces.push_back({i, 0, p.rows, p.role == Role::embedding ? 0 : ranks - 1});
    } else {
      for (int r = 0; r < ranks; ++r) pieces.push_back({i, p.rows * r / ranks, p.rows * (r + 1) / ranks, r});
    }
  }
  return pieces;
}

}  // namespace rownorm
