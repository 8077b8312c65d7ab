// Which rank owns which rows of which parameter. Only the owner keeps optimizer state and makes the update: layers
// round robin, embedding and head in row blocks, whole by one rank where Muon needs the whole matrix.
#pragma once
#include <cstdint>
#include <vector>

#include "model/parameters.h"
#include "optim/config.h"

namespace rownorm {

struct Piece {
  std::size_t parameter;    // index in parameter_table
  std::int64_t begin, end;  // rows; may be empty where there are more ranks than rows
  int owner;
};

const OptimizerConfig& config_of(const OptimizerConfigs& configs, Role role);

// Every row of every parameter exactly once, in table order. Deterministic in (table, configs, ranks).
std::vector<Piece> divide(const std::vector<ParameterInfo>& table, const OptimizerConfigs& configs, int ranks);

}  // namespace rownorm
