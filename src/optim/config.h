// Hyper-parameters of the three optimizers (PAPER 4). Any of them may serve any role.
#pragma once
#include <array>

#include "ops/backend.h"

namespace rownorm {

enum class Algorithm { muon, adamw, rownorm };

// One role's optimizer. Fields that its algorithm does not have keep their defaults and are not written.
struct OptimizerConfig {
  Algorithm algorithm = Algorithm::adamw;
  double lr = 0;
  double weight_decay = 0;      // default by algorithm: muon 0.1, adamw 0.1, rownorm 0
  double eps = 0;               // muon 1e-5, adamw 1e-10, rownorm 1e-8
  double momentum = 0.95;       // muon
  bool nesterov = true;         // muon
  int newton_schulz_steps = 5;  // muon
  NewtonSchulzPrecision newton_schulz_precision = NewtonSchulzPrecision::fp32;  // muon
  std::array<double, 2> betas{0.9, 0.999};                                      // adamw
  double beta = 0.95;                                                           // rownorm
  bool projected = false;                                                       // rownorm
};

struct OptimizerConfigs {
  OptimizerConfig hidden, embedding, head;
};

}  // namespace rownorm
