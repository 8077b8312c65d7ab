// A module whose factory finds no device (test_open.cpp).
#include <cstdio>

#include "ops/backend.h"

extern "C" rownorm::Backend* rownorm_cuda_backend(const char* precision, char* message, std::size_t size) {
  std::snprintf(message, size, "no device for %s", precision);
  return nullptr;
}
