#include "optim/muon.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace rownorm {

void muon_step(Backend& be, const OptimizerConfig& config, std::span<const Slot> slots, Tensor lr,
               const UpdateControl& control) {
  const double mu = config.momentum;
  const Backend::Momentum momentum = config.nesterov ? Backend::Momentum{mu, 1, mu, 1} : Backend::Momentum{mu, 1, 1, 0};
  for (const Slot& s : slots) be.momentum(s.step, s.first, s.gradient, control, momentum);

  std::map<std::pair<std::int64_t, std::int64_t>, std::vector<Tensor>> by_shape;
  for (const Slot& s : slots) by_shape[{s.step.dim(0), s.step.dim(1)}].push_back(s.step);
  for (const auto& [shape, steps] : by_shape)
    be.newton_schulz(steps, config.newton_schulz_steps, config.eps, config.newton_schulz_precision);

  for (const Slot& s : slots) {
    const double aspect = static_cast<double>(s.step.dim(0)) / static_cast<double>(s.step.dim(1));
    be.scale(s.step, lr, -std::sqrt(std::max(1.0, aspect)));
  }
}

}  // namespace rownorm
