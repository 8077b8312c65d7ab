// One piece of a parameter as an optimizer sees it.
#pragma once
#include "base/tensor.h"

namespace rownorm {

// All (rows, cols) in master precision. An optimizer reads `gradient` (multiplied by the clip coefficient), updates its
// moments and writes the signed increment S, learning rate included and weight decay left out, into `step`.
struct Slot {
  Tensor weight, gradient, step;
  Tensor first;   // Muon, RowNorm: momentum buffer; AdamW: exp_avg
  Tensor second;  // AdamW: exp_avg_sq
};

}  // namespace rownorm
