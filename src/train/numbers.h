// Where a number that is not finite came from, or one that ranks do not agree on.
#pragma once
#include <cstdint>
#include <string>

#include "comm/comm.h"
#include "ops/backend.h"
#include "train/training.h"

namespace rownorm {

bool all_finite(const void* host, DType dtype, std::int64_t n);  // f64, f32 or bf16

// The first tensor on any rank that holds a number that is not finite: weights, then what the last forward pass left,
// then gradients in the order in which backward makes them. "first found in blocks.0.gate.weight". All ranks call it.
std::string first_not_finite(Backend& be, Comm& comm, const Training& t);

// "" where every weight (as the products read it) has the same bits on all ranks, else the first matrix that has not:
// "blocks.0.gate.weight is not the same on rank 0 and rank 2". All ranks call it; it reads every weight.
std::string first_difference_of_ranks(Backend& be, Comm& comm, const Training& t);

}  // namespace rownorm
