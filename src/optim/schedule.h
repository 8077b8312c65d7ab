// The learning-rate schedule: one factor for every role's peak rate (PAPER 4).
#pragma once
#include <cstdint>

namespace rownorm {

// Factor of update index t = 0, 1, ... of T = total with w = warmup < T:
//   t < w:  t / w   (so the first update has rate 0)
//   else:   m + (1 - m) * (1 + cos(pi * p)) / 2,  p = min(1, (t - w) / (T - w - 1)),  m = min_ratio;  m if T - w = 1.
double lr_scale(std::int64_t t, std::int64_t total, std::int64_t warmup, double min_ratio);

}  // namespace rownorm
