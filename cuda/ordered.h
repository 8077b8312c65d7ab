// Numbers as integers of the same order.
#pragma once
#include <cuda_runtime.h>

#include "base/tensor.h"

namespace rownorm::cuda {

// In place, f32 <-> i32 and f64 <-> i64: integers in the order of the numbers, any NaN as the last (or the first) one.
// NCCL's minima and maxima of integers are then those of the numbers and drop no NaN, which those of floats may.
void to_ordered(Tensor t, bool nan_last, cudaStream_t stream);
void from_ordered(Tensor t, cudaStream_t stream);

}  // namespace rownorm::cuda
