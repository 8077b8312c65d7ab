// The exact row diameter of the head's step (PAPER 1 and 5): D(S) = max over i < j of ||s_i - s_j||_2, S with the
// learning rate and without weight decay.
#pragma once
#include <array>
#include <cstdint>

#include "base/arena.h"
#include "comm/comm.h"
#include "ops/backend.h"

namespace rownorm {

struct DiameterTensors {
  Tensor distance;  // (1) f64
  Tensor pair;      // (2) i32
  Tensor norms;     // (V) f64
};

struct StepGeometry {
  double diameter = 0;
  std::array<std::int32_t, 2> pair{};  // the token ids i < j that attain it, lexicographically first
  double row_norm_max = 0;
  double row_norm_median = 0;  // the lower of the two middle ones when V is even, as torch.median
};

DiameterTensors make_diameter(Arena& arena, std::int64_t vocab);

// step(V,d) whole on every rank; the ranks share the pairs.
StepGeometry measure_step(Backend& be, Comm& comm, const DiameterTensors& tensors, Tensor step);

}  // namespace rownorm
