// The CUDA backend is a module of its own, so that one executable runs with and without a GPU.
#pragma once
#include <filesystem>
#include <memory>
#include <string>

#include "ops/backend.h"

namespace rownorm {

// Says which Backend the two sides were compiled against: whoever changes ops/backend.h or comm/comm.h counts it up.
inline constexpr int cuda_module_abi = 5;

// The backend that the module's factory makes on device number `local_rank` of this machine,
//   extern "C" int rownorm_cuda_abi();
//   extern "C" rownorm::Backend* rownorm_cuda_backend(const char* precision, int local_rank, char* message,
//                                                     std::size_t size);
// (a third function of the module, rownorm_cuda_comm, is make_nccl's of comm/comm.h). Where a rank sees one device
// only, that is it, whatever its number: the launcher may have given each its own. Error (exit 5) that says why there
// is none: no module, one that cannot be loaded or is of another build, or what the factory wrote to `message` when it
// returned null (no device, most of all). The module stays loaded.
std::unique_ptr<Backend> open_cuda_module(const std::filesystem::path& module, const std::string& precision,
                                          int local_rank);

}  // namespace rownorm
