// RowNorm: every row of the step has the same norm (PAPER 1 and 4).
#pragma once
#include <cstdint>

#include "comm/comm.h"
#include "ops/backend.h"
#include "optim/config.h"
#include "optim/slot.h"

namespace rownorm {

// B = beta B + (1 - beta) G,  Bhat = B / (1 - beta^t),  RN(A)_i = a_i / (||a_i||_2 + eps) (zero rows stay zero)
// S = -lr RN(Bhat), or projected, with P = I - 1 1^T / V:  S = -lr P RN(P Bhat).
// The slot may be a block of the matrix's `total_rows` rows: the projections' row means then go over all ranks of
// `rows_over` (null: the slot is the whole matrix). column_sums(cols) f64 is scratch.
void rownorm_step(Backend& be, Comm* rows_over, const OptimizerConfig& config, const Slot& slot,
                  std::int64_t total_rows, Tensor column_sums, Tensor lr, const UpdateControl& control, std::int64_t t);

}  // namespace rownorm
