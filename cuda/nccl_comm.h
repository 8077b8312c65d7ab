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

}  // namespace rownorm::cuda
