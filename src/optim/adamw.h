// AdamW (PAPER 4; torch.optim.AdamW without amsgrad): dense, rows of unseen tokens move with their momentum.
#pragma once
#include <cstdint>

#include "ops/backend.h"
#include "optim/config.h"
#include "optim/slot.h"

namespace rownorm {

// m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2;  S = -lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
void adamw_step(Backend& be, const OptimizerConfig& config, const Slot& slot, Tensor lr, const UpdateControl& control,
                std::int64_t t);

}  // namespace rownorm
