// A module whose factory finds no device (test_open.cpp).
#include <cstdio>

#include "ops/backend.h"
#include "ops/cuda_module.h"

extern "C" int rownorm_cuda_abi() { return rownorm::cuda_module_abi; }

extern "C" rownorm::Backend* rownorm_cuda_backend(const char* precision, int local_rank, char* message,
                                                  std::size_t size) {
  std::snprintf(message, size, "no device %d for %s", local_rank, precision);
  return nullptr;
}
