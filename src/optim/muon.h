// Muon: momentum, then the nearest semi-orthogonal matrix by Newton-Schulz (PAPER 4).
#pragma once
#include <span>

#include "ops/backend.h"
#include "optim/config.h"
#include "optim/slot.h"

namespace rownorm {

// buf = mu buf + g;  direction = g + mu buf (Nesterov) or buf;
// S = -lr sqrt(max(1, m/n)) NewtonSchulz(direction) for each weight m x n (rows = outputs).
// `slots` are whole matrices; those of one shape are orthogonalised in one call.
void muon_step(Backend& be, const OptimizerConfig& config, std::span<const Slot> slots, Tensor lr,
               const UpdateControl& control);

}  // namespace rownorm
