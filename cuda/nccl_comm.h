// Ranks with a GPU each, which exchange tensors by NCCL (the contract is comm/comm.h).
#pragma once
#include <functional>
#include <memory>
#include <string>

#include "comm/comm.h"
#include "cuda/backend.h"

namespace rownorm::cuda {

std::unique_ptr<Comm> make_nccl_comm(Comm& ranks, const CudaBackend& backend, double timeout_seconds,
                                     const std::function<void(const std::string&)>& report);

// In place, f32 <-> i32 and f64 <-> i64: integers in the order of the numbers, any NaN as the last (or the first) one.
// NCCL's minima and maxima of integers are then those of the numbers and drop no NaN, which those of floats may.
void to_ordered(Tensor t, bool nan_last, cudaStream_t stream);
void from_ordered(Tensor t, cudaStream_t stream);

}  // namespace rownorm::cuda
