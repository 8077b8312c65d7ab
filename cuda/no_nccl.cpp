// Stands in for nccl_comm.cpp in a build without NCCL's header.
#include "base/error.h"
#include "cuda/nccl_comm.h"

namespace rownorm::cuda {

std::unique_ptr<Comm> make_nccl_comm(Comm&, const CudaBackend&, double,
                                     const std::function<void(const std::string&)>&) {
  fail(Exit::device, "[nccl] the CUDA module was built without NCCL and uses one GPU; install nccl.h and build again");
}

}  // namespace rownorm::cuda
