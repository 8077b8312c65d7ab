#include "optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace rownorm {

double lr_scale(std::int64_t t, std::int64_t total, std::int64_t warmup, double min_ratio) {
  if (t < warmup) return static_cast<double>(t) / static_cast<double>(warmup);
  if (total - warmup <= 1) return min_ratio;
  const double progress = std::min(1.0, static_cast<double>(t - warmup) / static_cast<double>(total - warmup - 1));
  return min_ratio + (1 - min_ratio) * (1 + std::cos(std::numbers::pi * progress)) / 2;
}

}  // namespace rownorm
