// Opening a backend by name.
#pragma once
#include <memory>
#include <string>

#include "ops/backend.h"

namespace rownorm {

// device: auto (CUDA if it works, else the CPU), cpu, cuda, reference.
// precision: auto (cuda bf16, cpu fp32, reference fp64), bf16, tf32, fp32, fp64 (reference only).
// local_rank: which of this machine's devices; one rank a GPU. On the CPU the local_size ranks of this machine share
// its cores, unless OMP_NUM_THREADS says how many threads each has. Where auto takes the CPU, *no_cuda becomes the
// reason that CUDA does not work. Error exit 2: unknown name, or a precision that the device lacks; exit 5: cuda
// without a working module or device.
std::unique_ptr<Backend> open_backend(const std::string& device, const std::string& precision, int local_rank = 0,
                                      int local_size = 1, std::string* no_cuda = nullptr);

// The part of the above that needs no device: exit 2 for an unknown name or an impossible pair.
void check_device_and_precision(const std::string& device, const std::string& precision);

// One each, in their own folders. `processes` of this machine share its memory.
std::unique_ptr<Backend> make_reference_backend(int processes = 1);  // plain loops in f64: the specification
std::unique_ptr<Backend> make_cpu_backend(int processes = 1);        // f32, OpenMP and BLAS

}  // namespace rownorm
