#include "optim/adamw.h"

namespace rownorm {

void adamw_step(Backend& be, const OptimizerConfig& config, const Slot& slot, Tensor lr, const UpdateControl& control,
                std::int64_t t) {
  be.adamw(slot.step, slot.first, slot.second, slot.gradient, lr, control,
           {config.betas[0], config.betas[1], config.eps}, t);
}

}  // namespace rownorm
