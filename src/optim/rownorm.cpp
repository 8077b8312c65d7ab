#include "optim/rownorm.h"

#include <cmath>

namespace rownorm {

void rownorm_step(Backend& be, Comm* rows_over, const OptimizerConfig& config, const Slot& slot,
                  std::int64_t total_rows, Tensor column_sums, Tensor lr, const UpdateControl& control,
                  std::int64_t t) {
  const double beta = config.beta;
  be.momentum(slot.step, slot.first, slot.gradient, control,
              {beta, 1 - beta, 1 / (1 - std::pow(beta, static_cast<double>(t))), 0});
  const auto centre_rows = [&] {  // P A = A - 1 (1^T A) / V
    be.column_sum(column_sums, slot.step);
    if (rows_over) rows_over->all_reduce(column_sums, Reduction::sum);
    be.subtract_row(slot.step, column_sums, 1 / static_cast<double>(total_rows));
  };
  if (config.projected) centre_rows();
  be.row_normalize(slot.step, config.eps);
  if (config.projected) centre_rows();
  be.scale(slot.step, lr, -1);
}

}  // namespace rownorm
