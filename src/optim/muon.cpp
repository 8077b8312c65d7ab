#include "optim/muon.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace rownorm {

void muon_step(Backend& be, const OptimizerConfig& config, std::span<const Slot> slots, Tensor lr,
               const UpdateControl& control) {
  const double mu = config.momentum;
  const Backend::Momentum momentum = config.nesterov ? Backend::Momentum{mu, 1, mu, 1} : Backend::Momentum{mu, 1, 1, 0};
  for (const Slot& s : slots) be.momentum(s.step, s.first, s.gradient, control, momentum);

  for (std::size_t begin = 0; begin < slots.size();) {
    std::vector<Tensor> same_shape;
    std::size_t end = begin;
    for (; end < slots.size() && slots[end].step.shape == slots[begin].step.shape; ++end)
      same_shape.push_back(slots[end].step);
    be.newton_schulz(same_shape, config.newton_schulz_steps, config.eps, config.newton_schulz_precision);
    begin = end;
  }

  for (const Slot& s : slots) {
    const double aspect = static_cast<double>(s.step.dim(0)) / static_cast<double>(s.step.dim(1));
    be.scale(s.step, lr, -std::sqrt(std::max(1.0, aspect)));
  }
}

}  // namespace rownorm
